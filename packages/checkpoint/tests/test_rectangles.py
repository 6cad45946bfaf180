"""Who writes which rectangle of a tensor: over all ranks every element once, on meshes that are not there."""

from __future__ import annotations

import math
from collections import Counter
from itertools import product

import pytest
import torch

from meshfold.checkpoint import shards
from meshfold.checkpoint.shards import (
    Shard,
    shards_of_flat_run,
    shards_of_local,
    windows_of_run,
)
from meshfold.checkpoint.tensors.shard_files import StoredShard, StoredTensor
from meshfold.mesh import Mesh, Placement
from meshfold.mesh.parameters.parameter_meta import ParameterMeta
from meshfold.mesh.placement import Part

AXES = {"data": 3, "row": 2, "col": 4}
PLACEMENTS = {
    "replicated": Placement(shape=(7, 5), axes=((), ())),
    "split twice": Placement(shape=(8, 12), axes=(("row",), ("col",))),
    "padded": Placement(shape=(5, 6), axes=(("row",), ("col",))),
    "one dim, two axes": Placement(shape=(16,), axes=(("row", "col"),)),
    "fused, with fewer key heads": Placement(
        shape=(16, 3), axes=(("col",), ()), parts={0: (Part(8), Part(4, repeat=2), Part(4, repeat=4))}
    ),
    "three dims": Placement(shape=(4, 3, 8), axes=(("row",), (), ("col",))),
    "a number": Placement(shape=(), axes=()),
}


def written(placement: Placement, shares: list[tuple[tuple[Shard, ...], torch.Tensor]]) -> None:
    """That the pieces of all ranks are the tensor, each element once."""
    whole = torch.arange(math.prod(placement.shape), dtype=torch.float64).reshape(placement.shape)
    count = torch.zeros(placement.shape, dtype=torch.int64)
    blocks = []
    for pieces, kept in shares:
        for piece in pieces:
            value = piece.view(kept)
            place = tuple(slice(at, at + size) for at, size in zip(piece.offsets, piece.sizes, strict=True))
            assert tuple(value.shape) == piece.sizes
            assert torch.equal(value, whole[place])
            count[place] += 1
            blocks.append(StoredShard(window=(piece.offsets, piece.sizes), load=lambda value=value: value))
    assert (count == 1).all()
    stored = StoredTensor(placement.shape, torch.float64, blocks)
    assert torch.equal(stored.read(), whole)
    if whole.dim():
        assert torch.equal(stored.narrow(0, 1, whole.shape[0] - 2).read(), whole[1:-1])
    assert torch.equal(torch.zeros_like(whole).copy_(stored), whole)  # type: ignore[arg-type]


@pytest.mark.parametrize("least", [1, 2**20], ids=["by rows", "by lot"])
@pytest.mark.parametrize("case", PLACEMENTS)
def test_blocks_are_written_once(case: str, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "LEAST_SPLIT_BYTES", least)
    placement, shares = PLACEMENTS[case], []
    whole = torch.arange(math.prod(placement.shape), dtype=torch.float64).reshape(placement.shape)
    for rank in range(24):
        mesh = Mesh(AXES, rank=rank)
        local = placement.shard(whole, mesh)
        meta = ParameterMeta(mesh=mesh, placement=placement)
        shares.append((shards_of_local(case, local.shape, meta, dtype=local.dtype), local))
    written(placement, shares)
    if case == "replicated" and least == 1:
        assert sum(bool(pieces) for pieces, _ in shares) == 1  # 24 ranks cannot have a row each of 7


@pytest.mark.parametrize("over", [("data",), ("data", "row"), ()], ids=str)
@pytest.mark.parametrize("case", [case for case in PLACEMENTS if case != "a number"])
def test_runs_are_written_once(case: str, over: tuple[str, ...]) -> None:
    placement, shares = PLACEMENTS[case], []
    if set(over) & set(placement.split_axes):
        over = ("data",)  # chunks are shared along axes that do not split
    whole = torch.arange(math.prod(placement.shape), dtype=torch.float64).reshape(placement.shape)
    for rank in range(24):
        mesh = Mesh(AXES, rank=rank)
        local = placement.shard(whole, mesh)
        index, count, total = mesh.index(*over), mesh.size(*over), local.numel()
        cuts = [total * at // count for at in range(count + 1)]
        run = range(cuts[index], cuts[index + 1])
        kept = local.reshape(-1)[run.start : run.stop]
        meta = ParameterMeta(mesh=mesh, placement=placement)
        shares.append((shards_of_flat_run(case, run, local.shape, meta, dtype=torch.float64, over=over), kept))
    written(placement, shares)


def test_a_run_of_a_matrix_is_at_most_three_rectangles() -> None:
    counts: Counter[int] = Counter()
    for rows, columns in product((1, 3, 4), (1, 2, 5)):
        for start, end in product(range(rows * columns + 1), repeat=2):
            numbers = torch.arange(rows * columns).view(rows, columns)
            found = [*windows_of_run((rows, columns), start, end - start)] if start <= end else []
            elements = [numbers[a : a + n, b : b + m].reshape(-1) for _, ((a, b), (n, m)) in found]
            assert torch.cat([torch.zeros(0, dtype=torch.int64), *elements]).tolist() == [*range(start, end)]
            assert [at for at, _ in found] == [int(part[0]) - start for part in elements]
            counts[len(found)] += 1
    assert max(counts) == 3
