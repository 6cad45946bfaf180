"""Engine(compile=...): repeated blocks compiled one by one train as they do uncompiled, and are compiled once."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.engine import Engine
from meshfold.mesh import SpecError
from meshfold.mesh.testing import ranks, run_on_ranks
from meshfold.models import GPT, GPTConfig, build

WORDS, LENGTH, STEPS = 48, 8, 3
GRAPHS: list[int] = []


def counting(graph: Any, inputs: Any) -> Any:
    """The back end that makes forward and backward graphs and runs them without a compiler; counts them."""
    from torch._dynamo.backends.debugging import aot_eager

    GRAPHS.append(len(graph.graph.nodes))
    return aot_eager(graph, inputs)


def gpt() -> GPT:
    return GPT(GPTConfig(vocab_size=WORDS, hidden=32, layers=4, heads=4, max_positions=LENGTH, dropout=0.2))


def llama() -> nn.Module:
    return build("llama-tiny", hidden=32, layers=4, heads=4, kv_heads=2, ffn=64, vocab_size=WORDS, max_positions=LENGTH)


class Block(nn.Module):
    """As nanoGPT writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = 4, 8
        self.ln_1, self.ln_2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.c_attn, self.c_proj = nn.Linear(32, 96), nn.Linear(32, 32)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in self.c_attn(self.ln_1(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.c_proj(y)
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class Plain(nn.Module):
    """A user's own module, without anything of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, 32), nn.Embedding(LENGTH, 32)
        self.h = nn.ModuleList(Block() for _ in range(4))
        self.lm_head = nn.Linear(32, WORDS, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        x = self.wte(input_ids) + self.wpe(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(x)
        if labels is None:
            return logits
        return {
            "loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()),
            "logits": logits,
        }


class Joined(nn.Module):
    """As a single-stream block of Flux: joins its two inputs, and returns slices of the result."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.writes = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32), writes

    def forward(self, x: Tensor, *, text: Tensor) -> tuple[Tensor, Tensor]:
        if self.writes:
            x.mul_(0.5)
        both = torch.cat([text, x], 1)
        both = both + self.down(F.gelu(self.up(self.norm(both))))
        return both[:, text.shape[1] :], both[:, : text.shape[1]]


class TwoStreams(nn.Module):
    """Blocks of which the first gets whole tensors and the others slices."""

    def __init__(self, writes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wte, self.lm_head = nn.Embedding(WORDS, 32), nn.Linear(32, WORDS, bias=False)
        self.blocks = nn.ModuleList(Joined(writes) for _ in range(4))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x, text = self.wte(input_ids) * 2.0, self.wte(input_ids[:, :3]) * 3.0
        read = torch.zeros(())
        for block in self.blocks:
            given = x
            x, text = block(x, text=text)
            read = read + given.square().mean()  # a block that writes into its input has changed it
        logits = self.lm_head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + read, "logits": logits}


class NoBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


MODELS: dict[str, Callable[[], nn.Module]] = {"gpt": gpt, "llama": llama, "plain": Plain}


def batch(step: int, rows: int = 4) -> dict[str, Tensor]:
    ids = torch.randint(WORDS, (rows, LENGTH), generator=torch.Generator().manual_seed(step))
    return dict(input_ids=ids, labels=ids)


def train(model: str, parallel: dict[str, Any], compile: object, settings: dict[str, Any]) -> tuple[Any, ...]:
    """Losses and gradient norms of every step and an evaluation, the weights, and how many graphs there were after each step."""
    torch.compiler.reset()
    GRAPHS.clear()
    given = dict(optimizer=dict(name="adamw", lr=1e-2), precision="fp64", clip_grad_norm=0.5, **settings)
    seen: list[float] = []
    graphs: list[int] = []
    with Engine(MODELS[model], parallel, compile=compile, **given) as engine:
        for step in range(STEPS):
            seen.append(engine.train_step(engine.shard_batch(batch(step))))
            assert engine.last is not None
            seen.append(float(engine.last.grad_norm or 0.0))
            seen.append(engine.eval_step(engine.shard_batch(batch(100 + step))))
            graphs.append(len(GRAPHS))
        return seen, engine.full_state_dict(), graphs


def compare(model: str, parallel: dict[str, Any], settings: dict[str, Any]) -> None:
    wanted, weights, _ = train(model, parallel, False, settings)
    found, ours, graphs = train(model, parallel, dict(backend=counting), settings)
    assert found == pytest.approx(wanted, rel=1e-9)
    assert list(ours) == list(weights)
    for name, value in weights.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-7, atol=1e-9, msg=f"{parallel} {name}")
    # Blocks share their graphs: training and evaluation, with gradients of their input or without.
    assert 1 <= graphs[1] <= 4, (parallel, graphs)
    assert graphs[1:] == [graphs[1]] * (STEPS - 1), (parallel, graphs)


ZERO3 = dict(stage=3, placement="cpu")
SPECS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "alone": (1, {}, {}),
    "alone, recomputed": (1, {}, dict(recompute="blocks")),
    "data": (2, dict(data=2), {}),
    "data, accumulated": (2, dict(data=2), dict(gradient_accumulation=2)),
    "zero 1": (2, dict(data=2, zero=dict(stage=1)), {}),
    "zero 3": (2, dict(data=2, zero=dict(stage=3, placement="cuda")), {}),
    "zero 3, host": (2, dict(data=2, zero=ZERO3), {}),
    "zero 2, host": (2, dict(data=2, zero=dict(stage=2, placement="cpu")), {}),
    "zero 3, static": (
        2,
        dict(data=2, zero=dict(stage=3, placement="static", offload_optim_frac=0.5, offload_param_frac=0.5)),
        {},
    ),
    "zero 3, kept": (
        2,
        dict(data=2, zero=dict(stage=3, placement="cuda", reshard_after_forward=False)),
        {},
    ),
    "zero 3, recomputed": (2, dict(data=2, zero=dict(stage=3, placement="cuda")), dict(recompute="blocks")),
    "zero 3, host, recomputed": (2, dict(data=2, zero=ZERO3), dict(recompute="blocks")),
    "tensor": (2, dict(tensor=2), {}),
    "tensor, recomputed": (2, dict(tensor=2), dict(recompute="blocks")),
    "megatron": (2, dict(tensor=2, sequence=dict(mode="megatron")), {}),
    "2d": (4, dict(tensor=dict(mode="2d", size=4)), {}),
    "1f1b": (2, dict(pipeline=dict(size=2, microbatches=2)), {}),
    "1f1b, recomputed": (2, dict(pipeline=dict(size=2, microbatches=2)), dict(recompute="blocks")),
    "zb-h1, recomputed": (
        2,
        dict(pipeline=dict(size=2, microbatches=2, schedule="zb-h1")),
        dict(recompute="blocks"),
    ),
    "zb-h1, tensor": (4, dict(pipeline=dict(size=2, microbatches=2, schedule="zb-h1"), tensor=2), {}),
    "interleaved, zero": (
        4,
        dict(
            data=2,
            zero=dict(stage=1),
            pipeline=dict(size=2, microbatches=2, schedule="interleaved", chunks=2),
        ),
        {},
    ),
    "ulysses": (2, dict(sequence=dict(mode="ulysses", size=2)), {}),
    "ring": (2, dict(sequence=dict(mode="ring", size=2)), {}),
    "ring, zero 3": (4, dict(data=2, sequence=dict(mode="ring", size=2), zero=ZERO3), {}),
    "tensor, zero 3": (4, dict(data=2, tensor=2, zero=ZERO3), {}),
}
APART = [("gpt", "ulysses")]
"""Its dropout cuts the graph where heads are exchanged: right, and in more graphs."""
QUICK = [("plain", "alone"), ("gpt", "tensor")]
"""Cases that `make test` runs: a user's own blocks, and ours with dropout and collectives inside a graph"""


