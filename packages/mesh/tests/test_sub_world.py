"""Meshes of some ranks of the job: ranks count from 0 in each, groups communicate, and both parts work at the same time."""

from __future__ import annotations

import pytest
import torch

from meshfold.mesh import Mesh, Placement, SpecError, all_gather, all_reduce
from meshfold.mesh.parameters import ParameterMeta
from meshfold.mesh.parameters.block_map import BlockMap
from meshfold.mesh.processes import only_ranks, running_world
from meshfold.mesh.testing import ranks


@ranks(3)
def test_parts_of_unequal_size_at_the_same_time() -> None:
    world = running_world()
    assert world is not None
    first = world.rank == 0
    with only_ranks(range(1) if first else range(1, 3)):
        mesh = Mesh({"data": 1} if first else {"data": 1, "tensor": 2})
        inside = running_world()
    assert inside is not None and (inside.rank, inside.size) == ((0, 1) if first else (world.rank - 1, 2))
    assert mesh.is_part and (mesh.rank, mesh.first_rank) == ((0, 0) if first else (world.rank - 1, 1))
    group = mesh.group("data", "tensor")
    mine = torch.tensor([float(mesh.rank + 1)])
    if first:  # calls nothing, while the others communicate
        assert group.ranks == (0,)
    else:
        assert group.ranks == (1, 2) and group.index == mesh.rank
        assert mesh.numbers("data", "tensor") == (0, 1)
        assert float(all_reduce(mine, mesh.channel("apart", "tensor"))) == 3
        assert all_gather(mine, group).tolist() == [1, 2]
        whole = torch.arange(6.0).view(2, 3)
        placement = Placement(shape=(2, 3), axes=(("tensor",), ()))
        blocks = BlockMap(ParameterMeta(mesh=mesh, placement=placement), group)
        assert torch.equal(blocks.of_rank(whole, 1), whole[1:])
        assert torch.equal(placement.shard(whole, mesh), whole[mesh.rank : mesh.rank + 1])
        assert torch.equal(placement.gather(placement.shard(whole, mesh), mesh), whole)
    everyone = Mesh({"all": 3})
    assert not everyone.is_part
    assert all_gather(torch.tensor([everyone.rank]), everyone.group("all")).tolist() == [0, 1, 2]


@ranks(2)
def test_mistakes() -> None:
    world = running_world()
    assert world is not None
    with only_ranks(range(1 - world.rank, 2 - world.rank)), pytest.raises(SpecError, match="is not one of ranks"):
        running_world()
    with only_ranks(range(world.rank, world.rank + 1)):
        with pytest.raises(SpecError, match="leave the outer one first"), only_ranks(range(1)):
            pass
        with pytest.raises(SpecError, match="has 2 ranks but 1 processes"):
            _ = Mesh({"data": 2}).rank
    assert running_world() == world
    for wrong in (range(0, 4, 2), range(0), range(-1, 1)):
        with pytest.raises(SpecError, match="consecutive ranks"), only_ranks(wrong):
            pass
