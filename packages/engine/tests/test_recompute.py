"""Recomputed blocks train to the same bits as those that keep their activations, whatever is around and inside of them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.engine import Engine
from meshfold.engine.model.recompute import RecomputedBlocks
from meshfold.engine.model.repeated_blocks import find_blocks
from meshfold.mesh import SpecError, record
from meshfold.mesh.testing import ranks, run_on_ranks
from meshfold.models import GPT, GPTConfig, build

STEPS = 4  # other blocks are kept in each of three, and the first ones again
Trained = tuple[list[float], dict[str, Tensor]]


def gpt() -> GPT:
    return GPT(GPTConfig(vocab_size=48, hidden=32, layers=3, heads=4, max_positions=16, dropout=0.2))


def llama() -> nn.Module:
    return build("llama-tiny", hidden=32, layers=3, heads=4, kv_heads=2, ffn=64, vocab_size=48, max_positions=16)


def batch(step: int, rows: int = 4) -> Tensor:
    return torch.randint(48, (rows, 16), generator=torch.Generator().manual_seed(step))


def trained(
    model: Callable[[], nn.Module],
    parallel: dict[str, Any],
    recompute: str | None,
    kept: Callable[[int, tuple[str, ...]], tuple[str, ...]] | None = None,
    **settings: Any,
) -> Trained:
    """Losses and gradient norms of every step, and the weights; ``kept`` says which blocks keep in which step."""
    given: dict[str, Any] = dict(optimizer=dict(name="adamw", lr=1e-2), clip_grad_norm=0.5)
    engine = Engine(model, parallel, recompute=recompute, **{**given, **settings})
    seen = []
    for step in range(STEPS):
        if kept is not None:
            assert engine.recomputed_blocks is not None
            engine.recomputed_blocks.keep(kept(step, engine.recomputed_blocks.names))
        seen.append(engine.train_step(engine.shard_batch(batch(step))))
        assert engine.last is not None and engine.last.grad_norm is not None
        seen.append(engine.last.grad_norm)
        if step == 2:
            seen.append(engine.eval_step(engine.shard_batch(batch(100))))
    weights = engine.full_state_dict()
    engine.close()
    return seen, weights


def assert_same(found: Trained, wanted: Trained) -> None:
    assert found[0] == wanted[0]
    assert list(found[1]) == list(wanted[1])
    for name, value in wanted[1].items():
        assert torch.equal(found[1][name], value), name


def some(step: int, names: tuple[str, ...]) -> tuple[str, ...]:
    """Other blocks in every step."""
    return names[step % 3 :: 2]


# -- the same bits ----------------------------------------------------------------------------------------------------


def products() -> list[Any]:
    """Each model with each kind of ZeRO, with and without clipping by turns; the slow tests have the rest."""
    zeros = {"none": None, "3 on host": dict(stage=3, placement="cpu"), "2": dict(stage=2, placement="cuda")}
    found = []
    for a, make in enumerate((gpt, llama)):
        for b, (name, zero) in enumerate(zeros.items()):
            for c, clip in enumerate((0.5, None)):  # without, chunks are stepped in the backward
                marks = pytest.mark.slow if (a + b + c) % 2 else ()
                found.append(pytest.param(make, zero, clip, id=f"{make.__name__}-{name}-{clip}", marks=marks))
    return found


@pytest.mark.few(2)
@pytest.mark.parametrize(("make", "zero", "clip"), products())
@ranks(1)
def test_alone(make: Callable[[], nn.Module], zero: dict[str, Any] | None, clip: float | None) -> None:
    parallel = {} if zero is None else dict(zero=zero)
    settings: dict[str, Any] = dict(precision="bf16", clip_grad_norm=clip)
    wanted = trained(make, parallel, None, **settings)
    assert_same(trained(make, parallel, "blocks", **settings), wanted)
    assert_same(trained(make, parallel, "blocks", some, **settings), wanted)


SPECS: dict[str, dict[str, Any]] = {
    "data": dict(data=4),
    "zero": dict(data=4, zero=dict(stage=3, placement="cpu")),
    "1d": dict(data=2, tensor=2),
    "sequence": dict(data=2, tensor=2, sequence=dict(mode="megatron")),
    "2d": dict(tensor=dict(mode="2d", size=4)),
    "2.5d": dict(tensor=dict(mode="2.5d", size=4, depth=1)),
    "3d": dict(tensor=dict(mode="3d", grid=(2, 2, 1))),
    "zero, 1d": dict(data=2, tensor=2, zero=dict(stage=3, placement="cpu")),
}


def on_ranks(parallel: dict[str, Any]) -> None:
    wanted = trained(gpt, parallel, None)
    assert_same(trained(gpt, parallel, "blocks"), wanted)
    assert_same(trained(gpt, parallel, "blocks", some), wanted)


FEW = ("3d", "zero, 1d")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in SPECS]
)
def test_on_every_mesh(name: str) -> None:
    run_on_ranks(4, on_ranks, SPECS[name])


@ranks(2)
def test_collectives_are_made_once_more() -> None:
    sent = {}
    for recompute in (None, "blocks"):
        engine = Engine(gpt, dict(tensor=2), optimizer="adamw", recompute=recompute)
        with record() as log:
            engine.train_step(engine.shard_batch(batch(0)))
        sent[recompute] = sum(entry.kind == "all_reduce" and entry.axes == ("tensor",) for entry in log.entries)
        engine.close()
    assert sent["blocks"] > sent[None]


def hugging_face(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="needs transformers, the extra 'hf'")
    sizes: dict[str, Any]
    if name == "gpt2":  # drops in its own code too
        sizes = dict(n_embd=32, n_layer=3, n_head=4, vocab_size=48, n_positions=16)
        config = transformers.GPT2Config(**sizes, attn_pdrop=0.2, resid_pdrop=0.2, embd_pdrop=0.2)
    else:
        sizes = dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)
        config = transformers.LlamaConfig(
            **sizes, intermediate_size=64, vocab_size=48, max_position_embeddings=16, attention_dropout=0.2
        )
    made: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return made  # it would keep a cache


def hugging_face_on_ranks(name: str, parallel: dict[str, Any]) -> None:
    from functools import partial

    make = partial(hugging_face, name)
    wanted = trained(make, parallel, None)
    assert_same(trained(make, parallel, "blocks"), wanted)
    assert_same(trained(make, parallel, "blocks", some), wanted)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param(dict(data=2), marks=pytest.mark.slow, id="data"),
        pytest.param(dict(tensor=2), id="tensor"),
        pytest.param(dict(data=2, zero=dict(placement="cpu")), marks=pytest.mark.slow, id="zero"),
    ],
)
def test_hugging_face(name: str, parallel: dict[str, Any]) -> None:
    run_on_ranks(2, hugging_face_on_ranks, name, parallel)


def test_no_cache_of_keys_and_values_is_filled_a_second_time() -> None:
    model = hugging_face("llama")
    blocks = RecomputedBlocks(model)
    for kept in ((), blocks.names):
        blocks.keep(kept)
        found = model(batch(0), labels=batch(0))
        found.loss.backward()
        assert found.past_key_values.get_seq_length() == 0
    with torch.no_grad():
        assert model(batch(0)).past_key_values.get_seq_length() == 16


class Odd(nn.Module):
    """Blocks with everything that is not a function of what they are given: noise, running statistics, keywords."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.norm, self.down = nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 16)

        def forward(self, x: Tensor, *, scale: Tensor) -> tuple[Tensor, Tensor]:
            y = F.relu(self.norm(self.up(x)))
            if self.training:
                y = y * (1 + 0.1 * torch.randn(()))
            return x + self.down(y) * scale, y.square().mean()

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))
        self.blocks = nn.ModuleList(Odd.Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        more = torch.zeros(())
        for block in self.blocks:
            x, some = block(x, scale=self.scale)
            more = more + some
        return x.square().mean(-1) + more


def odd_steps(recompute: bool, twice: bool = False) -> tuple[list[Tensor], dict[str, Tensor]]:
    torch.manual_seed(0)
    model, seen = Odd(), []
    blocks = RecomputedBlocks(model) if recompute else None
    for step in range(3):
        torch.manual_seed(step)
        loss = model(torch.randn(8, 16)).mean()
        if twice:
            loss.backward(retain_graph=True)
        loss.backward()
        seen.append(loss.detach())
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                seen.append(parameter.grad.clone())
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    if blocks is not None:
        blocks.close()
    return seen, model.state_dict()


@pytest.mark.parametrize("twice", [False, True])
def test_noise_and_statistics_are_those_of_the_first_time(twice: bool) -> None:
    (found, weights), (wanted, others) = odd_steps(True, twice), odd_steps(False, twice)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert list(weights) == list(others)
    assert all(torch.equal(weights[name], others[name]) for name in others)


# -- what is recomputed -----------------------------------------------------------------------------------------------


def runs(model: nn.Module, path: str) -> list[int]:
    """Counts the forwards of a module."""
    count = [0]
    model.get_submodule(path).register_forward_hook(lambda *_: count.__setitem__(0, count[0] + 1))
    return count


def test_only_where_there_will_be_a_backward_and_nothing_is_kept() -> None:
    model = gpt().eval()
    blocks, count = RecomputedBlocks(model), runs(model, "blocks.1.attn")
    with torch.no_grad():
        model(batch(0))
    assert count == [1]
    model(batch(0), labels=batch(0)).loss.backward()
    assert count == [3]
    blocks.keep(["blocks.1"])
    assert blocks.kept == ("blocks.1",)
    model(batch(0), labels=batch(0)).loss.backward()
    assert count == [4]
    blocks.close()
    model(batch(0), labels=batch(0)).loss.backward()
    assert count == [5]
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_copies_and_pickles_recompute_by_themselves() -> None:
    model = gpt().eval()
    blocks = RecomputedBlocks(model)
    names = list(model.state_dict())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        count, own = runs(other, "blocks.2.attn"), runs(model, "blocks.2.attn")
        loss = other(batch(0), labels=batch(0)).loss
        loss.backward()
        assert count == [2] and own == [0]
        assert list(other.state_dict()) == names
        assert torch.equal(loss, model(batch(0), labels=batch(0)).loss)
    blocks.close()


class Stage(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


class Holder(nn.Module):
    """A stage of a U-Net, as far as its blocks are concerned."""

    def __init__(self, parts: nn.Module) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_blocks_are_found_by_their_lists() -> None:
    assert list(find_blocks(gpt())) == ["blocks.0", "blocks.1", "blocks.2"]
    one = build("gpt-tiny", layers=1)
    assert list(find_blocks(one)) == ["blocks.0"]
    layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    assert not find_blocks(layers)
    assert list(find_blocks(nn.Sequential(Stage(4), Stage(4)))) == ["0", "1"]  # the outermost
    assert list(find_blocks(nn.Sequential(nn.Embedding(4, 4), Stage(4), nn.Linear(4, 4)))) == [
        "1.parts.0",
        "1.parts.1",
    ]
    stages = nn.Sequential(nn.Sequential(Stage(4), Stage(4)), nn.Sequential(Stage(4), Stage(4)))
    assert list(find_blocks(stages)) == ["0.0", "0.1", "1.0", "1.1"]
    narrowing = nn.ModuleList(nn.ModuleList([Stage(width), Stage(width)]) for width in (4, 8))
    assert list(find_blocks(nn.Sequential(*[Holder(each) for each in narrowing]))) == [
        f"{stage}.parts.{block}" for stage in (0, 1) for block in (0, 1)
    ]
    dense_first = nn.ModuleList([Stage(4), Holder(nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]))])
    assert list(find_blocks(nn.Sequential(Holder(dense_first), Holder(dense_first)))) == ["0", "1"]  # alike: no stages
    assert list(find_blocks(hugging_face("llama"))) == [f"model.layers.{i}" for i in range(3)]


