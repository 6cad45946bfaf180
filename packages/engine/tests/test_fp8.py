"""``precision=dict(name="bf16", matmul="fp8")``: trains as bf16 does, and under every spec as the serial model in fp8 does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshfold.engine import Engine
from meshfold.engine.model.fp8_linear import Fp8Products, use_fp8_products
from meshfold.kernels import FP8_RECIPES, Fp8Tensor, activations, casts_apart, fp8, norms
from meshfold.mesh import SpecError, record
from meshfold.mesh.testing import run_on_ranks
from meshfold.models import GPT, GPTConfig, build
from meshfold.pipeline.runtime.deferred_linear import defer_weight_gradients

WORDS, LENGTH = 64, 16
RECIPES = ("rowwise_hp_dw", "rowwise", "tensorwise")  # those for narrow layers


def llama() -> nn.Module:
    return build(
        "llama-tiny", hidden=64, layers=2, heads=4, kv_heads=2, ffn=128, vocab_size=WORDS, max_positions=LENGTH
    )


def gpt() -> nn.Module:
    return GPT(GPTConfig(vocab_size=WORDS, hidden=64, layers=2, heads=4, max_positions=LENGTH, dropout=0.0))


def wide() -> nn.Module:
    """A rank of two has 128 features of queries, of keys and of values."""
    return build("llama-tiny", hidden=256, layers=2, heads=4, ffn=512, vocab_size=WORDS, max_positions=LENGTH)


def hugging_face() -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="this test trains a model of transformers")
    return transformers.LlamaForCausalLM(  # type: ignore[no-any-return]
        transformers.LlamaConfig(
            vocab_size=WORDS,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
        )
    )


def in_fp8(recipe: str = "rowwise_hp_dw", **keys: Any) -> dict[str, Any]:
    return dict(name="bf16", matmul="fp8", recipe=recipe, **keys)


def batches(steps: int) -> list[dict[str, Tensor]]:
    """Sequences that count in threes, from words drawn at random."""
    generator = torch.Generator().manual_seed(0)
    first = [torch.randint(0, WORDS, (8, 1), generator=generator) for _ in range(steps)]
    ids = [(each + 3 * torch.arange(LENGTH)) % WORDS for each in first]
    return [dict(input_ids=each, labels=each) for each in ids]


def losses(
    model: Callable[[], nn.Module],
    precision: object,
    parallel: dict[str, Any] | None = None,
    steps: int = 5,
    lr: float = 3e-3,
    **given: Any,
) -> tuple[list[float], str]:
    """Losses of some steps, and what is in fp8."""
    torch.manual_seed(1)
    optimizer = dict(name="adamw", lr=lr)
    engine = Engine(model, parallel or {}, optimizer=optimizer, precision=precision, **given)
    found = [engine.train_step(engine.shard_batch(batch)) for batch in batches(steps)]
    report = str(engine.fp8_layers)
    engine.close()
    return found, report


@pytest.mark.few(1)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("model", [llama, gpt])
def test_losses_are_those_of_bf16_to_one_percent(model: Callable[[], nn.Module], recipe: str) -> None:
    (wanted, none), (found, report) = (losses(model, each, steps=60) for each in ("bf16", in_fp8(recipe)))
    assert none == "None"
    assert f"fp8 ({recipe}): blocks.0.attn.qkv and 7 more\nbf16: head: keep='head'" == report
    assert wanted[-1] < 0.1 * wanted[0]  # it learns
    assert found != wanted
    assert sum(found) == pytest.approx(sum(wanted), rel=0.01)
    for start in range(0, 60, 10):
        one, other = (sum(each[start : start + 10]) for each in (found, wanted))
        assert one == pytest.approx(other, rel=0.01, abs=0.02), start


IN_TILES: list[dict[str, Any]] = [
    dict(data=2, zero=dict(stage=3)),
    dict(tensor=2, sequence=dict(mode="megatron")),
    dict(pipeline=dict(size=2, schedule="zb-h1", microbatches=2)),
]


def compare_tiles(wanted: list[float]) -> None:
    for parallel in IN_TILES:
        found, report = losses(wide, in_fp8("block128"), parallel, steps=len(wanted), lr=1e-3)
        assert report.startswith("fp8 (block128): blocks.") and report.endswith("bf16: head: keep='head'"), parallel
        assert found == pytest.approx(wanted, rel=0.004), parallel


def test_tiles_train_as_bf16_does_on_one_rank_and_on_two() -> None:
    wanted, found = (losses(wide, each, steps=8, lr=1e-3) for each in ("bf16", in_fp8("block128")))
    assert found[1] == "fp8 (block128): blocks.0.attn.qkv and 7 more\nbf16: head: keep='head'"
    assert found[0] != wanted[0] and found[0] == pytest.approx(wanted[0], rel=0.01) and found[0][-1] < 0.5 * found[0][0]
    run_on_ranks(2, compare_tiles, found[0][:3])


def test_a_hugging_face_model() -> None:
    (wanted, _), (found, report) = (losses(hugging_face, each) for each in ("bf16", in_fp8()))
    assert report == ("fp8 (rowwise_hp_dw): model.layers.0.self_attn.q_proj and 13 more\nbf16: lm_head: keep='head'")
    assert found == pytest.approx(wanted, rel=0.01)


SPECS: dict[str, tuple[int, dict[str, Any]]] = {
    "data": (2, dict(data=2)),
    "zero 1": (2, dict(data=2, zero=dict(stage=1))),
    "zero 2": (2, dict(data=2, zero=dict(stage=2))),
    "zero 3": (2, dict(data=2, zero=dict(stage=3))),
    "zero 3 on the host": (2, dict(data=2, zero=dict(stage=3, placement="cpu"))),
    "tensor": (2, dict(tensor=2)),
    "megatron": (2, dict(tensor=2, sequence=dict(mode="megatron"))),
    "ring": (2, dict(sequence=dict(mode="ring", size=2))),
    "overlap": (2, dict(tensor=dict(mode="1d", size=2, overlap="auto"), sequence=dict(mode="megatron"))),
    "ulysses": (2, dict(sequence=dict(mode="ulysses", size=2))),
    "tokens": (2, dict(tensor=dict(mode="1d", size=2, attention="tokens"))),
    "2d": (4, dict(tensor=dict(mode="2d", size=4))),
    "tensor, zero 3": (4, dict(data=2, tensor=2, zero=dict(stage=3, placement="cpu"))),
}


STAGED: dict[str, tuple[int, dict[str, Any]]] = {
    "1f1b": (2, dict(pipeline=dict(size=2, microbatches=2))),
    "zb-h1": (2, dict(pipeline=dict(size=2, schedule="zb-h1", microbatches=2))),
    "data, gpipe, zero 3": (
        4,
        dict(data=2, pipeline=dict(size=2, schedule="gpipe", microbatches=2), zero=dict(stage=3)),
    ),
    "tensor, zb-h1": (4, dict(tensor=2, pipeline=dict(size=2, schedule="zb-h1", microbatches=2))),
}


@cache
def alone(model: Callable[[], nn.Module], recipe: str) -> list[float]:
    """Losses of one process."""
    return losses(model, in_fp8(recipe))[0]


def compare(model: Callable[[], nn.Module], recipe: str, parallel: dict[str, Any], wanted: list[float]) -> None:
    found, report = losses(model, in_fp8(recipe), parallel)
    assert report.startswith(f"fp8 ({recipe}): ")
    assert report.endswith("head: keep='head'")
    assert found == pytest.approx(wanted, rel=0.004)


@pytest.mark.few(2)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("spec", SPECS)
def test_several_ranks_train_as_one(spec: str, recipe: str) -> None:
    size, parallel = SPECS[spec]
    run_on_ranks(size, compare, llama, recipe, parallel, alone(llama, recipe))


def compare_all(model: Callable[[], nn.Module], wanted: dict[str, list[float]], parallel: dict[str, Any]) -> None:
    for recipe, each in wanted.items():
        found, report = losses(model, in_fp8(recipe), parallel)
        assert report.startswith(f"fp8 ({recipe}): blocks.")
        assert found == pytest.approx(each, rel=0.004)


@pytest.mark.few(1)
@pytest.mark.parametrize("spec", STAGED)
def test_stages_of_a_pipeline_train_as_one_process(spec: str) -> None:
    size, parallel = STAGED[spec]
    run_on_ranks(size, compare_all, llama, {recipe: alone(llama, recipe) for recipe in RECIPES}, parallel)


def operands(
    recipe: str, parallel: dict[str, Any], keys: Mapping[str, Any] = MappingProxyType({}), **given: Any
) -> list[bytes]:
    """The operands in 8 bits of a step, in any order."""
    seen: list[bytes] = []
    own = fp8.to_fp8

    def to_fp8(*args: Any, **kwargs: Any) -> Fp8Tensor:
        made = own(*args, **kwargs)
        seen.append(made.values.view(torch.uint8).numpy().tobytes())
        return made

    fp8.to_fp8 = to_fp8
    torch.manual_seed(1)
    try:
        precision, optimizer = in_fp8(recipe, **keys), dict(name="sgd", lr=0.0)
        with Engine(llama, parallel, optimizer=optimizer, precision=precision, **given) as engine:
            rows = engine.shard_batch(batches(1)[0])["input_ids"]
            for _ in range(2):
                seen.clear()  # the first step may try shapes out
                for ids in rows.chunk(given.get("gradient_accumulation", 1)):
                    engine.train_step(dict(input_ids=ids, labels=ids))
    finally:
        fp8.to_fp8 = own
    return sorted(set(seen))


def staged_operands() -> list[list[bytes]]:
    return [
        operands(recipe, dict(pipeline=dict(size=2, schedule=schedule, microbatches=2)))
        for recipe in ("rowwise", "tensorwise")
        for schedule in ("1f1b", "zb-h1")
    ]


def test_operands_of_stages_are_those_of_the_micro_batches_in_one_process() -> None:
    wanted = [operands(recipe, {}, gradient_accumulation=2) for recipe in ("rowwise", "tensorwise") for _ in range(2)]
    stages = run_on_ranks(2, staged_operands)
    for serial, first, second in zip(wanted, *stages, strict=True):
        assert len(first) > 20 and len(second) > 20
        assert sorted(set(first + second)) == serial


def operands_and_reductions(*given: Any) -> tuple[list[bytes], int]:
    with record() as log:
        made = operands(*given)
    return made, sum(entry.kind == "all_reduce" for entry in log.entries)


def operands_of_ranks() -> list[list[bytes]]:
    """The operands of this rank, with scales of its own tokens, which send no more than a recipe without an amax over tokens."""
    found = []
    for spec in ("data", "zero 3"):
        _, fewest = operands_and_reductions("rowwise_hp_dw", SPECS[spec][1])
        for recipe in ("rowwise", "tensorwise"):
            made, reductions = operands_and_reductions(recipe, SPECS[spec][1], dict(scales="rank"))
            assert reductions == fewest, (spec, recipe)
            found.append(made)
        assert operands_and_reductions("rowwise", SPECS[spec][1])[1] > fewest
    return found


def test_scales_of_a_ranks_own_tokens_are_those_of_micro_batches_and_send_nothing() -> None:
    apart, steps = dict(cast="use"), dict(gradient_accumulation=2)  # ranks under zero 3 cast weights for each product
    wanted = [operands(recipe, {}, apart, **steps) for recipe in ("rowwise", "tensorwise")]
    for serial, mine, others in zip(2 * wanted, *run_on_ranks(2, operands_of_ranks), strict=True):
        assert sorted({*mine, *others}) == serial
    with pytest.raises(SpecError, match="scales='row': write 'all'"):
        Engine(llama, precision=in_fp8(scales="row"))


@pytest.mark.few(1)
@pytest.mark.parametrize("spec", ["zero 3", "tensor"])
def test_several_ranks_train_a_hugging_face_model_as_one(spec: str) -> None:
    size, parallel = SPECS[spec]
    run_on_ranks(size, compare, hugging_face, "rowwise", parallel, alone(hugging_face, "rowwise"))


@pytest.mark.parametrize("model", [llama, hugging_face])
@pytest.mark.parametrize("given", [{}, dict(recompute="blocks"), dict(gradient_accumulation=2)], ids=str)
def test_kernels_that_write_operands_change_no_bit(
    model: Callable[[], nn.Module], given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = dict(norm=True, gated=True, residual=True)
    with casts_apart():
        wanted, _ = losses(model, in_fp8("rowwise"), steps=3, kernels=kernels, **given)
    written: list[torch.Size] = []
    for module in (norms, activations):  # casts that are written with a result
        own = module.cast_rows
        monkeypatch.setattr(module, "cast_rows", lambda y, own=own: written.append(y.shape) or own(y))
    found, _ = losses(model, in_fp8("rowwise"), steps=3, kernels=kernels, **given)
    assert found == wanted
    widths = [shape[-1] for shape in written]
    assert widths.count(64) >= 8 and widths.count(128) >= 4, widths  # two layers in the two last steps


def first_operands(recipe: str, parallel: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """Operands in 8 bits, and their scales, of the first layer's forward, and the last two casts of its backward: of dw."""
    seen: list[Fp8Tensor] = []
    own = fp8.to_fp8

    def to_fp8(*args: Any, **kwargs: Any) -> Fp8Tensor:
        seen.append(own(*args, **kwargs))
        return seen[-1]

    fp8.to_fp8 = to_fp8
    try:  # weights that are gathered in fp8 are cast by shards: test_fp8_gather.py
        losses(llama, in_fp8(recipe, gather="bf16"), parallel, steps=1)
    finally:
        fp8.to_fp8 = own
    return [(each.values.view(torch.uint8), each.inverse) for each in (seen[0], seen[1], seen[-1])]


