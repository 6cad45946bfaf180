"""Under ``placement="cuda"`` a block that is larger than a chunk has one of its own, and trains as one process does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from meshfold.engine import Engine
from meshfold.mesh import record
from meshfold.mesh.testing import run_on_ranks

WIDTH, BLOCKS = 300, 3


class Model(nn.Module):
    """Blocks of 360,000 elements: chunks of a model of this size have at most 262,144."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))) for _ in range(BLOCKS))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.last(x).square().mean()


def trained(parallel: dict[str, Any], rank: int, ranks: int) -> tuple[list[float], dict[str, Tensor], int]:
    """Return the losses and weights after three steps, and the gathers of the last."""
    torch.manual_seed(0)
    optimizer = dict(name="adamw", lr=1e-3)
    engine = Engine(Model().double(), parallel, precision="fp64", optimizer=optimizer, clip_grad_norm=0.1)
    x = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).chunk(ranks)[rank]
    losses = []
    for _ in range(3):
        with record() as log:
            losses.append(float(engine.train_step(dict(x=x))))
    gathers = sum(entry.kind == "all_gather" for entry in log.entries)
    return losses, {name: value.clone() for name, value in engine.full_state_dict().items()}, gathers


def on_rank(stage: int, more: dict[str, Any]) -> tuple[list[float], dict[str, Tensor], int]:
    return trained(dict(data=2, zero=dict(stage=stage, placement="cuda", **more)), torch.distributed.get_rank(), 2)


def test_it_trains_as_one_process_with_a_gather_for_each_block_and_pass() -> None:
    losses, weights, _ = trained(dict(data=1), 0, 1)
    # Blocks, and one chunk of the two layers around them. It is gathered again for the last; stage 2 gathers once a step.
    kept_whole: dict[str, Any] = dict(reshard_after_forward=False)
    cases = [(3, {}, BLOCKS + 2 + BLOCKS + 1), (3, kept_whole, BLOCKS + 2), (2, {}, None)]
    for stage, more, gathers in cases:
        found = run_on_ranks(2, on_rank, stage, more)
        for step, loss in enumerate(losses):
            assert abs(sum(each[0][step] for each in found) / 2 - loss) < 1e-12
        for name, value in weights.items():
            torch.testing.assert_close(found[0][1][name], value, rtol=1e-9, atol=1e-11)
        assert gathers in (None, found[0][2])
