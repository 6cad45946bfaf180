"""Bytes of state found on meta tensors are those of a real step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from meshfold.mesh.parameters import OptimizerProbeError, state_bytes

SHAPES = [(12, 5), (5, 12), (7,), (3, 4, 6)]


@pytest.mark.parametrize("made", [torch.optim.Adafactor, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop])
def test_bytes_are_those_of_a_real_step(made: Any) -> None:
    """torch's Adafactor reads a number in its step, which no meta tensor has: by then its state is there."""
    settings = dict(lr=0.1, momentum=0.9) if made is torch.optim.SGD else dict(lr=0.1)
    trial = [nn.Parameter(torch.empty(()).expand(shape)) for shape in SHAPES]
    found = state_bytes(made(trial, **settings), torch.float64)
    real = [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in SHAPES]
    optimizer = made(real, **settings)
    for parameter in real:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    kept = [sum(v.nbytes for v in optimizer.state[p].values() if v is not None and v.numel() > 1) for p in real]
    assert [found[parameter] for parameter in trial] == kept and sum(kept) > 0


def test_an_optimizer_that_fails_before_it_has_state_is_named() -> None:
    class Broken(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise ValueError("no")

    with pytest.raises(OptimizerProbeError, match=r"Broken.*\(4, 3\).*no"):
        state_bytes(Broken([nn.Parameter(torch.zeros(4, 3))]), torch.float32)
