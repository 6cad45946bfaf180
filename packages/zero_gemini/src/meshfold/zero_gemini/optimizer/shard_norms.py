"""Whole-tensor quantities for optimizers: norms for LAMB and LARS on shards, sums and matrices for those on blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from meshfold.kernels import STEP_KERNELS
from meshfold.mesh import Group, Mesh
from meshfold.mesh.parameters import ParameterMeta, ShardedSquareSums, ShardOfTensor, blocks_of, holders_factor
from meshfold.zero_gemini.chunks.chunk import Chunk
from meshfold.zero_gemini.chunks.parameter_table import ParameterFacts
from meshfold.zero_gemini.optimizer.interface import Stepper


def give_square_sums(
    stepper: Stepper,
    facts: Mapping[str, ParameterFacts],
    chunks: Iterable[Chunk],
    everyone: Group,
    mesh: Mesh,
    device: torch.device,
) -> None:
    """Let an optimizer with ``sight="norms"`` sum squares over the ranks, once a step; do nothing for others.

    Args:
        stepper: has the optimizer, whose groups have this rank's shards.
        facts: of all parameters, by name.
        chunks: that hold the shards.
        everyone: the ranks that have shards of the same parameters.
        mesh: where they lie.
        device: of collectives.
    """
    optimizer: Any = stepper.optimizer
    if hasattr(optimizer, "kernels"):
        optimizer.kernels = STEP_KERNELS
    if getattr(optimizer, "sight", None) != "norms":
        return
    shards: dict[Tensor, ShardOfTensor] = {}
    slices = {part.name: part for chunk in chunks for part in chunk.slices}
    trained = [name for name, one in facts.items() if one.kind.trained]
    for place, name in enumerate(trained):
        parameter = stepper.optimizer_parameter(name)
        if parameter is None or name not in slices:
            continue
        part, one = slices[name], facts[name]
        factor, holders = holders_factor(one.meta, mesh, everyone.axes), one.holders
        if isinstance(holders, Tensor):
            holders = holders[part.parameter_start : part.parameter_start + part.length]
        shards[parameter] = ShardOfTensor(place, _WithHolders(holders * factor))
    optimizer.square_sums = ShardedSquareSums(shards, len(trained), everyone, device)


def give_blocks(stepper: Stepper, facts: Mapping[str, ParameterFacts], mesh: Mesh, device: torch.device) -> None:
    """Let an optimizer of matrices get the rest of its blocks over the tensor axes; do nothing for others.

    The ranks along these axes own blocks of the same parameters: blocks have one size, and so do their chunks.
    """
    optimizer: Any = stepper.optimizer
    if not hasattr(optimizer, "blocks"):
        return
    metas = {name: one.meta for name, one in facts.items() if one.kind.trained}
    owned = {name: stepper.optimizer_parameter(name) for name in metas}
    mine: dict[Tensor, ParameterMeta] = {p: metas[name] for name, p in owned.items() if p is not None}
    optimizer.blocks = blocks_of(mine, mesh, None, device, metas.values())


def part_of(shard: ShardOfTensor, begin: int, end: int) -> ShardOfTensor:
    """Return the elements ``begin`` to ``end`` of a shard that :func:`give_square_sums` described."""
    assert isinstance(shard.pieces, _WithHolders)  # as described there
    return ShardOfTensor(shard.place, shard.pieces.part(begin, end))


class _WithHolders:
    """Contiguous shard, with the number of ranks that hold it."""

    def __init__(self, holders: float | Tensor) -> None:
        self._holders = holders

    def __call__(self, tensor: Tensor) -> Iterable[tuple[Tensor, float | Tensor]]:
        yield tensor, self._holders

    def part(self, begin: int, end: int) -> _WithHolders:
        """Return the same for some elements of the shard."""
        return _WithHolders(self._holders[begin:end] if isinstance(self._holders, Tensor) else self._holders)
