"""Warnings about buffers that a forward changes: with every micro-batch of a pipeline, or by the rows of one data rank."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from meshfold.engine.world import World
from meshfold.mesh import all_reduce
from meshfold.mesh.parameters import uncompiled_name


class BufferChanges:
    """Watcher of the buffers of this rank's stages in the second step: what a model caches is there after the first."""

    def __init__(self, model: nn.Module, world: World) -> None:
        """Args:
        model: this rank's part.
        world: where it lies; the first data rank warns.
        """
        self._model, self._world = model, world
        self._steps, self._forwards = 0 if world.data_index == 0 else 2, 0

    @contextmanager
    def watching(self, microbatches: int) -> Iterator[None]:
        """Context manager around a step of so many micro-batches; it warns once, of a buffer that is not a batch norm's."""
        self._steps += 1
        if self._steps != 2 or microbatches < 2:
            yield
            return
        before = self._now()
        yield
        found = [
            name
            for name, (buffer, writes) in self._now().items()
            if name in before and (buffer is not before[name][0] or writes != before[name][1])
        ]
        if found:
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            warnings.warn(
                f"the forward changes the buffer {found[0]!r}{more}, and a pipeline runs it {microbatches} times a step, once for "
                "each micro-batch, as accumulation of gradients does: a counter counts micro-batches, and an average over steps "
                "moves faster. Later micro-batches see what earlier ones changed. Change it between steps, outside of forward, "
                "if it should change once a step",
                stacklevel=3,
            )

    @contextmanager
    def over_data(self) -> Iterator[None]:
        """Context manager around a micro-step; after the second, it warns of a buffer that data ranks have changed differently.

        All data ranks must enter. They compare a sum of each saved buffer, in one all-reduce of a whole training.
        """
        yield
        self._forwards += 1
        if self._forwards != 2 or self._world.data_size == 1:
            return
        if self._world.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        kept = {
            name: buffer
            for name, buffer in self._saved().items()
            if buffer.is_floating_point() and buffer.numel() and not buffer.is_meta
        }
        if not kept:
            return
        sums = torch.stack([buffer.detach().double().sum() for buffer in kept.values()])
        most, least = all_reduce(torch.stack([sums, -sums]), self._world.data_group, "max").unbind()
        apart = (most + least).abs() > 1e-9 * most.abs()
        if self._world.data_index == 0 and bool(apart.any()):
            found = [name for name, differs in zip(kept, apart.tolist(), strict=True) if differs]
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            warnings.warn(
                f"the forward changes the buffer {found[0]!r}{more} by the rows of its own data rank: {self._world.data_size} "
                "ranks have different ones, and so losses differ from those of one process. Average over the ranks, in forward, "
                "what it is changed by, as with torch.distributed.all_reduce(mean) and mean / ranks; or use a spec without data "
                "and zero",
                stacklevel=3,
            )

    def _saved(self) -> dict[str, Tensor]:
        """Return the buffers that a checkpoint has."""
        return {
            name: buffer
            for path, module in self._model.named_modules()
            if not isinstance(module, nn.modules.batchnorm._NormBase)
            for leaf, buffer in module._buffers.items()
            if buffer is not None and leaf not in module._non_persistent_buffers_set
            for name in [f"{uncompiled_name(path)}.{leaf}" if path else leaf]
        }

    def _now(self) -> dict[str, tuple[Tensor, int]]:
        """Return which tensor each buffer is, and how often it was written to."""
        return {
            f"{uncompiled_name(path)}.{name}" if path else name: (buffer, buffer._version)
            for path, module in self._model.named_modules()
            if not isinstance(module, nn.modules.batchnorm._NormBase)  # there is a warning of its own
            for name, buffer in module._buffers.items()
            if buffer is not None
        }
