"""Every parameter lies in one place, whole, and shards cut it exactly."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfold.mesh import Mesh
from meshfold.zero_gemini.chunks.chunk_size import even_chunk_size
from meshfold.zero_gemini.chunks.layout import SLOT_ALIGN_ELEMS, Item, lay_out
from meshfold.zero_gemini.chunks.parameter_table import Member, lay_out_members
from meshfold.zero_gemini.errors import ChunkLayoutError

items_of_any_size = st.lists(
    st.tuples(st.integers(1, 3000), st.sampled_from(["bf16", "fp32", ("data", True)])),
    min_size=0,
    max_size=40,
).map(lambda pairs: [Item(f"p{i}", numel, group) for i, (numel, group) in enumerate(pairs)])
units = st.sampled_from([(1, 1), (4, 4), (64, 16), (256, 64)])


@given(items=items_of_any_size, chunk_elems=st.integers(1, 6000), shards=st.integers(1, 5), unit=units)
def test_layout_invariants(items, chunk_elems, shards, unit):
    align, slot_alignment = unit
    layout = lay_out(items, chunk_elems, shards, align_elems=align, slot_align_elems=slot_alignment)
    by_name = {item.name: item for item in items}

    # every item in exactly one slot, whole, in a chunk of its group
    assert sorted(slot.name for chunk in layout.chunks for slot in chunk.slots) == sorted(by_name)
    assert layout.chunk_elems >= chunk_elems
    assert layout.chunk_elems - chunk_elems < shards * align
    for index, chunk in enumerate(layout.chunks):
        assert chunk.index == index
        assert chunk.size_elems == shards * chunk.shard_elems
        assert chunk.shard_elems % align == 0
        assert chunk.size_elems <= layout.chunk_elems or len(chunk.slots) == 1
        end = 0
        for slot in chunk.slots:
            assert slot.numel == by_name[slot.name].numel
            assert by_name[slot.name].group == chunk.group
            assert slot.start_elems >= end  # in order, no overlap
            assert slot.start_elems % slot_alignment == 0
            end = slot.start_elems + slot.numel
            assert layout.chunk_of(slot.name) is chunk
            assert layout.slot_of(slot.name) is slot
        assert end <= chunk.size_elems
        # waste is what no slot covers
        covered = [0] * chunk.size_elems
        for slot in chunk.slots:
            covered[slot.start_elems : slot.start_elems + slot.numel] = [1] * slot.numel
        assert chunk.waste_elems == covered.count(0)
    assert layout.used_elems == sum(item.numel for item in items)
    assert layout.size_elems == layout.used_elems + layout.waste_elems

    for group in {item.group for item in items}:
        small = [item.name for item in items if item.group == group and item.numel <= layout.chunk_elems]
        chunks = [chunk for chunk in layout.chunks if chunk.group == group]
        shared = [chunk for chunk in chunks if chunk.slots[0].numel <= layout.chunk_elems]
        # the order of use is kept; only the last chunk is shrunk, to what it needs
        assert [name for chunk in shared for name in chunk.names] == small
        for chunk in shared[:-1]:
            assert chunk.size_elems == layout.chunk_elems
        for chunk in [*shared[-1:], *(chunk for chunk in chunks if chunk not in shared)]:
            last = chunk.slots[-1]
            assert chunk.size_elems - (last.start_elems + last.numel) < shards * align
        # first fit: the first of a chunk did not fit into the one before
        for before, after in itertools.pairwise(shared):
            end = before.slots[-1].start_elems + before.slots[-1].numel
            start = -(-end // slot_alignment) * slot_alignment
            assert start + after.slots[0].numel > layout.chunk_elems


@given(items=items_of_any_size, chunk_elems=st.integers(1, 6000), shards=st.integers(1, 5), unit=units)
def test_shards_partition_every_parameter(items, chunk_elems, shards, unit):
    layout = lay_out(items, chunk_elems, shards, align_elems=unit[0], slot_align_elems=unit[1])
    reached = {item.name: 0 for item in items}
    for chunk in layout.chunks:
        for rank in range(shards):
            end = 0
            assert layout.shard_slices(chunk, rank) == layout.shard_slices(chunk.index, rank)
            for name, parameter_start, shard_start, length in layout.shard_slices(chunk, rank):
                assert length > 0
                assert shard_start >= end
                end = shard_start + length
                assert end <= chunk.shard_elems
                assert parameter_start == reached[name]  # the next element, none twice, none left out
                # the same element by both ways
                slot = layout.slot_of(name)
                assert slot.start_elems + parameter_start == rank * chunk.shard_elems + shard_start
                reached[name] += length
    assert reached == {item.name: item.numel for item in items}


def test_small_example_by_hand():
    items = [
        Item("a", 100, "x"),
        Item("big", 1000, "x"),
        Item("other", 10, "y"),
        Item("b", 60, "x"),  # next to a: the open chunk stays open past a large item
        Item("c", 500, "x"),
    ]
    layout = lay_out(items, chunk_elems=500, shards=2, align_elems=64, slot_align_elems=64)
    assert layout.chunk_elems == 512
    assert [(chunk.names, chunk.size_elems) for chunk in layout.chunks] == [
        (("a", "b"), 512),  # full size, although c did not fit
        (("big",), 1024),
        (("other",), 128),
        (("c",), 512),
    ]
    assert layout.slot_of("b").start_elems == 128
    assert layout.waste_elems == 512 - 160 + 24 + 118 + 12
    assert layout.shard_slices(1, 0) == [("big", 0, 0, 512)]
    assert layout.shard_slices(1, 1) == [("big", 512, 0, 488)]
    assert layout.shard_slices(0, 1) == []


def test_default_alignment_suits_every_dtype():
    layout = lay_out([Item("a", 3, "x"), Item("b", 5, "x")], chunk_elems=10, shards=4)
    assert layout.slot_of("b").start_elems == SLOT_ALIGN_ELEMS == 64
    assert layout.chunks[0].size_elems == 1024
    assert layout.chunks[0].shard_elems == 256


def test_table_shows_every_chunk():
    layout = lay_out([Item("wte", 4096, "bf16"), Item("fc", 1000, "bf16"), Item("ln", 7, "fp32")], 4096, 2)
    lines = str(layout).splitlines()
    assert lines[0].split() == ["chunk", "group", "parameters", "from", "to", "size", "shard", "waste"]
    assert [line.split() for line in lines[1:4]] == [
        ["0", "bf16", "1", "wte", "wte", "4,096", "2,048", "0"],
        ["1", "bf16", "1", "fc", "fc", "1,024", "512", "24"],
        ["2", "fp32", "1", "ln", "ln", "512", "256", "505"],
    ]
    assert lines[4] == (
        "3 parameters, 5,103 elements in 3 chunks of up to 4,096, 2 shards each; waste 529 elements (9.39%)"
    )
    assert "0 parameters" in str(lay_out([], 64, 1))


@pytest.mark.parametrize(
    ("items", "arguments", "says"),
    [
        ([Item("w", 0, "x")], dict(chunk_elems=10, shards=1), "'w' has 0 elements"),
        ([Item("w", -3, "x")], dict(chunk_elems=10, shards=1), "'w' has -3 elements"),
        ([Item("w", 1, "x"), Item("w", 1, "y")], dict(chunk_elems=10, shards=1), "'w' is given twice"),
        ([], dict(chunk_elems=0, shards=1), "chunk_elems is 0"),
        ([], dict(chunk_elems=10, shards=0), "shards is 0"),
        ([], dict(chunk_elems=10, shards=1, align_elems=0), "align_elems is 0"),
        (
            [],
            dict(chunk_elems=10, shards=1, align_elems=100),
            "align_elems is 100, not a multiple .*take 128",
        ),
    ],
)
def test_errors_say_what_is_wrong(items, arguments, says):
    with pytest.raises(ChunkLayoutError, match=says) as caught:
        lay_out(items, **arguments)
    assert isinstance(caught.value, ValueError)


def test_questions_about_what_is_not_there():
    layout = lay_out([Item("decoder.weight", 10, "x")], 10, 2)
    with pytest.raises(ChunkLayoutError, match=r"'decoder.wieght'.*Did you mean 'decoder.weight'"):
        layout.chunk_of("decoder.wieght")
    with pytest.raises(ChunkLayoutError, match="no parameter 'zzz' in these 1 chunks"):
        layout.slot_of("zzz")
    with pytest.raises(ChunkLayoutError, match="no chunk 1: this layout has 1"):
        layout.shard_slices(1, 0)
    with pytest.raises(ChunkLayoutError, match="no chunk -1"):
        layout.shard_slices(-1, 0)
    with pytest.raises(ChunkLayoutError, match="no rank 2: chunks have 2 shards"):
        layout.shard_slices(0, 2)


def test_a_group_may_have_larger_chunks() -> None:
    items = [Item(f"{group}{i}", 300, group) for i in range(4) for group in "ab"]
    layout = lay_out(items, 600, 2, larger={"b": 1200}, align_elems=4, slot_align_elems=4)
    assert [(chunk.group, len(chunk.slots)) for chunk in layout.chunks] == [("a", 2), ("b", 4), ("a", 2)]
    with pytest.raises(ChunkLayoutError, match="at least 1 element"):
        lay_out(items, 600, 2, larger={"b": 0})


def test_larger_chunks_have_no_padding() -> None:
    items = [Item(f"{i}", numel, "b") for i, numel in enumerate((300, 300, 500, 100))]
    layout = lay_out(items, 64, 2, larger={"b": 1000}, align_elems=4, slot_align_elems=4)
    assert [chunk.size_elems for chunk in layout.chunks] == [600, 600]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(1, 60))
def test_even_chunks_are_as_few_and_as_small_as_can_be(numels: list[int], most: int) -> None:
    size = even_chunk_size(numels, most)

    def chunks(full: int) -> list[int]:
        own = [numel for numel in numels if numel > most]
        items = [Item(f"{i}", numel, "x") for i, numel in enumerate(numels) if numel <= most]
        layout = lay_out(items, full, 1, align_elems=1, slot_align_elems=1) if items else None
        return [*own, *(chunk.used_elems for chunk in (layout.chunks if layout else ()))]

    assert size <= most
    assert len(chunks(size)) == len(chunks(most))
    assert not [less for less in range(1, size) if max(numels) <= less and len(chunks(less)) == len(chunks(most))]


def test_a_llama_block_has_two_even_chunks_and_no_padding() -> None:
    hidden, inner = 4096, 14336
    sizes = dict(q=hidden, k=1024, v=1024, o=hidden, gate=inner, up=inner, down=inner)
    members = {
        f"{block}.{name}": Member(numel=hidden * n, kind="bf16", sum_axes=("data",))
        for block in range(3)
        for name, n in sizes.items()
    }
    unit_of = {name: name.split(".")[0] for name in members}
    [(_, layout)] = lay_out_members(members, Mesh(dict(data=2), rank=0), slot_align_elems=64, unit_of=unit_of)
    assert [chunk.size_elems // 2**20 for chunk in layout.chunks] == [96, 112] * 3
    assert layout.waste_elems == 0


def test_units_larger_than_a_chunk_have_few_chunks_of_their_own() -> None:
    million = 2**20
    sizes = {"embed": 8, **{f"block{b}.{p}": 17 for b, parts in enumerate((6, 6, 16)) for p in range(parts)}, "head": 1}
    members = {name: Member(numel=n * million, kind="bf16", sum_axes=("data",)) for name, n in sizes.items()}
    unit_of = {name: name.split(".")[0] for name in sizes}

    def units(ranks: int, **given: Any) -> list[set[str]]:
        mesh = Mesh(dict(data=ranks), rank=0)
        [(_, layout)] = lay_out_members(members, mesh, slot_align_elems=64, **given)
        return [{unit_of[name] for name in chunk.names} for chunk in layout.chunks]

    found = units(2, unit_of=unit_of)
    assert found == [{"embed", "head"}, {"block0"}, {"block1"}, {"block2"}, {"block2"}]  # 102 and 272 million elements
    assert len(units(2)) > len(found)
    assert units(1, unit_of=unit_of) == units(1)
    assert units(2, unit_of=unit_of, chunk_elems=40 * million) == units(2, chunk_elems=40 * million)
