"""The search counts what a layout would waste, and finds the least."""

from __future__ import annotations

import random
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from meshfold.zero_gemini.chunks.chunk_size import items_of, search_chunk_size
from meshfold.zero_gemini.chunks.layout import Item, lay_out
from meshfold.zero_gemini.errors import ChunkLayoutError

some_items = st.lists(st.tuples(st.integers(1, 2000), st.sampled_from("ab")), min_size=1, max_size=30).map(
    lambda pairs: [Item(f"p{i}", numel, group) for i, (numel, group) in enumerate(pairs)]
)


@given(
    items=some_items,
    shards=st.integers(1, 4),
    low=st.integers(1, 1500),
    more=st.integers(0, 3000),
    step=st.integers(1, 700),
    unit=st.sampled_from([(1, 1), (16, 8), (128, 64)]),
)
def test_finds_the_least_waste_of_all_layouts(items, shards, low, more, step, unit):
    aligned = dict(align_elems=unit[0], slot_align_elems=unit[1])
    found = search_chunk_size(items, shards, min_elems=low, max_elems=low + more, step_elems=step, **aligned)

    best = lay_out(items, found.chunk_elems, shards, **aligned)
    assert best.chunk_elems == found.chunk_elems  # a size that needs no rounding
    assert best.waste_elems == found.waste_elems
    assert found.waste_share == best.waste_elems / best.size_elems

    # by brute force over the same sizes
    multiple = shards * unit[0]
    whole = max(chunk.size_elems for chunk in lay_out(items, 10**6, shards, **aligned).chunks)
    first, stride = -(-low // multiple) * multiple, -(-step // multiple) * multiple
    sizes = range(first, max(first, (low + more) // multiple * multiple) + 1, stride)
    for size in sizes:
        layout = lay_out(items, size, shards, **aligned)
        assert layout.waste_elems >= found.waste_elems
        if layout.waste_elems == found.waste_elems and size <= whole:
            assert found.chunk_elems >= size
    assert found.chunk_elems <= max(whole, multiple)
    assert 1 <= found.candidates <= len(sizes) + 1  # and the largest that is allowed


def test_ties_go_to_the_larger():
    items = [Item(f"p{i}", 64, "x") for i in range(12)]
    found = search_chunk_size(items, min_elems=64, max_elems=256, step_elems=64, align_elems=64, slot_align_elems=64)
    assert (found.chunk_elems, found.waste_elems, found.candidates) == (256, 0, 4)


def test_a_size_that_wastes_less_beats_a_larger_one():
    items = [Item(f"p{i}", 300, "x") for i in range(4)]
    found = search_chunk_size(items, min_elems=300, max_elems=800, step_elems=100, align_elems=1, slot_align_elems=1)
    assert (found.chunk_elems, found.waste_elems) == (600, 0)


def test_a_small_model_is_one_chunk_no_larger_than_it():
    found = search_chunk_size([Item("w", 1000, "x"), Item("v", 200, "y")], shards=2)
    assert found.chunk_elems == 1024
    assert found.candidates == 1
    assert found.waste_elems == 24 + 312
    assert str(found) == "chunks of 1,024 elements waste 336 (21.88%), the least of 1 sizes"


def test_accepts_a_module_with_tied_frozen_and_mixed_parameters():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(50, 16)
            self.norm = nn.LayerNorm(16, dtype=torch.float64)
            self.empty = nn.Parameter(torch.empty(0))
            self.head = nn.Linear(16, 50, bias=False, device="meta")
            self.head.weight = self.embed.weight
            self.adapter = nn.Linear(16, 16, device="meta")
            self.adapter.bias.requires_grad_(False)

    model = Model()
    items = items_of(model)
    assert [(item.name, item.numel) for item in items] == [
        ("embed.weight", 800),
        ("norm.weight", 16),
        ("norm.bias", 16),
        ("adapter.weight", 256),
        ("adapter.bias", 16),
    ]
    assert [item.group for item in items] == [
        (torch.float32, (), True),
        (torch.float64, (), True),
        (torch.float64, (), True),
        (torch.float32, (), True),
        (torch.float32, (), False),
    ]
    assert search_chunk_size(model, 2) == search_chunk_size(items, 2)


def test_a_thousand_parameters_and_a_thousand_sizes_are_searched_at_once():
    rng = random.Random(0)
    items = [Item(f"p{i}", rng.choice([4096, 2**20, 2**22, 3 * 2**20 + 17]), i % 3) for i in range(1000)]
    began = time.process_time()
    found = search_chunk_size(items, 8, min_elems=2**22, max_elems=2**22 + 999 * 2**14, step_elems=2**14)
    assert time.process_time() - began < 60.0
    assert found.candidates == 1000


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (dict(items=[]), "no parameters"),
        (dict(items=nn.ReLU()), "no parameters"),
        (dict(min_elems=0), "min_elems is 0"),
        (dict(min_elems=10, max_elems=5), "max_elems, 5, is below min_elems, 10"),
        (dict(step_elems=-1), "step_elems is -1"),
        (dict(shards=0), "shards is 0"),
        (dict(items=[Item("w", 1, 0), Item("w", 2, 0)]), "'w' is given twice"),
    ],
)
def test_errors_say_what_is_wrong(arguments, says):
    with pytest.raises(ChunkLayoutError, match=says):
        search_chunk_size(**{"items": [Item("w", 4, "x")], **arguments})
