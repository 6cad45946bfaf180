"""Cost of keeping a layer's activations, measured when they are recomputed: bytes that autograd saves, and seconds.

The code that recomputes layers marks its forwards: ``with watch.forward(name)`` around each first forward, ``with
watch.again(...)`` around each that is repeated in a backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_iter

from meshfold.mesh.model_io import attention_seen
from meshfold.zero_gemini.profiler.clocks import Clock
from meshfold.zero_gemini.profiler.trace import TracedLayer


class Alive(NamedTuple):
    """Bytes that are alive at a point of a timestep."""

    most: int
    """at once, in the timestep so far"""
    since: int
    """at once, since the last look"""
    now: int


class LayerWatch:
    """Recorder of recomputed layers while one micro-step is traced."""

    def __init__(
        self, *, clock: Clock, place: Callable[[], int], look: Callable[[], Alive], round_bytes: int = 1
    ) -> None:
        """Args:
        clock: of the trace.
        place: returns the current timestep.
        look: returns the bytes alive in it.
        round_bytes: each storage counts in multiples of this.
        """
        self._clock, self._place, self._look, self._round = clock, place, look, round_bytes
        self._seen: dict[str, _Seen] = {}

    @contextmanager
    def forward(self, name: str) -> Iterator[None]:
        """Context manager around the first forward of a layer; the first of several calls starts keeping."""
        if name not in self._seen:
            self._seen[name] = _Seen(first=self._place(), entered=self._look().now)
        yield

    @contextmanager
    def again(self, name: str, module: nn.Module, given: Any) -> Iterator[None]:
        """Context manager around a repeated forward, which an exception may end early when nothing more is needed.

        Args:
            name: of the layer.
            module: its parameters and buffers do not count.
            given: its arguments, which do not count either.
        """
        alive = self._look()
        seen = self._seen.setdefault(name, _Seen(first=self._place(), entered=alive.now))
        seen.again, seen.before = self._place(), alive.most
        inputs = {_key(leaf) for leaf in tree_iter(given) if isinstance(leaf, Tensor)}
        known: set[int] = set()

        def count(tensor: Tensor) -> None:
            key = _key(tensor)
            if key in known or key in inputs or key in {_key(t) for t in _own(module)}:
                return
            known.add(key)  # autograd keeps it, so its address stays unique
            seen.bytes += -(-tensor.untyped_storage().nbytes() // self._round) * self._round

        def attend(compute: Callable[[], Any]) -> Any:
            begin = self._clock.mark()
            made = compute()
            seen.attention_marks.append((begin, self._clock.mark()))
            seen.attention_bytes += sum(
                -(-leaf.numel() * leaf.element_size() // self._round) * self._round
                for leaf in tree_iter(made)
                if isinstance(leaf, Tensor)
            )
            return made

        begin = self._clock.mark()
        try:
            with _counting(count), attention_seen(attend):
                yield
        finally:
            seen.marks.append((begin, self._clock.mark()))
            seen.most = max(seen.most, self._look().since - alive.now)

    def layers(self) -> tuple[TracedLayer, ...]:
        """Return the traced layers in order of first use. A layer that no backward reached has nothing to keep."""
        return tuple(
            TracedLayer(
                name=name,
                kept_bytes=seen.bytes,
                seconds=sum(self._clock.seconds(begin, end) for begin, end in seen.marks),
                first=seen.first,
                last=max(seen.first, seen.again - 1),
                before_bytes=seen.before,
                entered_bytes=seen.entered,
                forward_bytes=max(seen.most, seen.bytes),
                attention_bytes=seen.attention_bytes,
                attention_seconds=sum(self._clock.seconds(begin, end) for begin, end in seen.attention_marks),
            )
            for name, seen in self._seen.items()
            if seen.marks
        )


@dataclass(kw_only=True, slots=True)
class _Seen:
    first: int
    entered: int  # bytes alive before its forward
    most: int = 0  # bytes alive at once that a recomputation added
    again: int = 0  # the timestep of its recomputation; the last if called several times
    before: int = 0
    bytes: int = 0
    marks: list[tuple[Any, Any]] = field(default_factory=list)
    attention_bytes: int = 0
    attention_marks: list[tuple[Any, Any]] = field(default_factory=list)


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _own(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


@contextmanager
def _counting(count: Callable[[Tensor], None]) -> Iterator[None]:
    """Context manager: pass each tensor that autograd saves to ``count``, and save it as usual."""
    # Only the innermost of nested hooks are called, and checkpointing has its own.
    outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
    pack, unpack = outer or (_same, _same)

    def show(tensor: Tensor) -> Any:
        count(tensor)
        return pack(tensor)

    with saved_tensors_hooks(show, unpack):
        yield


def _same(tensor: Tensor) -> Tensor:
    return tensor
