"""ZeRO stage 3 gathers the weights of layers in fp8 in one byte an element: the same bits as gathers in bf16."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshfold.engine import Engine
from meshfold.kernels import FP8_RECIPES, Fp8WeightError, fp8_cast_weight
from meshfold.mesh import record
from meshfold.mesh.testing import run_on_ranks
from meshfold.models import build
from meshfold.zero_gemini.memory.arena import Block

WORDS, LENGTH = 64, 16
ZERO: dict[str, Any] = dict(data=2, zero=dict(stage=3, placement="cuda"))


def llama(**sizes: int) -> nn.Module:
    sizes = dict(hidden=64, layers=2, heads=4, kv_heads=2, ffn=128, vocab_size=WORDS, max_positions=LENGTH) | sizes
    return build("llama-tiny", **sizes)


wide = partial(llama, hidden=256, ffn=1024)  # several chunks


def in_fp8(recipe: str = "rowwise", **keys: Any) -> dict[str, Any]:
    return dict(name="bf16", matmul="fp8", recipe=recipe, gather="fp8") | keys


def batch() -> dict[str, Tensor]:
    ids = (torch.arange(8)[:, None] * 5 + 3 * torch.arange(LENGTH)) % WORDS
    return dict(input_ids=ids, labels=ids)


def trained(
    precision: object,
    parallel: dict[str, Any],
    *,
    model: Callable[[], nn.Module] = llama,
    steps: int = 2,
    **given: Any,
) -> tuple[list[float], dict[str, Tensor], Counter[int], str]:
    """Losses of steps and of an evaluation, weights, the bytes of the last step's all-gathers, and the report."""
    micro_steps = given.get("gradient_accumulation", 1)
    torch.manual_seed(1)
    given.setdefault("optimizer", dict(name="adamw", lr=1e-2))
    with Engine(model, parallel, precision=precision, **given) as engine:
        rows = engine.shard_batch(batch())["input_ids"]
        found = []
        for _ in range(steps):
            with record() as log:
                found += [engine.train_step(dict(input_ids=ids, labels=ids)) for ids in rows.chunk(micro_steps)]
        sent = Counter(int(entry.bytes) for entry in log.entries if entry.kind == "all_gather")
        found.append(engine.eval_step(dict(input_ids=rows, labels=rows)))
        found.append(engine.train_step(dict(input_ids=rows, labels=rows)) if micro_steps == 1 else 0.0)
        return found, engine.full_state_dict(), sent, str(engine.fp8_layers)


def same_bits(recipe: str, parallel: dict[str, Any], **given: Any) -> tuple[Counter[int], Counter[int]]:
    """Train with gathers in fp8 and in bf16; return the bytes of both."""
    one = trained(in_fp8(recipe), parallel, **given)
    other = trained(in_fp8(recipe, gather="bf16"), parallel, **given)
    assert one[0] == other[0]
    assert all(torch.equal(value, other[1][name]) for name, value in one[1].items())
    assert "zero gathers their weights in fp8" in one[3] and "gathers" not in other[3]
    return one[2], other[2]


def compare(recipe: str, given: dict[str, Any]) -> None:
    same_bits(recipe, ZERO, **given)


def compare_pushes() -> None:
    """Copy engines carry operands in fp8, too."""
    pushed = dict(ZERO, zero=dict(ZERO["zero"], transport="push"))
    found, wanted = (trained(in_fp8("rowwise_hp_dw"), parallel) for parallel in (pushed, ZERO))
    assert found[0] == wanted[0] and found[2] == wanted[2]


