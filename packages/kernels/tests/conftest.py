"""What the kernels' tests share: helpers beside them, the marker of GPU tests, the comparison with float64."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from meshfold.kernels import use

sys.path.append(str(Path(__file__).parent))  # tests import the helpers that lie beside them

# Largest relative error that rounding a float32 result once may cause.
HALF_ULP = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
}
# What computing may cost before that rounding, relative to the largest element, or to a given scale of the summands.
COMPUTING = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 2e-6, torch.float16: 2e-6}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: runs kernels on a CUDA device, where there is one")


@pytest.fixture(autouse=True)
def automatic() -> Iterator[None]:
    """Every test starts from the automatic choice of kernels, whatever the environment or another test chose."""
    with use("auto"):
        yield


@pytest.fixture(autouse=True, scope="session")
def language_patched_once() -> Iterator[None]:
    """In Triton's interpreter: its functions are put in place once, not at every launch."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from patched_language import patched_once

    with patched_once():
        yield


@pytest.fixture
def rounded_once() -> Callable[..., None]:
    """Asserts that a tensor is its float64 counterpart, computed in at least float32 and rounded once."""

    def check(got: Tensor, exact: Tensor, what: str = "", slack: float = 1.0, scale: float = 0.0) -> None:
        got, exact = got.detach(), exact.detach()
        assert got.shape == exact.shape, f"{what}: shape {list(got.shape)}, expected {list(exact.shape)}"
        assert exact.dtype is torch.float64
        scale = max(scale, float(exact.abs().max()) if exact.numel() else 0.0)
        allowed = slack * (HALF_ULP[got.dtype] * 1.001 * exact.abs() + COMPUTING[got.dtype] * scale + 1e-30)
        excess = (got.double() - exact).abs() - allowed
        worst = float(excess.max()) if excess.numel() else 0.0
        assert worst <= 0.0, f"{what}: off by {worst:.3g} more than allowed (largest element {scale:.3g})"
        assert not got.isnan().any(), f"{what}: NaN"

    return check