@pytest.mark.parametrize(
    ("model", "spec"),
    [
        (model, spec) if (model, spec) in QUICK else pytest.param(model, spec, marks=pytest.mark.slow)
        for model in MODELS
        for spec in SPECS
        if (model, spec) not in APART and not (model == "plain" and "sequence" in SPECS[spec][1])
    ],
)
def test_compiled_blocks_train_as_eager_ones(model: str, spec: str) -> None:
    size, parallel, settings = SPECS[spec]
    run_on_ranks(size, compare, model, parallel, settings)


@pytest.mark.few(1)
@pytest.mark.parametrize("writes", [False, True])
@ranks(1)
def test_slices_share_the_code_of_whole_inputs(writes: bool) -> None:
    """One graph for all blocks; what a block writes into its input is in the slice too."""

    def steps(compile: object) -> tuple[list[float], dict[str, Tensor]]:
        given = dict(optimizer=dict(name="adamw", lr=1e-2), precision="fp64", clip_grad_norm=0.5)
        with Engine(TwoStreams(writes), {}, compile=compile, **given) as engine:
            return [engine.train_step(batch(step)) for step in range(2)], engine.full_state_dict()

    torch.compiler.reset()
    GRAPHS.clear()
    wanted, weights = steps(False)
    found, ours = steps(dict(backend=counting))
    assert found == pytest.approx(wanted, rel=1e-12)
    for name, weight in weights.items():
        torch.testing.assert_close(ours[name], weight, rtol=1e-10, atol=1e-12)
    assert len(GRAPHS) == 1


