"""Flat states, gradients and comparisons that the tests of Adam share."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from meshfold import kernels as K

STATES = ("whole", "whole+bfloat16", "whole+float16", "A", "B", "C")


def normal(n: int, seed: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """Numbers of many magnitudes, some of them zero: what the hard cases of rounding need."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=generator) * 10 ** torch.empty(n).uniform_(-4, 1, generator=generator)
    return torch.where(torch.rand(n, generator=generator) < 0.02, 0.0, x).to(device, dtype)


def state(kind: str, master: Tensor) -> K.AdamState:
    """A fresh state of this kind over a copy of ``master``."""
    made = {
        "whole": lambda p: K.WholeState.of(p),
        "whole+bfloat16": lambda p: K.WholeState.of(p, torch.bfloat16),
        "whole+float16": lambda p: K.WholeState.of(p, torch.float16),
        "A": lambda p: K.SplitState.of(p),
        "B": lambda p: K.SplitState.of(p, torch.bfloat16),
        "C": lambda p: K.QuantizedState.of(p),
    }
    return made[kind](master.clone())


def tensors(state: K.AdamState) -> dict[str, Tensor]:
    """The tensors of a state by name."""
    found = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    return {name: x for name, x in found.items() if x is not None}


def raw(x: Tensor) -> Tensor:
    """The bits of a tensor as integers, so that -0 and 0 differ; NaNs all alike."""
    if not x.is_floating_point():
        return x
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return torch.where(x.isnan(), -1, x.detach().contiguous().view(integers))


def assert_same(got: K.AdamState, wanted: K.AdamState, what: str = "") -> None:
    """Equal to the bit in every tensor."""
    for name, x in tensors(got).items():
        y = tensors(wanted)[name]
        differ = raw(x) != raw(y)
        assert not differ.any(), f"{what} {name}: {int(differ.sum())} of {x.numel()} differ, first at " + str(
            int(differ.nonzero()[0])
        )


def train(
    kind: str,
    implementation: str,
    n: int,
    *,
    steps: int = 3,
    dtype: torch.dtype = torch.bfloat16,
    start: int = 0,
    seed: int = 0,
    halves: bool = False,
    device: str = "cpu",
    grad_scale: float | Tensor = 0.7,
    **settings: float | bool,
) -> K.AdamState:
    """Some steps on random gradients."""
    chosen = K.AdamSettings(**{"lr": 1e-2, "weight_decay": 0.1, **settings})  # type: ignore[arg-type]
    with K.use(implementation):
        made = state(kind, normal(n, seed, device=device))
        for step in range(1, steps + 1):
            grad = normal(n, 100 * seed + step, dtype, device)
            for update in (K.adam_update_parameters, K.adam_update_moments) if halves else (K.adam_step,):
                update(made, grad, chosen, step=step, grad_scale=grad_scale, start=start, seed=7)
    return made
