"""Tensors of an engine's states in chunks, as a checkpoint asks for them: whole, or the shards that this rank has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from meshfold.checkpoint.shards import (
    Shard,
    ShardRule,
    ranks_with_same_index,
    shards_of_flat_run,
    shards_of_replicated,
)
from meshfold.engine.states.protocols import Source, Sources
from meshfold.engine.states.replicated import source_like
from meshfold.engine.world import World
from meshfold.mesh import Mesh
from meshfold.mesh.parameters import StoredValue, metadata_on, uncompiled_name
from meshfold.zero_gemini import Entry, Gemini


class ChunkSources:
    """Sources of parameters in chunks and of their optimizer state; buffers are as they were.

    Attributes:
        names: of the parameters in chunks, on this rank.
    """

    def __init__(
        self, gemini: Gemini, world: World, names: Mapping[Tensor, str], whole_names: Mapping[str, str]
    ) -> None:
        """Args:
        gemini: has the chunks.
        world: the ranks.
        names: this rank's name of each parameter.
        whole_names: what a parameter of this rank's name is called in the whole model, where that differs.
        """
        self.gemini, self._world, self.names, self._whole_names = gemini, world, names, whole_names

    def source(self, tensor: Tensor) -> Source:
        """Return the source of a parameter or a buffer."""
        if tensor not in self.names:
            return source_like(tensor, tensor, self._world)
        self.gemini.take_written(tensor)
        meta = metadata_on(tensor, self._world.mesh)
        return Source(
            dtype=self.gemini.master_dtype(tensor),
            shape=meta.placement.shape,
            read=lambda: self._checked(meta.placement.gather(self.gemini.read(tensor), self._world.mesh)),
            cut=lambda: self._cut(tensor),
            parts=lambda: self.gemini.parts(tensor),
            on_disk=self.gemini.is_on_disk(tensor),
        )

    def optimizer_sources(self) -> dict[str, Source]:
        """Return the sources of the optimizer's state, named ``parameter/state``."""
        return dict(self._optimizer_sources(self.gemini.state_entries(), self.gemini.parts))

    def _optimizer_sources(
        self, entries: Mapping[str, Mapping[str, Entry]], parts: Callable[[Tensor, str | None], StoredValue]
    ) -> Iterator[tuple[str, Source]]:
        parameters = {name: parameter for parameter, name in self.names.items()}
        for name, mine in entries.items():
            meta = metadata_on(parameters[name], self._world.mesh)
            for key, entry in mine.items():
                source = Source(
                    dtype=getattr(torch, entry.dtype),
                    shape=meta.placement.shape if entry.like else tuple(entry.shape),
                    read=self._reader(name, key, entry, parameters[name]),
                    cut=partial(self._cut_of_state, entry, parameters[name]),
                    parts=partial(parts, parameters[name], key),
                    on_disk=self.gemini.is_on_disk(parameters[name], key),
                )
                yield f"{self.title(name)}/{key}", source

    def noted_sources(self, names: Mapping[Tensor, str]) -> Sources:
        """Return the sources of tensors with their present values, for a background save."""
        self.gemini.take_written()
        parts = self._noted_parts()
        if parts is None:
            return {name: self.source(tensor) for tensor, name in names.items()}
        # Copy buffers, which a forward may change; chunks stay where they are.
        noted = [
            (name, tensor, None if tensor in self.names else tensor.detach().clone()) for tensor, name in names.items()
        ]

        def made() -> Iterator[tuple[str, Source]]:
            for name, tensor, copy in noted:
                if copy is None:
                    yield name, self.source(tensor)._replace(parts=partial(parts, tensor, None))
                else:
                    yield name, source_like(copy, tensor, self._world)

        return made

    def noted_optimizer_sources(self) -> Sources:
        """Return :meth:`optimizer_sources` with their present values."""
        parts = self._noted_parts()
        if parts is None:
            return self.optimizer_sources()
        entries = self.gemini.state_entries()
        return lambda: self._optimizer_sources(entries, parts)

    def _noted_parts(self) -> Callable[[Tensor, str | None], StoredValue] | None:
        # Stages of a pipeline exchange their tables by collectives, which a background thread cannot do.
        return None if self._world.pipelined else self.gemini.noted_parts()

    def _cut(self, parameter: Tensor) -> ShardRule:
        """Return this rank's range of a tensor that is placed like a parameter."""
        gemini, meta = self.gemini, metadata_on(parameter, self._world.mesh)
        shape = meta.placement.local_shape(self._world.mesh)
        run, dtype, over = gemini.kept(parameter), gemini.master_dtype(parameter), gemini.axes_over(parameter)
        return ShardRule(shards_of_flat_run, (run, shape, meta, dtype, over))

    def _cut_of_state(self, entry: Entry, parameter: Tensor) -> ShardRule:
        if entry.like:
            return self._cut(parameter)
        meta, run = metadata_on(parameter, self._world.mesh), self.gemini.kept(parameter)
        alike = (*self.gemini.axes_over(parameter), *meta.only_at)
        return ShardRule(_pieces_of_number, (run, entry.shape, alike, self._world.mesh))

    def _reader(self, name: str, key: str, entry: Entry, parameter: Tensor) -> Callable[[], Tensor]:
        meta = metadata_on(parameter, self._world.mesh)

        def read() -> Tensor:
            block = self.gemini.read_state(name, key, entry)
            return self._checked(meta.placement.gather(block, self._world.mesh) if entry.like else block)

        return read

    def _checked(self, whole: Tensor) -> Tensor:
        """Return a whole tensor after its collectives; raise if this rank failed to read its part."""
        self.gemini.check()
        return whole

    def title(self, name: str) -> str:
        """Return a parameter's name in the whole model."""
        return self._whole_names.get(uncompiled_name(name), uncompiled_name(name))


def _pieces_of_number(
    name: str, run: range, shape: tuple[int, ...], alike: tuple[str, ...], mesh: Mesh
) -> tuple[Shard, ...]:
    """Return the shards of a number, which every rank with a part of the parameter holds."""
    ranks = ranks_with_same_index(mesh, alike) if run and run.start == 0 else [-1]
    return shards_of_replicated(name, shape, ranks, mesh.rank)