def test_operands_are_pushed_with_the_same_bits() -> None:
    run_on_ranks(2, compare_pushes)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("recipe", "given"),
    [
        pytest.param("rowwise", {}, marks=pytest.mark.slow),
        ("rowwise_hp_dw", dict(recompute="blocks")),
        ("tensorwise", dict(gradient_accumulation=2)),
        pytest.param("tensorwise", {}, marks=pytest.mark.slow),
        pytest.param("rowwise_hp_dw", dict(gradient_accumulation=2), marks=pytest.mark.slow),
        pytest.param("rowwise", dict(compile=dict(backend="aot_eager")), marks=pytest.mark.slow),
        pytest.param(
            "rowwise_hp_dw", dict(compile=dict(backend="aot_eager"), recompute="blocks"), marks=pytest.mark.slow
        ),
        pytest.param("tensorwise", dict(compile=dict(backend="aot_eager")), marks=pytest.mark.slow),
        pytest.param("rowwise", dict(compile=True, gradient_accumulation=2), marks=pytest.mark.slow),
        pytest.param("rowwise", dict(optimizer=dict(name="muon", lr=1e-3)), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_losses_and_weights_have_the_same_bits(recipe: str, given: dict[str, Any]) -> None:
    run_on_ranks(2, compare, recipe, given)


def compare_poisoned(keys: dict[str, Any]) -> None:
    """Memory that is given back to a chunk is NaN, in 16 bits and in 8, until it is gathered: nobody reads it earlier."""
    own = Block.restore

    def restore(block: Block) -> None:
        comes_back = not block.tensor.untyped_storage().nbytes()
        own(block)
        if comes_back:
            block.tensor.view(torch.uint8).data.fill_(0xFF)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Block, "restore", restore)
        same_bits("rowwise", dict(ZERO, zero=dict(ZERO["zero"], **keys)), compile=dict(backend="aot_eager"), steps=1)


@pytest.mark.slow
@pytest.mark.parametrize("keys", [{}, dict(reshard_after_forward=False, transport="push")], ids=str)
def test_compiled_code_reads_no_operand_that_is_not_gathered(keys: dict[str, Any]) -> None:
    run_on_ranks(2, compare_poisoned, keys)


def bytes_sent() -> None:
    for recipe, given in (("rowwise", dict(recompute="blocks")), ("tensorwise", {})):  # three gathers, and two
        fp8, bf16 = same_bits(recipe, ZERO, model=wide, steps=2, **given)
        # All linear layers of the blocks; a rank counts what all have, in two bytes.
        of_blocks = 2 * 2 * (4 * 256 * 256 - 2 * 128 * 256 + 3 * 256 * 1024)
        total = sum(size * count for size, count in fp8.items()), sum(size * count for size, count in bf16.items())
        gathers = 3 if given and recipe == "rowwise" else 2
        assert total[0] < total[1], (recipe, given)
        assert total[0] == pytest.approx(gathers * of_blocks / 4, rel=0.15), (recipe, given, total, of_blocks)
        assert total[1] == pytest.approx(2 * of_blocks / 2, rel=0.15), (recipe, given, total, of_blocks)


def test_half_the_bytes_are_sent() -> None:
    run_on_ranks(2, bytes_sent)


def wanted_operands(recipe: str) -> dict[str, list[Tensor]]:
    """The bits that one process makes of the weights of its first step."""
    torch.manual_seed(1)
    with Engine(llama, precision=in_fp8(recipe, gather="bf16"), optimizer=dict(name="sgd", lr=0.0)) as engine:
        assert engine.fp8_layers is not None
        found = {}
        for name in engine.fp8_layers.layers:
            made = fp8_cast_weight(engine.model.get_submodule(name).weight.detach(), FP8_RECIPES[recipe])  # type: ignore[arg-type]
            found[name] = [each for one in made for each in (one.values.view(torch.uint8), one.inverse)]
    return found


def compare_operands(recipe: str, parallel: dict[str, Any], wanted: dict[str, list[Tensor]]) -> None:
    torch.manual_seed(1)
    with Engine(llama, parallel, precision=in_fp8(recipe), optimizer=dict(name="sgd", lr=0.0)) as engine:
        seen: dict[str, tuple[Tensor, ...]] = {}

        def look(name: str, layer: nn.Module, *_: object) -> None:
            seen[name] = tuple(each.clone() for each in layer.fp8_weight.operands)  # type: ignore[union-attr]

        for name in wanted:
            layer = engine.model.get_submodule(name)
            layer.register_forward_hook(partial(look, f"forward {name}"))
            layer.register_full_backward_hook(partial(look, f"backward {name}"))
        engine.train_step(engine.shard_batch(batch()))
        for name, (y, inverse, dx, turned) in wanted.items():
            forward, backward = seen[f"forward {name}"], seen[f"backward {name}"]
            assert torch.equal(forward[0].view(torch.uint8), y) and torch.equal(forward[1], inverse), name
            assert torch.equal(backward[2].view(torch.uint8), dx) and torch.equal(backward[3], turned), name


@pytest.mark.few(1)
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_operands_are_those_of_one_process(recipe: str) -> None:
    run_on_ranks(2, compare_operands, recipe, ZERO, wanted_operands(recipe))


def reads() -> None:
    """Readers of ``layer.weight`` are refused, in a forward only; readers of the parameter get NaN."""
    precision, optimizer = in_fp8(), dict(name="sgd", lr=0.1)
    with Engine(llama, ZERO, precision=precision, optimizer=optimizer) as engine:
        layer = engine.model.get_submodule("blocks.0.attn.qkv")
        engine.train_step(engine.shard_batch(batch()))
        assert layer.weight.numel() == 0  # released
        with pytest.raises(Fp8WeightError, match="is used while it is released"):
            layer.forward(torch.zeros(2, 64, dtype=torch.bfloat16))  # without hooks, which gather
        handle = layer.register_forward_pre_hook(lambda module, args: (args[0] + module.weight.sum() * 0,))
        with pytest.raises(Fp8WeightError) as refused:
            engine.train_step(engine.shard_batch(batch()))
        assert "'blocks.0.attn.qkv.weight' was read" in str(refused.value)
        assert "gather='bf16'" in str(refused.value) and "keep=('head', 'router', 'blocks.0.attn.qkv')" in str(
            refused.value
        )
        handle.remove()
    for keys in (dict(gather="bf16"), dict(keep=("head", "router", "blocks.0.attn.qkv"))):
        with Engine(llama, ZERO, precision=in_fp8(**keys), optimizer=optimizer) as engine:
            layer = engine.model.get_submodule("blocks.0.attn.qkv")
            layer.register_forward_pre_hook(lambda module, args: (args[0] + module.weight.sum() * 0,))
            assert engine.train_step(engine.shard_batch(batch())) > 0
    with Engine(llama, ZERO, precision=precision, optimizer=optimizer) as engine:
        layer = engine.model.get_submodule("blocks.0.attn.qkv")
        parameter = layer._parameters["weight"]
        layer.register_forward_hook(lambda module, args, y: y + parameter.sum())  # type: ignore[union-attr]
        loss = engine(**engine.shard_batch(batch())).loss
        assert loss.isnan()


def test_other_readers_of_a_weight_are_refused() -> None:
    run_on_ranks(2, reads)


def checkpointed(folder: Path) -> None:
    torch.manual_seed(1)
    optimizer = dict(name="adamw", lr=1e-2)
    with Engine(llama, ZERO, precision=in_fp8(), optimizer=optimizer) as engine:
        engine.train_step(engine.shard_batch(batch()))
        engine.save(folder)
        weights = engine.full_state_dict()
        after = engine.train_step(engine.shard_batch(batch()))
    assert {value.dtype for value in weights.values()} == {torch.float32}
    for parallel, gather in ((ZERO, "fp8"), (dict(data=2, zero=dict(stage=3, placement="cpu")), "bf16")):
        with Engine(llama, parallel, precision=in_fp8(gather=gather), optimizer=optimizer) as engine:
            engine.load(folder)
            assert all(torch.equal(value, weights[name]) for name, value in engine.full_state_dict().items())
            assert engine.train_step(engine.shard_batch(batch())) == after  # from scales of the loaded weights


def test_checkpoints_have_the_master_weights(tmp_path: Path) -> None:
    run_on_ranks(2, checkpointed, tmp_path / "saved")


def moved() -> None:
    """Chunks that move to the host travel in bf16, and in fp8 again when they return."""
    from meshfold.zero_gemini.chunks.placement import ChunkPlacement

    found = []
    for moves in (True, False):
        torch.manual_seed(1)
        with Engine(llama, ZERO, precision=in_fp8(), optimizer=dict(name="adamw", lr=1e-2)) as engine:
            gemini = engine.states.gemini  # type: ignore[attr-defined]
            for tier in ("device", "host", "device"):
                if moves:
                    gemini.move({chunk: ChunkPlacement(parameters=tier, state=tier) for chunk in gemini.chunks})
                assert any(chunk.travels_in_fp8 for chunk in gemini.chunks) == (tier == "device" or not moves)
                found.append(engine.train_step(engine.shard_batch(batch())))
    assert found[:3] == found[3:]


def test_chunks_that_move_train_to_the_same_bits() -> None:
    run_on_ranks(2, moved)


def composed(parallel: dict[str, Any]) -> None:
    for recipe in ("rowwise", "tensorwise"):
        same_bits(recipe, parallel)


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [
        dict(data=2, tensor=2, zero=dict(stage=3, placement="cuda")),
        dict(data=2, pipeline=dict(size=2, schedule="zb-h1", microbatches=2), zero=dict(stage=3, placement="cuda")),
    ],
    ids=["tensor", "zb-h1"],
)
def test_beside_other_entries(parallel: dict[str, Any]) -> None:
    run_on_ranks(4, composed, parallel)


def test_a_plan_counts_the_bytes_that_are_sent() -> None:
    from meshfold.mesh import ParallelSpec
    from meshfold.planner import estimate

    elements = 4 * (3 * 1024 * 1024 + 3 * 1024 * 4096)  # of the blocks' linear layers
    # A rank sends half of what is gathered: in forward, in backward, and for a recomputed forward the first operand again.
    for fp8, recompute, gathers in (("rowwise", None, 2), ("rowwise", "blocks", 3), ("tensorwise", "blocks", 2)):
        found = estimate(
            partial(llama, hidden=1024, ffn=4096, layers=4),
            ParallelSpec.parse(dict(data=2, zero=dict(stage=3)), 2),
            batch_size=8,
            seq_len=LENGTH,
            precision="bf16",
            fp8=fp8,
            fp8_gather="fp8",
            recompute=recompute,
        )
        assert "zero gathers their weights in fp8" in found.fp8
        sent = sum(float(each.bytes) for each in found.traffic if each.kind == "all_gather")
        assert sent == pytest.approx(gathers * elements / 2, rel=0.15), (fp8, recompute)  # the last block stays between
