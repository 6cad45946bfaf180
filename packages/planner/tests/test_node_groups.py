"""Nodes of groups, and plans of large jobs: by arithmetic, without a list of all ranks."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest

from meshfold.mesh import Mesh, ParallelSpec, SpecError
from meshfold.models import Llama, LlamaConfig
from meshfold.planner import MACHINES, estimate
from meshfold.planner.node_groups import leaves_node, ranks_of_a_node, some_neighbours_apart


def test_links_by_arithmetic_are_those_of_all_groups() -> None:
    for sizes, devices in itertools.product(([2, 2, 2], [4, 1, 2], [3, 2, 2], [2, 6, 1], [8, 1, 2]), (1, 2, 4, 6, 8)):
        axes = dict(zip("abc", sizes, strict=True))
        mesh = Mesh(axes, rank=0)
        for over in itertools.chain.from_iterable(itertools.combinations("abc", n) for n in (1, 2, 3)):
            nodes = [Counter(rank // devices for rank in ranks) for ranks in mesh.groups(*over)]
            given = devices, tuple(axes.items()), over
            assert leaves_node(*given) == any(len(node) > 1 for node in nodes), (axes, devices, over)
            fewest = min(min(node.values()) for node in nodes)
            assert ranks_of_a_node(*given) == (fewest, sum(nodes[0].values())), (axes, devices, over)
        for axis, size in axes.items():
            groups = mesh.groups(axis)
            for one, other in itertools.pairwise(range(size)):
                apart = any(ranks[one] // devices != ranks[other] // devices for ranks in groups)
                assert some_neighbours_apart(devices, tuple(axes.items()), axis, one, other) == apart


def test_links_of_factors_of_axes_are_those_of_all_groups() -> None:
    axes = dict(data=12, tensor=4)
    mesh = Mesh(axes, rank=0)
    for devices, over in itertools.product(
        (2, 3, 8), (("data/3",), ("data%4/2",), ("tensor%2", "data%2"), ("data/2", "data%3"))
    ):
        nodes = [Counter(rank // devices for rank in ranks) for ranks in mesh.groups(*over)]
        given = devices, tuple(axes.items()), over
        assert leaves_node(*given) == any(len(node) > 1 for node in nodes), (devices, over)
        assert ranks_of_a_node(*given)[0] == min(min(node.values()) for node in nodes), (devices, over)


def test_digits_make_the_numbers_of_a_group() -> None:
    mesh = Mesh(dict(data=12, tensor=4), rank=29)
    assert mesh.digits("data") == [(4, 1, False), (12, 4, True)]
    assert mesh.digits("tensor", "data%4/2") == [(4, 1, True), (2, 4, False), (2, 8, True), (3, 16, False)]
    for axes in (("data",), ("tensor", "data%4/2"), ("data/3", "tensor%2"), ("other",), ()):
        assert mesh.ranks_along(*axes) == next(tuple(sorted(ranks)) for ranks in mesh.groups(*axes) if 29 in ranks)
    with pytest.raises(SpecError, match="4 does not divide 6"):
        mesh.digits("data%4", "data/2")


@pytest.mark.few(1)
@pytest.mark.parametrize("parallel", [dict(pipeline=dict(size=2, microbatches=2)), dict(tensor=2)])
def test_a_plan_looks_at_as_many_ranks_for_large_jobs_as_for_small_ones(
    monkeypatch: pytest.MonkeyPatch, parallel: dict[str, Any]
) -> None:
    """With ``zero`` and over nodes: plans looked at every rank of the job, for every chunk."""
    looked_at, coordinates = [0], Mesh.coordinates

    def counted(mesh: Mesh, rank: int | None = None) -> dict[str, int]:
        looked_at[0] += rank is not None
        return coordinates(mesh, rank)

    monkeypatch.setattr(Mesh, "coordinates", counted)
    config = LlamaConfig(vocab_size=64, hidden=64, layers=2, heads=2, kv_heads=2, ffn=64, max_positions=16)
    counts = []
    for data in (8, 2048):
        looked_at[0] = 0
        spec = ParallelSpec.parse(dict(data=data, zero=dict(stage=3), **parallel))
        estimate(lambda: Llama(config), spec, batch_size=2 * data, seq_len=16, machine=MACHINES["h100x8"])
        counts.append(looked_at[0])
    assert counts[0] == counts[1]
