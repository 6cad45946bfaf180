"""The epsilon of norms: torch's default, which follows the input's dtype, and that of norms that keep it to themselves."""

from __future__ import annotations

import copy

import pytest
import torch
from tensor_parallel_checks import alone
from torch import Tensor, nn

from meshfold.mesh import Mesh
from meshfold.mesh.testing import ranks
from meshfold.tensor_parallel import RMSNorm, find_mode, parallelize
from meshfold.tensor_parallel.layers.norm import HeadNorm
from meshfold.tensor_parallel.module_kinds import check_norm, norm_eps

HIDDEN = 8
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def small(dtype: torch.dtype) -> Tensor:
    """Rows whose mean square is about the default epsilon, down to that of float64."""
    rows = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (rows * torch.tensor([1e-7, 1e-5, 1e-4, 1e-2])[:, None]).to(dtype)


@pytest.mark.parametrize("made", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_default_epsilon_is_torchs(made: torch.dtype, dtype: torch.dtype) -> None:
    """Whatever dtype the norm was made in, and whatever it is cast to since."""
    norm = nn.RMSNorm(HIDDEN, dtype=made)
    wanted = copy.deepcopy(norm).to(dtype)(small(dtype))
    mode = find_mode("1d")
    for found in (RMSNorm.convert(norm, norm_eps(norm), alone(), mode), HeadNorm(norm, alone(), mode)):
        torch.testing.assert_close(found.to(dtype)(small(dtype)), wanted)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(11, HIDDEN), nn.RMSNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, 11, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(ids)))


@ranks(2)
def test_the_default_epsilon_is_torchs_where_the_hidden_dim_is_split() -> None:
    torch.manual_seed(0)
    serial = Decoder().bfloat16()
    with torch.no_grad():
        serial.embed.weight.mul_(1e-3)
    ids = torch.arange(8).view(2, 4)
    model = copy.deepcopy(serial)
    parallelize(model, Mesh({"row": 1, "col": 2}), "2d")
    for dtype in (torch.float32, torch.float64):
        torch.testing.assert_close(model.to(dtype)(ids), copy.deepcopy(serial).to(dtype)(ids))


class OwnRMSNorm(nn.Module):
    """Keeps its epsilon in its code."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))
        self.added = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.added)


@pytest.mark.parametrize("eps", [1e-5, 1e-6, 1e-8, 0.0])
def test_an_epsilon_in_a_norms_own_code_is_found(eps: float) -> None:
    norm = OwnRMSNorm(eps)
    check_norm("norm", norm)
    assert norm_eps(norm) == eps