class Narrow(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.layer(F.gelu(self.norm(x))) * x.shape[-1] ** -0.5
        return out


class Narrowing(nn.Module):
    """Blocks of one class in three widths, and as many widths of what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Narrow(width) for width in (6, 6, 5, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x[..., : block.layer.in_features].contiguous())  # type: ignore[union-attr, index]
        return x


@ranks(1)
def test_blocks_of_other_shapes_are_compiled_on_their_own() -> None:
    """One graph for each width, and no size of one width taken for a symbol."""
    found: list[bool] = []

    def backend(graph: Any, inputs: Any) -> Any:
        found.append(any(isinstance(size, torch.SymInt) for x in inputs for size in getattr(x, "shape", [x])))
        return graph

    x = torch.randn(4, 8, requires_grad=True)
    losses = []
    for compile in (False, dict(backend=backend), dict(backend=backend)):
        torch.manual_seed(0)
        with Engine(
            Narrowing(),
            optimizer=dict(name="sgd", lr=1e-2),
            loss_fn=lambda output, batch: output.square().mean(),
            compile=compile,
        ) as engine:
            losses.append([engine.train_step((x, x)) for _ in range(2)])
        if compile:
            assert found == [False] * 3  # the second engine finds what the first has compiled
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) == losses[2]


# -- what is compiled -------------------------------------------------------------------------------------------------


@ranks(1)
def test_what_is_compiled_and_given_back() -> None:
    model = Plain()
    own = model.h[0].forward
    engine = Engine(model, optimizer=dict(name="adamw", lr=1e-2), compile=dict(backend="eager", dynamic=False))
    assert str(engine.compiled_blocks) == "compiled: 4 blocks Block, backend eager, dynamic False"
    assert not any("_orig_mod" in name for name in model.state_dict())
    engine.close()
    assert "forward" not in model.h[0].__dict__ and model.h[0].forward == own


@pytest.mark.parametrize("recompute", [None, "auto"], ids=["kept", "recompute auto"])
@ranks(1)
def test_compiled_under_a_memory_limit(recompute: Any) -> None:
    """Steps that are profiled for the plan run the blocks' own operations, all others their graphs."""
    runs: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            runs.append(1)
            return graph(*args)

        return run

    seen, counts = [], []
    for compile in (False, dict(backend=backend)):
        spec = dict(zero=dict(placement="auto", gpu_memory_limit="4MB"))
        engine = Engine(
            llama, spec, optimizer=dict(name="adamw", lr=1e-2), precision="fp64", compile=compile, recompute=recompute
        )
        seen.append([])
        for step in range(5):
            before, watching = len(runs), engine.residency is not None and engine.residency.is_watching
            seen[-1].append(engine.train_step(batch(step)))
            counts.append((watching, len(runs) - before))
        engine.close()
    assert seen[1] == pytest.approx(seen[0], rel=1e-9)
    assert [many for _, many in counts[:5]] == [0] * 5  # not compiled
    watched = [many for watching, many in counts[5:] if watching]
    assert watched and not any(watched)
    assert all(many >= 4 for watching, many in counts[5:] if not watching)  # four blocks


@ranks(1)
def test_a_model_without_blocks_is_compiled_as_a_whole() -> None:
    GRAPHS.clear()
    torch.compiler.reset()
    x = torch.randn(4, 8)
    with Engine(
        NoBlocks(),
        optimizer=dict(name="sgd", lr=1e-2),
        loss_fn=lambda output, batch: output.square().mean(),
        compile=dict(backend=counting),
    ) as engine:
        assert str(engine.compiled_blocks) == "compiled: NoBlocks as a whole, backend counting"
        losses = [engine.train_step((x, x)) for _ in range(3)]
    assert losses[2] < losses[0] and len(GRAPHS) == 1


def continued(folder: str, compile: object, load: bool) -> list[float]:
    """Losses of steps after a checkpoint, written or read here."""
    with Engine(gpt, dict(data=2, zero=ZERO3), optimizer=dict(name="adamw", lr=1e-2), compile=compile) as engine:
        if load:
            engine.load(folder)
        else:
            engine.train_step(engine.shard_batch(batch(0)))
            engine.save(folder)
        return [engine.train_step(engine.shard_batch(batch(step))) for step in (1, 2)]


@pytest.mark.slow
def test_checkpoints_do_not_know(tmp_path: Path) -> None:
    for here, there in (({"backend": "aot_eager"}, False), (False, {"backend": "aot_eager"})):
        folder = str(tmp_path / str(bool(here)))
        wanted = run_on_ranks(2, continued, folder, here, False)[0]
        found = run_on_ranks(2, continued, folder, there, True)[0]
        assert found == pytest.approx(wanted, rel=1e-5)


@pytest.mark.slow  # compiles C++
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles C++ on a CPU, and there is no g++ here")
def test_inductor() -> None:
    wanted, weights, _ = train("plain", dict(zero=ZERO3), False, {})
    found, ours, _ = train("plain", dict(zero=ZERO3), True, {})
    assert found == pytest.approx(wanted, rel=1e-9)
    for name, value in weights.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-7, atol=1e-9)