def compare_operands(recipe: str, parallel: dict[str, Any], wanted: list[tuple[Tensor, Tensor]]) -> None:
    (x, scale), (w, w_scale), (turned, turned_scale) = wanted
    rank = dist.get_rank()
    (mine, my_scale), my_w, (my_turned, my_turned_scale) = first_operands(recipe, parallel)
    assert torch.equal(mine, x.chunk(2)[rank])
    assert torch.equal(my_scale, scale if recipe == "tensorwise" else scale.chunk(2)[rank])
    assert torch.equal(my_w[0], w) and torch.equal(my_w[1], w_scale)
    assert torch.equal(my_turned_scale, turned_scale)
    assert torch.equal(my_turned, turned.chunk(2, dim=1)[rank])


@pytest.mark.few(3)
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
@pytest.mark.parametrize("spec", ["data", "zero 3"])
def test_operands_of_data_ranks_are_blocks_of_the_serial_ones(spec: str, recipe: str) -> None:
    run_on_ranks(2, compare_operands, recipe, SPECS[spec][1], first_operands(recipe, {}))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "given", [dict(recompute="blocks"), dict(kernels="off"), dict(compile=dict(backend="aot_eager"))], ids=str
)
def test_beside_other_arguments(given: dict[str, Any]) -> None:
    wanted = alone(llama, "rowwise")
    found, _ = losses(llama, in_fp8("rowwise"), **given)
    assert found == pytest.approx(wanted, rel=0.004), given


