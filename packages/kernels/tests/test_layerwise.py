"""LAMB's direction and LARS' step in numba equal the reference, and refuse what they cannot take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import meshfold.kernels as K

COUNT = 70001  # two blocks, the last one not whole
LAMB: dict[str, Any] = dict(betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1, corrections=(0.3, 0.4))
LARS: dict[str, Any] = dict(ratio=0.3, lr=0.1, weight_decay=0.1, dampening=0.1)


def tensors(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    found = [torch.randn(COUNT, generator=generator, dtype=torch.float64).to(dtype) for _ in range(4)]
    found[3].abs_()
    return found


def both(run: Any, dtype: torch.dtype) -> list[list[Tensor]]:
    found = []
    for implementation in ("reference", "numba"):
        given = tensors(dtype)
        with K.use(implementation):
            out = run(*given)
        found.append([*given, *([] if out is None else [out])])
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numba_steps_as_the_reference(dtype: torch.dtype) -> None:
    def lamb(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> Tensor:
        return K.lamb_direction(p, g, m, v, **LAMB)

    def lars(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
        K.lars_step(p, g, m, momentum=0.9, nesterov=False, first=True, **LARS)
        K.lars_step(p, g, m, momentum=0.9, nesterov=False, first=False, **LARS)
        K.lars_step(p, g, m, momentum=0.9, nesterov=True, first=False, **LARS)
        K.lars_step(p, g, None, momentum=0.0, nesterov=False, first=True, **LARS)

    close = dict(rtol=1e-12, atol=1e-13) if dtype == torch.float64 else dict(rtol=1e-5, atol=1e-6)
    for run in (lamb, lars):
        for wanted, found in zip(*both(run, dtype), strict=True):
            torch.testing.assert_close(found, wanted, **close)
    assert not torch.equal(both(lamb, dtype)[1][2], tensors(dtype)[2])


def test_what_cannot_be_stepped_is_refused() -> None:
    p, g, m, v = tensors(torch.float32)
    with pytest.raises(TypeError, match="float64"):
        K.lamb_direction(p, g.double(), m, v, **LAMB)
    with pytest.raises(ValueError, match="give both, or none"):
        K.lars_step(p, g, None, momentum=0.9, nesterov=False, first=True, **LARS)
    with pytest.raises(ValueError, match="square"):
        K.lamb_direction(p, g, m, v[:5], **LAMB)