def test_options_are_of_these_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda forward, **settings: given.append(settings) or forward)
    options = {"force_layout_optimization": True}
    with Engine(Plain, optimizer=dict(name="adamw", lr=1e-2), compile=dict(options=options)) as engine:
        assert len(given) == len(engine.compiled_blocks.blocks)
        assert all(each["options"] == options and each["mode"] is None for each in given)
        assert str(engine.compiled_blocks).endswith(f"backend inductor, options {options}")


# -- what is refused --------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[object, dict[str, Any], str]] = {
    "a word": (
        "yes",
        {},
        r"compile='yes': write True, False, or dict\(backend=..., mode=..., dynamic=..., options=...\)",
    ),
    "a key": (dict(back_end="eager"), {}, "there is no key 'back_end'.*backend"),
    "a back end": (dict(backend="inducter"), {}, "there is no backend 'inducter'.*inductor"),
    "a mode": (dict(mode="max-autotun"), {}, "there is no mode 'max-autotun'.*max-autotune"),
    "an option": (dict(options=dict(max_autotun=True)), {}, "no option 'max_autotun'.*max_autotune"),
    "options as a list": (dict(options=["max_autotune"]), {}, "options: write a dict"),
    "options of another back end": (dict(backend="eager", options={}), {}, "only the back end 'inductor' has options"),
    "options beside a mode": (dict(mode="max-autotune", options={}), {}, "leave mode out.*max_autotune"),
    "a mode of another": (dict(backend="eager", mode="default"), {}, "only the back end 'inductor' has modes"),
    "dynamic": (dict(dynamic="yes"), {}, "write dynamic=True, False or None"),
    "CUDA graphs": (
        dict(mode="reduce-overhead"),
        dict(zero=dict(stage=3)),
        "CUDA graphs.*under zero parameters move",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    compile, parallel, says = REFUSED[case]
    with pytest.raises(SpecError, match=says):
        Engine(Plain, parallel, optimizer=dict(name="adamw", lr=1e-2), compile=compile)


def test_refused_models() -> None:
    with pytest.raises(SpecError, match=r"NoBlocks has no repeated blocks.*under zero.*nn\.ModuleList"):
        Engine(NoBlocks(), dict(zero=dict(stage=3)), optimizer=dict(name="sgd", lr=1e-2), compile=True)
    compiled = Plain()
    compiled.h[0].compile(backend="eager")
    with pytest.raises(SpecError, match="already compiled: leave compile out"):
        Engine(compiled, optimizer=dict(name="sgd", lr=1e-2), compile=True)
