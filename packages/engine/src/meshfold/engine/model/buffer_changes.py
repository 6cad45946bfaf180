"""Warning about buffers that a forward changes in a pipeline: they change with every micro-batch, not once a batch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from meshfold.mesh.parameters import uncompiled_name


class BufferChanges:
    """Watcher of the buffers of this rank's stages in the second step: what a model caches is there after the first."""

    def __init__(self, model: nn.Module, *, says: bool) -> None:
        """Args:
        model: this rank's part.
        says: this rank warns.
        """
        self._model, self._steps = model, 0 if says else 2

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

    def _now(self) -> dict[str, tuple[Tensor, int]]:
        """Return which tensor each buffer is, and how often it was written to."""
        return {
            f"{uncompiled_name(path)}.{name}" if path else name: (buffer, buffer._version)
            for path, module in self._model.named_modules()
            if not isinstance(module, nn.modules.batchnorm._NormBase)  # there is a warning of its own
            for name, buffer in module._buffers.items()
            if buffer is not None
        }
