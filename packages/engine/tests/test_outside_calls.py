"""A model's forward calls submodules of its blocks itself: their parameters are there, compiled or not, and gradients are right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshfold.engine import Engine
from meshfold.mesh.testing import ranks, run_on_ranks

WIDTH = 6
GRAPHS: list[int] = []


def counting(graph: Any, inputs: Any) -> Any:
    """The back end that makes forward and backward graphs and runs them without a compiler; counts them."""
    from torch._dynamo.backends.debugging import aot_eager

    GRAPHS.append(1)
    return aot_eager(graph, inputs)


class Embedder(nn.Module):
    """Two layers under one name, as an embedding of timesteps has them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, times: Tensor, *, scale: float = 1.0) -> Tensor:
        out: Tensor = scale * self.second(torch.tanh(self.first(times)))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedder, self.norm, self.up = Embedder(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        out: Tensor = x + self.up(torch.tanh(self.norm(x) * self.embedder(times)))
        return out


class Outside(nn.Module):
    """Calls a block's submodule before the blocks, one with a gradient to its input between them, and one behind, as DiT does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        x = x + self.blocks[2].norm(x)  # type: ignore[operator]
        for place, block in enumerate(self.blocks):
            x = block(x, times)
            if place == 1:
                x = self.blocks[0].up(x)  # type: ignore[operator]
        out: Tensor = self.head(x * self.blocks[0].embedder(times, scale=0.5)).square().mean()  # type: ignore[operator]
        return out


def train(spec: dict[str, Any], compiled: bool, recompute: str | None) -> tuple[list[float], dict[str, Tensor]]:
    torch.compiler.reset()
    GRAPHS.clear()
    torch.manual_seed(0)
    model, generator = Outside(), torch.Generator().manual_seed(1)
    rows = {name: torch.randn(4, WIDTH, generator=generator, dtype=torch.float64) for name in ("x", "times")}
    seen: list[float] = []
    with Engine(
        model,
        spec,
        optimizer=dict(name="sgd", lr=0.1),
        precision="fp64",
        compile=dict(backend=counting) if compiled else False,
        recompute=recompute,
    ) as engine:
        for _ in range(3):
            seen.append(engine.train_step(engine.shard_batch(rows)))
            seen.append(engine.eval_step(engine.shard_batch(rows)))
        return seen, engine.full_state_dict()


def compare(zero: dict[str, Any], compiled: bool, recompute: str | None) -> None:
    """SGD's weights after three steps are equal to rounding only if every gradient was."""
    wanted, weights = train({}, False, None)
    found, ours = train(dict(data=2, zero=zero), compiled, recompute)
    assert found == pytest.approx(wanted, rel=1e-9)
    for name, value in weights.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-9, atol=1e-9, msg=name)
    assert len(GRAPHS) <= 2 * compiled  # all four blocks share them: training and evaluation


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_submodules_called_from_outside_have_their_parameters(compiled: bool) -> None:
    run_on_ranks(2, compare, dict(stage=3, placement="cuda"), compiled, None)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("recompute", [None, "blocks"])
@pytest.mark.parametrize(
    "zero",
    [
        dict(stage=3, placement="cpu"),
        dict(stage=3, placement="cuda", reshard_after_forward=False),
        dict(stage=3, placement="auto", gpu_memory_limit="64KB"),
        dict(stage=2, placement="cuda"),
    ],
    ids=["host", "kept", "planned", "stage 2"],
)
def test_under_every_placement(zero: dict[str, Any], recompute: str | None, compiled: bool) -> None:
    run_on_ranks(2, compare, zero, compiled, recompute)


@ranks(1)
def test_a_call_that_raises_leaves_nothing_behind() -> None:
    """The next call of the submodule gathers again, and closing the engine takes the hooks off."""
    model = Outside()
    embedder = model.blocks[0].embedder
    assert isinstance(embedder, Embedder)
    x = torch.randn(4, WIDTH)
    engine = Engine(model, dict(zero=dict(stage=3, placement="cuda")), optimizer=dict(name="sgd", lr=0.1))
    with pytest.raises(RuntimeError, match="shape"):
        engine.train_step(dict(x=x, times=x[:, 1:]))
    assert engine.train_step(dict(x=x, times=x)) > 0
    engine.close()
    assert not embedder._forward_pre_hooks and not embedder._forward_hooks
    assert not [name for name in embedder.__dict__ if "outside" in name or "around" in name]
