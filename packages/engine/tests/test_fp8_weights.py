"""Weights in fp8 that are cast once a step: how often, when they are let go, and the same bits as casts at each use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshfold.engine import Engine
from meshfold.kernels import Fp8Tensor, fp8
from meshfold.mesh import SpecError
from meshfold.mesh.testing import run_on_ranks
from meshfold.models import build

WORDS, LENGTH = 64, 16


def llama() -> nn.Module:
    return build(
        "llama-tiny", hidden=64, layers=2, heads=4, kv_heads=2, ffn=128, vocab_size=WORDS, max_positions=LENGTH
    )


def in_fp8(recipe: str = "rowwise", **keys: Any) -> dict[str, Any]:
    return dict(name="bf16", matmul="fp8", recipe=recipe, **keys)


def batch() -> dict[str, Tensor]:
    ids = (torch.arange(8)[:, None] * 5 + 3 * torch.arange(LENGTH)) % WORDS
    return dict(input_ids=ids, labels=ids)


@contextmanager
def weight_casts(*, counts: bool = True) -> Iterator[Counter[tuple[int, ...]]]:
    """Count the casts of operands by shape."""
    seen: Counter[tuple[int, ...]] = Counter()
    if not counts:  # a graph could not change what is outside of it
        yield seen
        return
    own = fp8.to_fp8

    def to_fp8(x: Tensor, **kwargs: Any) -> Fp8Tensor:
        seen[tuple(x.shape)] += 1
        return own(x, **kwargs)

    fp8.to_fp8 = to_fp8  # type: ignore[assignment]
    try:
        yield seen
    finally:
        fp8.to_fp8 = own


def trained(
    precision: object, parallel: dict[str, Any] | None = None, *, micro_steps: int = 4, steps: int = 2, **given: Any
) -> tuple[list[float], dict[str, Tensor], Counter[tuple[int, ...]], str]:
    """Losses, weights, casts of the last step, and the report."""
    torch.manual_seed(1)
    model: Callable[[], nn.Module] = given.pop("model", llama)
    with Engine(
        model,
        parallel or {},
        optimizer=dict(name="adamw", lr=1e-2),
        precision=precision,
        gradient_accumulation=micro_steps,
        **given,
    ) as engine:
        found = []
        for step in range(steps):
            with weight_casts(counts="compile" not in given) as seen:
                rows = engine.shard_batch(batch())["input_ids"]
                for ids in rows.chunk(micro_steps):
                    found.append(engine.train_step(dict(input_ids=ids, labels=ids)))
            if step == 0:
                held(engine)
        return found, engine.full_state_dict(), seen, str(engine.fp8_layers)


def held(engine: Engine) -> None:
    """Nothing that was cast is left after a step."""
    for module in engine.model.modules():
        weight = module.__dict__.get("fp8_weight")
        assert weight is None or weight.operands is None or not weight.operands[0].untyped_storage().nbytes()


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_a_weight_is_cast_once_a_step(recipe: str) -> None:
    once, use = (trained(in_fp8(recipe, cast=cast), recompute="blocks") for cast in (None, "use"))
    assert once[0] == use[0]
    assert all(torch.equal(once[1][name], value) for name, value in use[1].items())
    assert once[3].startswith(f"fp8 ({recipe}): blocks.0.attn.qkv and 7 more\nweights are cast once a step\n")
    assert "once" not in use[3]
    # Of four weights in two blocks: forward, its repetition and dx in each of four micro-steps; once: y's and dx's operand.
    fewer = sum(use[2].values()) - sum(once[2].values())
    casts_once = 8 * (2 if recipe == "rowwise" else 1)
    assert fewer == 8 * 3 * 4 - casts_once


def test_without_several_uses_weights_are_cast_where_they_are_used() -> None:
    _, _, _, report = trained(in_fp8(), micro_steps=1, steps=1)
    assert "once" not in report
    found = trained(in_fp8(cast="step"), micro_steps=1, steps=1, recompute="blocks")
    assert "weights are cast once a step" in found[3]


def test_compiled_blocks_take_what_was_cast() -> None:
    graphs: list[int] = []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(len(inputs))
        return graph

    torch.compiler.reset()
    wanted = trained(in_fp8(cast="use"))[:2]
    found = trained(in_fp8(), compile=dict(backend=counting))
    assert found[0] == pytest.approx(wanted[0], rel=0.004)
    assert len(graphs) == 1 + 3  # that of all blocks and steps; the casts of one shape, of one more dim, and of any


@pytest.mark.slow
def test_compiled_and_recomputed_blocks_take_what_was_cast() -> None:
    wanted = trained(in_fp8(cast="use"))[0]
    found = trained(in_fp8(), compile=dict(backend="aot_eager"), recompute="blocks")[0]
    assert found == pytest.approx(wanted, rel=0.004)


def test_own_loops_and_changed_weights() -> None:
    with Engine(llama, precision=in_fp8(cast="step"), optimizer=dict(name="sgd", lr=0.0)) as engine:
        assert engine.fp8_layers is not None and engine.fp8_layers.weights is not None
        casts = lambda: sum(engine.fp8_layers.weights.casts.values())  # noqa: E731
        for _ in range(2):
            engine.backward(engine(**batch()).loss)
        assert casts() == 8
        engine.model.eval()
        with torch.no_grad():
            inside = engine.model(**batch()).loss
        assert casts() == 8  # weights are the same
        with torch.no_grad():
            engine.model.get_submodule("blocks.0.attn.qkv").weight.mul_(2.0)
            changed = engine.model(**batch()).loss
        assert casts() == 9 and changed != inside
        engine.step()
        held(engine)
        with torch.inference_mode():
            engine.model(**batch())
        held(engine)
        loss = engine(**batch()).loss
        engine.zero_grad()
        engine.backward(loss)
        engine.step()
        held(engine)


SPECS: dict[str, tuple[int, dict[str, Any]]] = {
    "data": (2, dict(data=2)),
    "zero 2": (2, dict(data=2, zero=dict(stage=2, placement="cuda"))),
    "zero 3": (2, dict(data=2, zero=dict(stage=3))),
    "tensor": (2, dict(tensor=2)),
    "megatron": (2, dict(tensor=2, sequence=dict(mode="megatron"))),
    "tokens": (2, dict(tensor=dict(mode="1d", size=2, attention="tokens"))),
    "zb-h1": (2, dict(pipeline=dict(size=2, schedule="zb-h1", microbatches=2))),
}
ONCE = {"data", "zero 2", "tensor", "megatron", "tokens", "zb-h1"}


def compare(names: tuple[str, ...]) -> None:
    for name in names:
        spec = SPECS[name][1]
        once, use = (trained(in_fp8(cast=cast), spec, micro_steps=2) for cast in (None, "use"))
        assert once[0] == use[0], name
        assert all(torch.equal(once[1][key], value) for key, value in use[1].items()), name
        assert ("weights are cast once a step" in once[3]) == (name in ONCE), (name, once[3])
        assert (sum(once[2].values()) < sum(use[2].values())) == (name in ONCE), name


@pytest.mark.parametrize(
    "names",
    [("tensor", "zb-h1"), pytest.param(("data", "zero 2", "zero 3", "megatron", "tokens"), marks=pytest.mark.slow)],
)
def test_several_ranks_train_to_the_same_bits_with_fewer_casts(names: tuple[str, ...]) -> None:
    run_on_ranks(2, compare, names)


def test_a_plan_counts_what_was_cast() -> None:
    from meshfold.mesh import ParallelSpec
    from meshfold.planner import estimate

    sizes = dict(hidden=1024, layers=2, heads=8, kv_heads=8, ffn=2048, vocab_size=WORDS, max_positions=LENGTH)
    block = 4 * 1024 * 1024 + 3 * 1024 * 2048  # elements of its weights
    for parallel, ranks, accumulate, blocks in (({}, 1, 2, 2), (dict(pipeline=2), 2, 1, 1)):
        found = estimate(
            partial(build, "llama-tiny", **sizes),
            ParallelSpec.parse(parallel, ranks),
            batch_size=4,
            seq_len=LENGTH,
            precision="bf16",
            fp8="rowwise",
            accumulate=accumulate,
        )
        assert found.memory.parameters == 2 * found.local_parameters + 2 * blocks * block, parallel


@pytest.mark.parametrize(
    ("precision", "parallel", "said"),
    [
        (in_fp8(cast="once"), {}, "cast='once': write 'step'"),
        (dict(name="bf16", cast="step"), {}, "cast without matmul"),
        (in_fp8(cast="step"), dict(zero=dict(stage=3)), "zero=dict(stage=2, placement='cuda')"),
        (in_fp8(cast="step"), dict(zero=dict(stage=2)), "placement='auto'"),
    ],
)
def test_mistakes(precision: object, parallel: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as refused:
        Engine(llama, parallel, precision=precision, optimizer=dict(name="sgd", lr=0.1))
    assert said in str(refused.value)