def test_compiled_blocks_share_their_graph() -> None:
    graphs: list[int] = []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(len(inputs))
        return graph

    torch.compiler.reset()
    losses(llama, in_fp8(), compile=dict(backend=counting))
    assert len(graphs) == 1


def test_a_checkpoint_has_the_weights_of_a_model_in_bf16(tmp_path: Path) -> None:
    with Engine(llama, precision=in_fp8(), optimizer=dict(name="sgd", lr=0.1)) as engine:
        engine.train_step(batches(1)[0])
        weights = engine.full_state_dict()
        engine.save(tmp_path / "saved")
    assert {value.dtype for value in weights.values()} == {torch.float32}
    with Engine(llama, precision="bf16", optimizer=dict(name="sgd", lr=0.1)) as other:
        other.load(tmp_path / "saved")
        assert all(torch.equal(value, weights[name]) for name, value in other.full_state_dict().items())
        assert other.steps == 1


def test_a_closed_engine_gives_the_layers_back() -> None:
    model = llama()
    kinds = {name: type(module) for name, module in model.named_modules()}
    engine = Engine(model, precision=in_fp8())
    assert {name: type(module) for name, module in model.named_modules()} != kinds
    engine.close()
    assert {name: type(module) for name, module in model.named_modules()} == kinds


