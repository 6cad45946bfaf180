"""Dealing, masks and tiles: pure functions against enumeration."""

from __future__ import annotations

from itertools import chain, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshfold.mesh import Mesh
from meshfold.mesh.errors import LayoutError
from meshfold.sequence import (
    Mask,
    SequenceSharding,
    next_tokens,
    positions,
    shard_sequence,
    steps,
    tiles,
    work,
)
from meshfold.sequence.tiling import Tile, dense

shardings = st.builds(
    SequenceSharding,
    length=st.integers(1, 40),
    ring=st.integers(1, 5),
    ulysses=st.integers(1, 3),
    order=st.sampled_from(["zigzag", "contiguous"]),
)


@st.composite
def masks(draw: st.DrawFn, length: int) -> Mask:
    cuts = draw(st.sets(st.integers(1, length - 1), max_size=5)) if length > 1 else set()
    return Mask(
        length=length,
        causal=draw(st.booleans()),
        window=draw(st.none() | st.integers(1, 9)),
        documents=(0, *sorted(cuts), length) if draw(st.booleans()) else None,
    )


def tokens(pieces: tuple[tuple[int, int], ...]) -> list[int]:
    return [token for start, stop in pieces for token in range(start, stop)]


@settings(max_examples=2 * settings().max_examples)
@given(sharding=shardings)
def test_every_token_is_sharded_once_in_equal_shares_and_joins_again(sharding: SequenceSharding) -> None:
    shards = [tokens(sharding.pieces(rank)) for rank in range(sharding.ranks)]
    assert all(len(mine) == sharding.local and mine == sorted(mine) for mine in shards)
    assert sorted(chain.from_iterable(shards)) == list(range(sharding.padded))
    assert 0 <= sharding.padded - sharding.length < sharding.unit
    for place in range(sharding.ring):
        # What shares a place in the ring has, one behind the other, the shards of that place.
        together = list(chain.from_iterable(shards[place * sharding.ulysses : (place + 1) * sharding.ulysses]))
        assert together == tokens(sharding.ring_pieces(place))
    x = torch.randn(2, sharding.length, 3)
    shards = [sharding.shard(x, rank) for rank in range(sharding.ranks)]
    assert torch.equal(sharding.join(shards), x)
    assert torch.equal(sharding.join(torch.cat(shards, 1)), x)


def test_zigzag_is_an_early_and_a_late_piece() -> None:
    sharding = SequenceSharding(length=32, ring=4)
    assert [sharding.pieces(rank) for rank in range(4)] == [
        ((0, 4), (28, 32)),
        ((4, 8), (24, 28)),
        ((8, 12), (20, 24)),
        ((12, 20),),
    ]
    assert sharding.indices(1).tolist() == [4, 5, 6, 7, 24, 25, 26, 27]
    assert SequenceSharding(length=32, ring=4, order="contiguous").pieces(1) == ((8, 16),)


@settings(max_examples=2 * settings().max_examples)
@given(data=st.data(), sharding=shardings)
def test_tiles_cover_what_is_seen_once_and_nothing_else(data: st.DataObject, sharding: SequenceSharding) -> None:
    mask = data.draw(masks(sharding.length))
    for i in range(sharding.ring):
        for j in range(sharding.ring):
            queries, keys = tokens(sharding.ring_pieces(i)), tokens(sharding.ring_pieces(j))
            covered = torch.zeros(len(queries), len(keys), dtype=torch.int64)
            for tile in tiles(sharding.ring_pieces(i), sharding.ring_pieces(j), mask):
                part = torch.ones(tile.rows, tile.columns, dtype=torch.int64)
                part = {"full": part, "lower": part.tril(), "upper": part.triu()}[tile.shape]
                covered[tile.q : tile.q + tile.rows, tile.k : tile.k + tile.columns] += part
                assert int(part.sum()) == tile.work
            seen = [[first <= key < stop for key in keys] for first, stop in map(mask.visible, queries)]
            assert torch.equal(covered, torch.tensor(seen, dtype=torch.int64))
            assert torch.equal(
                covered.bool(), dense(mask, torch.tensor(queries), torch.tensor(keys))
            )  # two ways to say a mask


def test_halves_of_a_zigzag_meet_as_halves() -> None:
    sharding, mask = SequenceSharding(length=64, ring=4), Mask(length=64)
    assert steps(sharding, mask, 1) == (
        (Tile("lower", 0, 0, 16, 16),),  # its own two pieces: one triangle
        (Tile("full", 0, 0, 16, 8),),  # an earlier rank: all queries see the early half
        (Tile("full", 8, 0, 8, 16),),  # a later one: the late half of the queries sees all
        (Tile("full", 8, 0, 8, 16),),
    )


