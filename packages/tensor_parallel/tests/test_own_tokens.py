"""Modules that work on each token by itself: no rank has another's tokens, and the result is the serial model's."""

from __future__ import annotations

import copy

import pytest
import torch
from tensor_parallel_checks import COVERING, Case, assert_gradients_equal, case, gradients, mesh_of, seeded
from tensor_parallel_models import HIDDEN, Classic
from torch import Tensor, nn

from meshfold.mesh import LayoutError, ParameterMeta, Placement, all_reduce, annotate, metadata
from meshfold.mesh.testing import ranks
from meshfold.tensor_parallel import parallelize

WORDS = 8


class PerToken(nn.Module):
    """A layer that adds up what it was given, and code on its tokens that would not do on a part of a sequence."""

    own_tokens = True

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 12), nn.Linear(12, HIDDEN)
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.shape[:-1].numel()
        flat = x.reshape(-1, HIDDEN)
        order = flat.detach().sum(1).argsort()  # as a dispatch does: the order of tokens is its own affair
        y = self.down(torch.tanh(self.up(flat[order])))
        return torch.empty_like(flat).index_copy(0, order, y).view(x.shape)


class Mixed(Classic):
    """A model whose second block has such a layer behind its MLP."""

    def __init__(self) -> None:
        super().__init__(sequential=True)
        block = self.blocks[1]
        block.mlp = nn.Sequential(block.mlp, PerToken())


def place(module: nn.Module, mesh: object) -> None:
    """Say of the parameters inside that they are whole."""
    for parameter in module.parameters():
        placement = Placement(shape=tuple(parameter.shape), axes=((),) * parameter.dim())
        annotate(parameter, ParameterMeta(mesh=mesh, placement=placement))  # type: ignore[arg-type]


def check(layout: Case, rows: int, length: int) -> None:
    mode, axes = layout
    mesh = mesh_of(axes)
    serial = seeded(Mixed)
    model = copy.deepcopy(serial)
    inner = model.blocks[1].mlp[1]
    place(inner, mesh)
    report = parallelize(model, mesh, mode)
    assert "tokens of its own" in str(report)
    inner = model.blocks[1].mlp[1]
    ids = torch.randint(WORDS, (rows, length), generator=torch.Generator().manual_seed(3))
    losses = []
    for each in (serial, model):
        losses.append(each(ids).square().mean())
        losses[-1].backward()
    assert_gradients_equal({"loss": losses[1]}, {"loss": losses[0]}, layout)
    found = {}
    inside = set(inner.parameters())
    for name, parameter in model.named_parameters():
        meta = metadata(parameter)
        grad = parameter.grad
        assert meta is not None and grad is not None, name
        if parameter in inside:  # each rank has its tokens' part
            grad = all_reduce(grad, mesh.group(*axes_of(mode)))
        found[name] = meta.placement.gather(grad, mesh)
    assert_gradients_equal(found, gradients(serial), layout)
    seen = all_reduce(torch.tensor(inner.seen), mesh.group(*axes_of(mode)))
    assert int(seen) == rows * length  # and no token twice


def axes_of(mode: str) -> tuple[str, ...]:
    return {"1d": ("tensor",), "2d": ("row", "col"), "3d": ("a", "b", "c")}[mode.split("+")[0]]


@pytest.mark.few(1)
@ranks(4)
@pytest.mark.parametrize("layout", COVERING, ids=[mode for mode, _ in COVERING])
def test_gradients_are_serial_and_no_token_is_worked_on_twice(layout: Case) -> None:
    check(layout, 4, 6)


@ranks(4)
def test_tokens_that_do_not_divide() -> None:
    check(case("1d", tensor=4), 1, 5)  # the last of four ranks has none
    check(case("1d", tensor=4), 1, 2)


@ranks(4)
def test_rows_that_were_filled_up_are_refused() -> None:
    mesh = mesh_of(case("2d", row=2, col=2)[1])
    model = seeded(Mixed)
    place(model.blocks[1].mlp[1], mesh)
    parallelize(model, mesh, "2d")
    with pytest.raises(LayoutError, match=r"a batch of 3 rows was padded to 4 .* give 4 rows"):
        model(torch.zeros(3, 6, dtype=torch.int64))
