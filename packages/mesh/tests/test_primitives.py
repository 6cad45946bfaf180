"""The eight primitives: each backward is the adjoint of its forward, ``<A x, y> = <x, A* y>``."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor

from meshfold.mesh import LayoutError, Mesh, Placement, all_reduce
from meshfold.mesh.collectives import primitives
from meshfold.mesh.testing import ranks

AXES = [
    ("a",),
    ("b",),
    ("a", "b"),
    ("b", "a"),
    ("a", "missing"),
    ("missing",),
    ("t/2",),
    ("t%2",),
    ("t%2", "t/2"),
]
SHAPE = (4, 8)
Primitive = Callable[[Tensor, Mesh, tuple[str, ...]], Tensor]

# name: (the primitive, whether its input is the same on every rank of the axes, whether its output is)
PRIMITIVES: dict[str, tuple[Primitive, bool, bool]] = {
    "enter": (lambda x, mesh, axes: primitives.bind_enter(mesh, axes)(x), True, False),
    "leave": (lambda x, mesh, axes: primitives.bind_leave(mesh, axes)(x), False, True),
    "gather 0": (lambda x, mesh, axes: primitives.gather(x, mesh, 0, axes), False, False),
    "gather 1": (lambda x, mesh, axes: primitives.gather(x, mesh, 1, axes), False, False),
    "take 0": (lambda x, mesh, axes: primitives.bind_take(mesh, 0, axes)(x), True, False),
    "take 1": (lambda x, mesh, axes: primitives.bind_take(mesh, 1, axes)(x), True, False),
    "collect 0": (lambda x, mesh, axes: primitives.collect(x, mesh, 0, axes), False, True),
    "collect 1": (lambda x, mesh, axes: primitives.collect(x, mesh, 1, axes), False, True),
    "exchange 0 1": (lambda x, mesh, axes: primitives.exchange(x, mesh, 0, 1, axes), False, False),
    "exchange 1 0": (lambda x, mesh, axes: primitives.exchange(x, mesh, 1, 0, axes), False, False),
}


@cache
def meshes() -> tuple[Mesh, Mesh]:
    return Mesh({"a": 2, "b": 2}), Mesh({"t": 4})


def mesh_for(axes: tuple[str, ...]) -> Mesh:
    return meshes()[axes[0].startswith("t")]


def draw(shape: tuple[int, ...], seed: int, mesh: Mesh, axes: tuple[str, ...], alike: bool) -> Tensor:
    """Random numbers of this rank; the same ones along the axes for a replicated tensor."""
    place = (
        mesh.groups(*axes).index(next(g for g in mesh.groups(*axes) if mesh.rank in g)) if alike else 100 + mesh.rank
    )
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * seed + place), dtype=torch.float64)


def inner(a: Tensor, b: Tensor, mesh: Mesh, axes: tuple[str, ...], alike: bool) -> float:
    """The inner product of two global tensors; replicas count once."""
    total = all_reduce((a * b).sum(), mesh.group(*mesh.names)).item()
    return total / mesh.size(*axes) if alike else total


@pytest.mark.parametrize("name", PRIMITIVES)
@ranks(4)
def test_backward_is_the_adjoint_of_forward(name: str) -> None:
    primitive, alike_in, alike_out = PRIMITIVES[name]
    for axes in AXES:
        mesh = mesh_for(axes)
        x = draw(SHAPE, 1, mesh, axes, alike_in).requires_grad_()
        forward = primitive(x, mesh, axes)
        y = draw(tuple(forward.shape), 2, mesh, axes, alike_out)
        forward.backward(y)
        assert x.grad is not None and x.grad.shape == x.shape
        left = inner(forward.detach(), y, mesh, axes, alike_out)
        right = inner(x.detach(), x.grad, mesh, axes, alike_in)
        assert left == pytest.approx(right, rel=1e-12), axes
        for tensor, alike in ((forward.detach(), alike_out), (x.grad, alike_in)):
            if alike:
                largest = all_reduce(tensor, mesh.group(*axes), "max")
                assert torch.equal(largest, tensor), f"{axes}: replicas differ"


def shard(full: Tensor, mesh: Mesh, *axes: tuple[str, ...]) -> Tensor:
    return Placement(shape=tuple(full.shape), axes=axes).shard(full, mesh)


@ranks(4)
def test_blocks_are_numbered_by_the_axes_as_given() -> None:
    """``("b", "a")`` is not ``("a", "b")``: gather, take and exchange agree with the placement."""
    full = torch.arange(96.0).view(8, 12)
    for axes in AXES:
        mesh = mesh_for(axes)
        rows, columns = shard(full, mesh, axes, ()), shard(full, mesh, (), axes)
        assert torch.equal(primitives.gather(rows, mesh, 0, axes), full)
        assert torch.equal(primitives.collect(columns, mesh, 1, axes), full)
        assert torch.equal(primitives.bind_take(mesh, 0, axes)(full), rows)
        assert torch.equal(primitives.bind_take(mesh, 1, axes)(full), columns)
        assert torch.equal(primitives.exchange(rows, mesh, 1, 0, axes), columns)
        assert torch.equal(primitives.exchange(columns, mesh, 0, 1, axes), rows)


@ranks(4)
def test_a_dim_that_cannot_be_taken_apart_is_refused() -> None:
    mesh = mesh_for(("a",))
    with pytest.raises(LayoutError, match=r"\(6, 3\) cannot be split over a, b: 4 does not divide 6; .* multiple of 4"):
        primitives.bind_take(mesh, 0, ("a", "b"))(torch.ones(6, 3))


@ranks(4)
def test_one_rank_of_a_chain_is_like_the_whole() -> None:
    """A column-parallel and a row-parallel product between enter and leave: the gradients of the serial chain."""
    mesh = mesh_for(("t",))
    generator = torch.Generator().manual_seed(7)
    x, v, w = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3, 4), (4, 8), (8, 5)))
    serial = [t.clone().requires_grad_() for t in (x, v, w)]
    (torch.tanh(serial[0] @ serial[1]) @ serial[2]).square().sum().backward()
    local = [x.clone(), shard(v, mesh, (), ("t",)), shard(w, mesh, ("t",), ())]
    for tensor in local:
        tensor.requires_grad_()
    hidden = torch.tanh(primitives.bind_enter(mesh, ("t",))(local[0]) @ local[1])
    primitives.bind_leave(mesh, ("t",))(hidden @ local[2]).square().sum().backward()
    wanted = [
        serial[0].grad,
        shard(serial[1].grad, mesh, (), ("t",)),
        shard(serial[2].grad, mesh, ("t",), ()),
    ]  # type: ignore[arg-type]
    for tensor, want in zip(local, wanted, strict=True):
        torch.testing.assert_close(tensor.grad, want, rtol=1e-12, atol=1e-12)
