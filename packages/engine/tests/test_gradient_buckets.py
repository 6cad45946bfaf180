"""The host's work on gradients: operators a bucket, not a parameter."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshfold.engine.precision import Masters, Precision
from meshfold.engine.states import GradientReducer
from meshfold.mesh import Mesh


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def _reducer(model: nn.Module, bucket_bytes: int) -> tuple[GradientReducer, Masters]:
    parameters = list(model.parameters())
    masters = Masters(parameters, Precision.parse("bf16"))
    return GradientReducer(parameters, masters, Mesh({}), bucket_bytes=bucket_bytes), masters


def test_a_bucket_costs_one_copy_and_a_second_micro_step_one_sum() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(12)))
    reducer, masters = _reducer(model, 4 * 8 * 9 * 4)
    reducer.reset()
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    wanted: list[Tensor] = []
    for last, name in ((False, "_foreach_copy_"), (True, "_foreach_add_")):
        gradients = torch.autograd.grad(model(x).float().square().sum(), list(model.parameters()))
        wanted = (
            [g.float() for g in gradients] if not wanted else [w + g for w, g in zip(wanted, gradients, strict=True)]
        )
        loss = model(x).float().square().sum()
        with reducer.backward(last=last), _Operators() as operators:
            loss.backward()
        assert 1 < len(reducer.buckets) <= 6
        assert operators.seen[name] == len(reducer.buckets)
        assert not {"copy_", "add_", "fill_", "slice"} & operators.seen.keys()
        assert all(parameter.grad is None for parameter in model.parameters())
    reducer.finish()
    for parameter, want in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(masters.of(parameter).grad, want)
    reducer.close()


def test_gradients_that_wait_for_their_bucket_are_counted_and_written_at_the_end_of_backward() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    reducer, masters = _reducer(model, 1 << 20)
    held: list[int] = []
    handle = model[0].weight.register_hook(lambda gradient: held.append(reducer.held_bytes))
    loss = model[0](torch.randn(3, 8, dtype=torch.bfloat16)).float().sum()
    second = model[1](torch.randn(3, 8, dtype=torch.bfloat16)).float().sum()
    reducer.reset()
    with reducer.backward(last=False):
        second.backward()
        assert reducer.held_bytes == 8 * 8 * 2  # in bfloat16, until the bucket is full
        loss.backward()
        assert held == [8 * 8 * 2]
        assert reducer.held_bytes == 2 * 8 * 8 * 4
    reducer.reset()
    with reducer.backward(last=True):
        model[1](torch.ones(1, 8, dtype=torch.bfloat16)).float().sum().backward()
    reducer.finish()
    assert masters.of(model[0].weight).grad is None  # no rank used it
    torch.testing.assert_close(masters.of(model[1].weight).grad, torch.ones(8, 8))
    handle.remove()
    reducer.close()