def test_blocks_that_a_mask_empties_are_skipped() -> None:
    sharding, mask = SequenceSharding(length=64, ring=4, order="contiguous"), Mask(length=64)
    assert [len(step) for step in steps(sharding, mask, 1)] == [1, 1, 0, 0]
    assert [len(steps(sharding, Mask(length=64, window=5), rank)) for rank in range(4)] == [2] * 4
    packed = Mask(length=64, documents=(0, 16, 32, 48, 64))
    assert [len(steps(sharding, packed, rank)) for rank in range(4)] == [1] * 4


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 64])
def test_zigzag_balances_causal_work(ranks: int) -> None:
    """Equal within one block; contiguous, the last rank has nearly twice the mean."""
    length = 16 * ranks
    mask = Mask(length=length)
    whole = length * (length + 1) // 2
    balanced = [work(SequenceSharding(length=length, ring=ranks), mask, rank) for rank in range(ranks)]
    uneven = [
        work(SequenceSharding(length=length, ring=ranks, order="contiguous"), mask, rank) for rank in range(ranks)
    ]
    assert sum(balanced) == sum(uneven) == whole
    assert len(set(balanced)) == 1
    assert max(uneven) * ranks / whole == pytest.approx((2 * ranks - 1) / ranks, rel=0.07)
    short = [work(SequenceSharding(length=length - 3, ring=ranks), Mask(length=length - 3), r) for r in range(ranks)]
    assert max(short) <= balanced[0] and sum(short) == whole - sum(range(length - 2, length + 1))


def test_positions_follow_the_sharding_and_start_again_at_documents() -> None:
    mesh = Mesh({"seq": 2}, rank=0)
    assert positions(8, mesh).tolist() == [0, 1, 6, 7]
    assert positions(8, mesh, documents=(0, 3, 7, 8)).tolist() == [0, 1, 3, 0]
    assert positions(8, mesh, "ulysses").tolist() == [0, 1, 2, 3]
    assert positions(5, mesh).tolist() == [0, 1, 4, 4]  # padding reads no table beyond its end
    assert positions(8, Mesh({"ring": 2, "ulysses": 2}, rank=1), "ring_ulysses").tolist() == [6, 7]
    assert positions(8, Mesh({"data": 4}, rank=1)).tolist() == list(range(8))


def test_shards_and_labels() -> None:
    labels = torch.arange(10, 17).unsqueeze(0)
    assert next_tokens(labels).tolist() == [[11, 12, 13, 14, 15, 16, -100]]
    assert next_tokens(labels, (0, 3, 7)).tolist() == [[11, 12, -100, 14, 15, 16, -100]]
    assert labels[0, 3] == 13  # the argument stays as it was
    shard = shard_sequence(next_tokens(labels), Mesh({"seq": 2}, rank=0), pad=-100)
    assert shard.tolist() == [[11, 12, -100, -100]]


@pytest.mark.parametrize(
    ("documents", "what"),
    [
        ((0, 3), "ends? with|end with"),
        ((1, 8), "start at 0"),
        ((0, 5, 5, 8), "increase"),
        ((8,), "cumulative"),
        ((0, 9, 8), "increase"),
    ],
)
def test_documents_that_are_none_are_refused(documents: tuple[int, ...], what: str) -> None:
    with pytest.raises(LayoutError, match=what):
        positions(8, Mesh({}), documents=documents)


def test_shardings_that_cannot_be_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"Did you mean 'zigzag'"):
        positions(8, Mesh({}), order="zigzags")
    with pytest.raises(LayoutError, match="at least one"):
        SequenceSharding(length=0, ring=2)
    with pytest.raises(LayoutError, match="whole sequence of 8"):
        SequenceSharding(length=8, ring=2).shard(torch.zeros(1, 7), 0)
    with pytest.raises(LayoutError, match="sharded over 2 ranks has 8"):
        SequenceSharding(length=8, ring=2).join([torch.zeros(1, 3)] * 2)


def test_pieces_are_ascending() -> None:
    """What the cutting into tiles rests on."""
    for ring in range(1, 9):
        for ulysses in range(1, 5):
            sharding = SequenceSharding(length=97, ring=ring, ulysses=ulysses)
            for rank in range(sharding.ranks):
                edges = [edge for piece in sharding.pieces(rank) for edge in piece]
                assert all(a < b for a, b in pairwise(edges))
