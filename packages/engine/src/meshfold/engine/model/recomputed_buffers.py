"""The buffers that a block changes in its forward (running statistics, counters), when that forward is repeated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn

Place = tuple[nn.Module, str]


class Buffers:
    """Buffers that a forward changed, with the values it found: a repetition begins with those, and changes nothing more."""

    def __init__(self, block: nn.Module) -> None:
        """Args:
        block: with them.
        """
        self._block = block
        self._found: dict[Place, Tensor] = {}

    @contextmanager
    def noted(self, around: AbstractContextManager[Any]) -> Iterator[None]:
        """Around the first forward, with what else is to be around it."""
        before = {place: (buffer, buffer._version, _copy(buffer)) for place, buffer in self._now().items()}
        try:
            with around:
                yield
        finally:
            now = self._now()
            self._found = {
                place: copy
                for place, (buffer, version, copy) in before.items()
                # Norms change their statistics without a word to autograd.
                if now.get(place) is not buffer
                or buffer._version != version
                or isinstance(place[0], nn.modules.batchnorm._NormBase)
            }

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Around a repetition: it works on copies, since what is saved for backward must not change."""
        now = {(module, name): module._buffers[name] for module, name in self._found}
        for (module, name), found in self._found.items():
            module._buffers[name] = _copy(found)
        try:
            yield
        finally:
            for (module, name), buffer in now.items():
                module._buffers[name] = buffer

    def _now(self) -> dict[Place, Tensor]:
        return {
            (module, name): buffer
            for module in self._block.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        }


def _copy(buffer: Tensor) -> Tensor:
    copy = buffer.detach().clone()
    copy.__dict__.update(buffer.__dict__)  # where it lies on the mesh
    return copy