class Odd(nn.Module):
    """Layers of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.router, self.narrow, self.wide = nn.Linear(16, 16), nn.Linear(16, 24), nn.Linear(24, 16)
        self.experts = nn.ModuleList([nn.Linear(16, 16)])
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)
        self.tied = nn.Linear(16, 32, bias=False)
        self.tied.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.tied(self.second(self.first(self.embed(ids))))
        return out


def test_what_stays_in_bf16_is_listed() -> None:
    with Engine(Odd, precision=in_fp8(keep=("head", "router", "first"))) as engine:
        assert engine.fp8_layers is not None
        assert engine.fp8_layers.layers == ("second",)
        assert engine.fp8_layers.kept == {
            "router": "keep='router'",
            "narrow": "its width is no multiple of 16",
            "wide": "its width is no multiple of 16",
            "experts.0": "an expert, which not every rank calls",
            "first": "keep='first'",
            "tied": "keep='head'",
        }
    with Engine(Odd, precision=in_fp8(keep=())) as engine:
        assert engine.fp8_layers is not None
        assert set(engine.fp8_layers.layers) == {"router", "first", "second", "tied"}


@pytest.mark.parametrize(
    ("given", "narrow"), [({}, False), (dict(keep=("narrow",)), True), (dict(keep=("first",)), False)]
)
def test_layers_that_would_lose_stay_in_bf16_where_that_counts(given: dict[str, Any], narrow: bool) -> None:
    for device, kept in (("cpu", narrow), ("meta", narrow or not given)):
        with Engine(Odd, precision=in_fp8(**given), device=device) as engine:
            assert engine.fp8_layers is not None
            whys = {why for why in engine.fp8_layers.kept.values() if "narrow" in why}
            said = "keep='narrow': its casts to fp8 take longer than its matmuls gain (32 x 16 on a rank)"
            assert whys and said in whys if kept else not whys


def test_a_plan_says_which_layers_multiply_in_fp8() -> None:
    from meshfold.mesh import ParallelSpec
    from meshfold.planner import estimate

    for spec in (dict(tensor=2), dict(pipeline=2)):
        found = estimate(
            llama, ParallelSpec.parse(spec, 2), batch_size=8, seq_len=LENGTH, precision="bf16", fp8="rowwise"
        )
        assert found.fp8.startswith("fp8 (rowwise): no linear layer\nbf16: blocks.0.attn.qkv")
        assert "gain (128 x 64 on a rank)" in found.fp8 or "gain (64 x 64 on a rank)" in found.fp8


@pytest.mark.parametrize(
    ("precision", "said"),
    [
        ("fp8", "write precision=dict(name='bf16', matmul='fp8')"),
        (dict(name="fp32", matmul="fp8"), "fp8 matmuls need a model in bf16"),
        (dict(name="bf16", matmul="int8"), "matmul='int8': write matmul='fp8'"),
        (dict(name="bf16", recipe="rowwise"), "recipe without matmul: add matmul='fp8'"),
        (
            in_fp8("rowise"),
            "there is no recipe 'rowise'. Did you mean 'rowwise'? Known: rowwise, rowwise_hp_dw, tensorwise, block128",
        ),
        (in_fp8("block64"), "there is no recipe 'block64'"),
        (in_fp8(gather="int8"), "gather='int8': write 'fp8' or 'bf16'"),
        (in_fp8(keep="head"), "give keep a tuple of layer names"),
        (in_fp8(keep=("frist",)), "no layer is called 'frist'. Did you mean 'first'?"),
        (
            dict(name="bf16", matmull="fp8"),
            "there is no key 'matmull'. Did you mean 'matmul'? Known: matmul, recipe, scales, keep, cast, gather",
        ),
    ],
)
def test_mistakes(precision: object, said: str) -> None:
    with pytest.raises(SpecError) as refused:
        Engine(Odd, precision=precision)
    assert said in str(refused.value)


def refused(parallel: dict[str, Any], keys: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        Engine(llama, parallel, precision=in_fp8(**keys))


@pytest.mark.parametrize(
    ("parallel", "keys", "said"),
    [
        (dict(tensor=dict(mode="1d", size=2, overlap="ring"), sequence=dict(mode="megatron")), {}, "Leave overlap out"),
        (dict(data=2), dict(gather="fp8"), "only zero stage 3 gathers weights"),
        (dict(data=2, zero=dict(stage=3, placement="cpu")), dict(gather="fp8"), "placement='cuda'"),
        (dict(data=2, zero=dict(stage=3)), dict(gather="fp8", recipe="block128"), "write recipe='rowwise'"),
    ],
)
def test_specs_that_cannot_are_refused(parallel: dict[str, Any], keys: dict[str, Any], said: str) -> None:
    run_on_ranks(2, refused, parallel, keys, said)


def test_a_float32_layer_keeps_the_gradients_that_wait() -> None:
    """A layer of float32 weights computes itself, and its bias's gradient waits with the weight's."""
    torch.manual_seed(0)
    layer, x = nn.Linear(16, 32), torch.randn(8, 16)
    alone = nn.Linear(16, 32)
    alone.load_state_dict(layer.state_dict())
    queue = defer_weight_gradients(layer)
    use_fp8_products(layer, Fp8Products.bind(FP8_RECIPES["rowwise"], None))
    with queue.collecting(0):
        layer(x).square().sum().backward()
    queue.compute(0)
    alone(x).square().sum().backward()
    for mine, theirs in zip(layer.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
