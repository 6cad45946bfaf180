"""Compiled blocks that recompute in their backward graphs: what they compute again, and blocks that cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from meshfold.engine import Engine
from meshfold.mesh.testing import ranks
from meshfold.models import build

PRODUCTS = ("aten.mm.default", "aten.addmm.default")


class Block(nn.Module):
    """A user's block, with one of the things that make repeating it hard."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.calls = kind, 0
        self.norm = nn.BatchNorm1d(8) if kind == "statistics" else nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(self.norm(x)))
        if self.kind == "counts":
            self.calls += 1
        if self.kind == "counts in a buffer":
            self.count += 1
        if self.kind == "branches" and h.sum() > 1e9:
            h = h * 2
        if self.kind == "noise":
            h = h * torch.rand_like(h)
        out: Tensor = x + self.down(h)
        return out


class Blocks(nn.Module):
    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.into(x)
        for block in self.blocks:
            x = block(x)
        return {"loss": x.square().mean()}


def llama() -> nn.Module:
    torch.manual_seed(0)
    return build("llama-tiny", hidden=32, layers=3, heads=4, kv_heads=2, ffn=64, vocab_size=48, max_positions=8)


def transformers_llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8,
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


MODELS = {"own": llama, "transformers": transformers_llama, "plain": Blocks}


def batch(model: str, step: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    if model == "plain":
        return {"x": torch.randn(4, 8, generator=generator, dtype=torch.float64)}
    ids = torch.randint(48, (4, 8), generator=generator)
    return {"input_ids": ids, "labels": ids}


class Graphs:
    """A back end that keeps the graphs that it is given and runs them as they are."""

    def __init__(self) -> None:
        self.forwards: list[torch.fx.GraphModule] = []
        self.backwards: list[torch.fx.GraphModule] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch.aot_autograd import make_boxed_func
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        def kept(graphs: list[torch.fx.GraphModule]) -> Any:
            def compiler(graph: torch.fx.GraphModule, inputs: Any) -> Any:
                graphs.append(graph)
                return make_boxed_func(graph.forward)

            return compiler

        made = aot_autograd(
            fw_compiler=kept(self.forwards),
            bw_compiler=kept(self.backwards),
            partition_fn=min_cut_rematerialization_partition,
        )
        return made(graph, inputs)


def products(graph: torch.fx.GraphModule) -> int:
    return sum(str(node.target) in PRODUCTS for node in graph.graph.nodes)


@pytest.mark.few(1)
@pytest.mark.parametrize("model", MODELS)
@ranks(1)
def test_all_but_the_last_product_is_repeated(model: str) -> None:
    """Backward has two products for each of the forward's; the last one's result is needed by no gradient."""
    torch.compiler.reset()
    graphs = Graphs()
    given = dict(optimizer=dict(name="adamw", lr=1e-2), precision="fp64", kernels="off", recompute="blocks")
    with Engine(MODELS[model](), {}, compile=dict(backend=graphs), **given) as engine:
        for step in range(2):
            engine.train_step(batch(model, step))
        assert engine.recomputed_blocks is not None
        assert engine.recomputed_blocks.in_graphs == engine.recomputed_blocks.names != ()
    assert len(graphs.forwards) == len(graphs.backwards) == 1  # all blocks share them
    forward, backward = graphs.forwards[0], graphs.backwards[0]
    assert products(forward) > 1
    assert products(backward) == 3 * products(forward) - 1
    # No activation is saved for backward, only inputs and the state of random numbers.
    (outputs,) = (node.args[0] for node in forward.graph.nodes if node.op == "output")
    computed = [node for node in outputs[1:] if isinstance(node, torch.fx.Node) and node.op != "placeholder"]
    assert not [node for node in computed if node.meta["val"].is_floating_point()]


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["plain", "statistics", "noise", "counts", "counts in a buffer", "branches"])
@ranks(1)
def test_blocks_with_side_effects_train_alike(kind: str) -> None:
    """Those that a graph cannot repeat recompute outside of it; losses, buffers and random numbers are the eager ones'."""

    def steps(compile: object, recompute: str | None) -> tuple[list[float], dict[str, Tensor], int]:
        torch.compiler.reset()
        torch.manual_seed(5)
        given = dict(optimizer=dict(name="sgd", lr=0.1), precision="fp64", kernels="off")
        with Engine(Blocks(kind), {}, compile=compile, recompute=recompute, **given) as engine:
            losses = [engine.train_step(batch("plain", step)) for step in range(3)]
            blocks = engine.recomputed_blocks
            return losses, engine.full_state_dict(), 0 if blocks is None else len(blocks.in_graphs)

    losses, weights, _ = steps(False, None)
    found, ours, in_graphs = steps(dict(backend="aot_eager"), "blocks")
    assert found == pytest.approx(losses, rel=1e-12)
    for name, weight in weights.items():
        torch.testing.assert_close(ours[name], weight, rtol=1e-10, atol=1e-12, msg=name)
    assert in_graphs == (0 if kind in ("counts", "counts in a buffer", "branches") else 3)


@pytest.mark.few(1)
@ranks(1)
def test_more_sizes_than_graphs() -> None:
    """torch.compile gives up after some graphs of one code; blocks then recompute outside of theirs."""

    def steps(compile: object, recompute: str | None) -> tuple[list[float], int]:
        torch.compiler.reset()
        given = dict(optimizer=dict(name="sgd", lr=0.1), precision="fp64", kernels="off")
        with Engine(llama(), {}, compile=compile, recompute=recompute, **given) as engine:
            losses = []
            for rows in range(1, torch._dynamo.config.recompile_limit + 4):
                ids = torch.arange(8 * rows).view(rows, 8) % 48
                losses.append(engine.train_step({"input_ids": ids, "labels": ids}))
            blocks = engine.recomputed_blocks
            return losses, 0 if blocks is None else len(blocks.in_graphs)

    losses, _ = steps(False, None)
    found, in_graphs = steps(dict(backend="aot_eager", dynamic=False), "blocks")
    assert found == pytest.approx(losses, rel=1e-12)
    assert in_graphs == 0
    assert steps(dict(backend="aot_eager"), "blocks") == (pytest.approx(losses, rel=1e-12), 3)  # sizes become symbols


@ranks(1)
def test_blocks_that_keep_attention_are_not_in_graphs() -> None:
    given = dict(optimizer=dict(name="adamw", lr=1e-2), compile=dict(backend="aot_eager"))
    with Engine(llama(), {}, recompute="but-attention", **given) as engine:
        assert engine.recomputed_blocks is not None
        assert engine.recomputed_blocks.names and engine.recomputed_blocks.in_graphs == ()


@pytest.mark.few(1)
@ranks(1)
def test_a_mode_that_sees_operators_works_around_a_step() -> None:
    torch.compiler.reset()
    given = dict(optimizer=dict(name="adamw", lr=1e-2), precision="fp64", recompute="blocks")
    with Engine(llama(), {}, compile=dict(backend="aot_eager"), **given) as engine:
        engine.train_step(batch("own"))
        with FlopCounterMode(display=False) as seen:
            engine.train_step(batch("own"))
        engine.train_step(batch("own"))
        assert seen.get_total_flops() > 0
        assert engine.recomputed_blocks is not None and engine.recomputed_blocks.in_graphs
