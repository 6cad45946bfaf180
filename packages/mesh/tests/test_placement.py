"""Placements: every rank's rectangles together are the tensor, for uneven sizes, fused and repeated parts."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from meshfold.mesh import LayoutError, Mesh, Part, Placement
from meshfold.mesh.testing import run_on_ranks


@st.composite
def placements(draw: st.DrawFn) -> tuple[Placement, Mesh]:
    """Any axes in any order on up to three dims, some of which are fused from parts."""
    mesh = Mesh({name: draw(st.integers(1, 3)) for name in "abc"})
    rank = draw(st.integers(1, 3))
    axes: list[tuple[str, ...]] = [()] * rank
    for axis in draw(st.permutations("abc")):
        dim = draw(st.integers(-1, rank - 1))
        if dim >= 0:
            axes[dim] = (*axes[dim], axis)
    shape, parts, multiple = [], {}, {}
    for dim in range(rank):
        blocks = mesh.size(*axes[dim])
        kind = draw(st.sampled_from(["plain", "plain", "parts", "multiple"]))
        shape.append(draw(st.integers(1, 9)))
        if kind == "parts":
            repeats = [r for r in range(1, blocks + 1) if blocks % r == 0]
            chosen = draw(st.lists(st.tuples(st.integers(1, 2), st.sampled_from(repeats)), min_size=1, max_size=3))
            parts[dim] = tuple(Part(times * blocks // repeat, repeat) for times, repeat in chosen)
            shape[dim] = sum(part.size for part in parts[dim])
        elif kind == "multiple":
            multiple[dim] = draw(st.integers(1, 5))
    return Placement(shape=tuple(shape), axes=tuple(axes), parts=parts, multiple=multiple), mesh


def numbered(shape: tuple[int, ...]) -> Tensor:
    """Every element its own number, from 1: padding is 0."""
    return torch.arange(1, math.prod(shape) + 1).view(shape)


def at(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))


@given(placements())
def test_the_rectangles_of_all_ranks_are_the_tensor(given: tuple[Placement, Mesh]) -> None:
    placement, mesh = given
    full = numbered(placement.shape)
    assembled, holders = torch.zeros_like(full), torch.zeros_like(full)
    for rank in range(mesh.world_size):
        local = placement.shard(full, mesh, rank)
        assert tuple(local.shape) == placement.local_shape(mesh, rank) == placement.local_shape(mesh, 0)
        held = torch.zeros_like(local)
        for box in placement.rectangles(mesh, rank):
            assembled[at(box.offsets, box.sizes)] = local[at(box.local_offsets, box.sizes)]
            holders[at(box.offsets, box.sizes)] += 1
            held[at(box.local_offsets, box.sizes)] += 1
        assert torch.equal(held, (local > 0).long()), "rectangles are all of a block but its padding, once"
    assert torch.equal(assembled, full)
    repeats = torch.ones_like(full)
    for dim, parts in placement.parts.items():
        times = torch.cat([torch.full((part.size,), part.repeat) for part in parts])
        repeats *= times.view([-1 if d == dim else 1 for d in range(full.dim())])
    assert torch.equal(holders, repeats * placement.replicas(mesh))


@given(placements())
def test_coordinates_say_where_local_elements_come_from(given: tuple[Placement, Mesh]) -> None:
    placement, mesh = given
    full = numbered(placement.shape)
    for rank in {0, mesh.world_size - 1}:
        local = placement.shard(full, mesh, rank)
        for dim, size in enumerate(placement.shape):
            where = placement.coordinates(mesh, dim, rank)
            assert where.shape == (local.shape[dim],)
            assert sum(n for _, n in placement.segments(mesh, dim, rank)) == local.shape[dim]
            padding = local.index_select(dim, (where >= size).nonzero().flatten())
            assert not padding.any()
    if full.dim() == 1:
        inside = where < full.shape[0]
        assert torch.equal(local[inside], full[where[inside]])


@given(placements())
def test_padding_is_less_than_a_block_of_the_least_multiple(given: tuple[Placement, Mesh]) -> None:
    placement, mesh = given
    for dim, (size, local) in enumerate(zip(placement.shape, placement.local_shape(mesh), strict=True)):
        blocks = mesh.size(*placement.axes[dim])
        if dim not in placement.parts:
            padded, least = local * blocks, math.lcm(blocks, placement.multiple.get(dim, 1))
            assert padded % least == 0 and size <= padded < size + least


def test_an_uneven_vocabulary() -> None:
    placement, mesh = Placement(shape=(10, 4), axes=(("tensor",), ())), Mesh({"tensor": 4})
    assert placement.local_shape(mesh) == (3, 4)
    assert [placement.segments(mesh, 0, rank) for rank in range(4)] == [
        [(0, 3)],
        [(3, 3)],
        [(6, 3)],
        [(9, 3)],
    ]
    assert [box.sizes for box in placement.rectangles(mesh, 3)] == [(1, 4)]
    last = Placement(shape=(2,), axes=(("tensor",),))
    assert last.rectangles(mesh, 3) == [] and last.local_shape(mesh, 3) == (1,)


def test_fused_qkv_gives_every_rank_its_heads_of_all_three() -> None:
    parts = {0: (Part(8), Part(4, repeat=1), Part(4))}
    placement, mesh = Placement(shape=(16,), axes=(("tensor",),), parts=parts), Mesh({"tensor": 4})
    assert placement.segments(mesh, 0, 1) == [(2, 2), (9, 1), (13, 1)]
    assert placement.coordinates(mesh, 0, 1).tolist() == [2, 3, 9, 13]


def test_key_value_heads_are_repeated_on_neighbours() -> None:
    parts = {0: (Part(8), Part(2, repeat=2), Part(2, repeat=2))}
    placement, mesh = Placement(shape=(12,), axes=(("tensor",),), parts=parts), Mesh({"tensor": 4})
    assert [placement.coordinates(mesh, 0, rank).tolist() for rank in range(4)] == [
        [0, 1, 8, 10],
        [2, 3, 8, 10],
        [4, 5, 9, 11],
        [6, 7, 9, 11],
    ]
    assert placement.replicas(mesh) == 1


def test_the_order_of_axes_is_that_of_the_placement() -> None:
    mesh = Mesh({"a": 2, "b": 3})
    placement = Placement(shape=(6,), axes=(("b", "a"),))
    assert [placement.shard(torch.arange(6), mesh, rank).item() for rank in range(6)] == [0, 2, 4, 1, 3, 5]
    assert placement.split_axes == ("b", "a")


def test_a_scalar_is_whole_everywhere() -> None:
    placement, mesh = Placement(shape=(), axes=()), Mesh({"a": 3})
    assert placement.local_shape(mesh) == () and placement.replicas(mesh) == 3
    assert placement.shard(torch.tensor(7), mesh).item() == 7 and len(placement.rectangles(mesh)) == 1


def test_shards_do_not_share_memory_with_the_tensor() -> None:
    full = torch.zeros(4)
    Placement(shape=(4,), axes=((),)).shard(full, Mesh({})).add_(1)
    assert not full.any()


def test_what_a_placement_refuses() -> None:
    mesh = Mesh({"tensor": 4})
    with pytest.raises(LayoutError, match=r"1 entries of axes .* for a tensor of 2 dims"):
        Placement(shape=(4, 4), axes=((),))
    with pytest.raises(LayoutError, match=r"parts \(2, 3\) of dim 0 do not add up to its size 6"):
        Placement(shape=(6,), axes=((),), parts={0: (Part(2), Part(3))})
    with pytest.raises(
        LayoutError,
        match=r"a part of 6 in dim 0 .* cannot be split over tensor: make its size a multiple of 4",
    ):
        Placement(shape=(6,), axes=(("tensor",),), parts={0: (Part(6),)}).local_shape(mesh)
    with pytest.raises(LayoutError, match=r"a part of 6 .*repeated 3 times"):
        Placement(shape=(6,), axes=(("tensor",),), parts={0: (Part(6, repeat=3),)}).local_shape(mesh)
    with pytest.raises(LayoutError, match=r"a tensor of shape \(3,\) where the global shape \(4,\) is wanted"):
        Placement(shape=(4,), axes=((),)).shard(torch.zeros(3), mesh)


@cache
def mesh_of(**axes: int) -> Mesh:
    return Mesh(axes)


ON_RANKS = [
    Placement(shape=(8, 6), axes=(("a",), ("b",))),
    Placement(shape=(7, 5), axes=(("b",), ("a",))),
    Placement(shape=(5, 3), axes=(("b", "a"), ())),
    Placement(shape=(3, 9), axes=((), ("a", "b"))),
    Placement(shape=(12, 3), axes=(("a", "b"), ()), parts={0: (Part(8), Part(2, 2), Part(2, 2))}),
    Placement(shape=(3, 12), axes=(("a",), ("b",)), parts={1: (Part(4), Part(8))}),
    Placement(shape=(10,), axes=(("a",),), multiple={0: 8}),
    Placement(shape=(4, 4), axes=((), ())),
    Placement(shape=(9,), axes=(("missing", "b"),)),
]


def round_trips() -> list[bool]:
    mesh = mesh_of(a=2, b=2)
    same = []
    for dtype in (torch.float64, torch.bfloat16, torch.int64):
        for placement in ON_RANKS:
            full = numbered(placement.shape).to(dtype)
            whole = placement.gather(placement.shard(full, mesh), mesh)
            same.append(torch.equal(whole, full) and whole.is_contiguous())
    return same


def test_gather_undoes_shard_on_every_rank() -> None:
    assert run_on_ranks(4, round_trips) == [[True] * len(ON_RANKS) * 3] * 4
