"""Buffers that a forward changes, restored for its repetition, which changes them no further."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn

_BufferPlace = tuple[nn.Module, str]


class RestoredBuffers:
    """Buffers that a block's forward changed (running statistics, counters), with the values it found.

    A repetition of the forward starts with those values, and changes nothing else.
    """

    def __init__(self, block: nn.Module) -> None:
        """Args:
        block: with them.
        """
        self._block = block
        self._found: dict[_BufferPlace, Tensor] = {}

    @contextmanager
    def noted(self, around: AbstractContextManager[Any]) -> Iterator[None]:
        """Context manager around the first forward, with the other contexts."""
        before = {place: (buffer, buffer._version, _copy_of_buffer(buffer)) for place, buffer in self._now().items()}
        try:
            with around:
                yield
        finally:
            now = self._now()
            self._found = {
                place: copy
                for place, (buffer, version, copy) in before.items()
                # Norms change their statistics without a new version.
                if now.get(place) is not buffer
                or buffer._version != version
                or isinstance(place[0], nn.modules.batchnorm._NormBase)
            }

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Context manager around a repetition, which works on copies, since tensors saved for backward must not change."""
        now = {(module, name): module._buffers[name] for module, name in self._found}
        for (module, name), found in self._found.items():
            module._buffers[name] = _copy_of_buffer(found)
        try:
            yield
        finally:
            for (module, name), buffer in now.items():
                module._buffers[name] = buffer

    def _now(self) -> dict[_BufferPlace, Tensor]:
        found: dict[_BufferPlace, Tensor] = {}
        modules = {self._block: None}
        more = [self._block]  # a walk of its own: named_modules passes each module through every level above it
        while more:
            module = more.pop()
            found.update({(module, name): buffer for name, buffer in module._buffers.items() if buffer is not None})
            children = [child for child in module._modules.values() if child is not None and child not in modules]
            modules.update(dict.fromkeys(children))
            more += children
        return found


def _copy_of_buffer(buffer: Tensor) -> Tensor:
    copy = buffer.detach().clone()
    copy.__dict__.update(buffer.__dict__)  # keeps its metadata, such as its placement
    return copy