def test_what_is_wrong_is_said() -> None:
    for recompute, parallel, words in (
        ("block", {}, r"recompute='block'.*Did you mean 'blocks'"),
        (True, {}, "recompute=True: write None"),
        ("auto", {}, "no entry zero"),
        ("auto", dict(zero=dict(placement="cpu")), "placement='cpu'.*write that entry, or recompute='blocks'"),
    ):
        with pytest.raises(SpecError, match=words):
            Engine(gpt, parallel, optimizer="adamw", recompute=recompute)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="Linear has no repeated blocks"):
        Engine(lambda: nn.Linear(4, 4), optimizer="adamw", recompute="blocks")


# -- torch.compile ----------------------------------------------------------------------------------------------------

GRAPHS: list[int] = []


def counting(graph: Any, inputs: Any) -> Any:
    from torch._dynamo.backends.debugging import aot_eager

    GRAPHS.append(len(graph.graph.nodes))
    return aot_eager(graph, inputs)


def compile_blocks(model: nn.Module, how: str) -> None:
    blocks = model.get_submodule("blocks")
    assert isinstance(blocks, nn.ModuleList)
    for number, block in enumerate(blocks):
        if how == "in place":
            block.compile(backend=counting)
        else:
            blocks[number] = torch.compile(block, backend=counting)  # type: ignore[assignment]


@pytest.mark.few(1)
@pytest.mark.parametrize("when", ["before", "after", "in place"])
@pytest.mark.parametrize("zero", [{}, dict(zero=dict(stage=3, placement="cpu"))])
@ranks(1)
def test_compiled_blocks(when: str, zero: dict[str, Any]) -> None:
    seen = {}
    for recompute in (None, "blocks"):
        torch._dynamo.reset()
        GRAPHS.clear()
        torch.manual_seed(0)
        made = llama()
        if when != "after":
            compile_blocks(made, when)
        engine = Engine(made, zero, optimizer=dict(name="adamw", lr=1e-2), recompute=recompute)
        if when == "after":
            compile_blocks(engine.model, when)
        losses = [engine.train_step(batch(step)) for step in range(3)]
        if engine.recomputed_blocks is not None:
            assert when == "after" or GRAPHS  # compiled afterwards, only those that keep are
            engine.recomputed_blocks.keep(engine.recomputed_blocks.names[1:])
        seen[recompute] = losses + [engine.train_step(batch(step)) for step in range(3, 5)]
        assert GRAPHS
        engine.close()
    if when == "after":
        assert seen["blocks"] == pytest.approx(seen[None], rel=1e-6)
    else:
        assert seen["blocks"] == seen[None]
