"""Steps of host chunks on the device: pieces of their state are copied up, stepped, and copied down.

The cores alone do not reach the host memory's full bandwidth, and the device's copy engines idle while a forward waits for
them. So the cores step one chunk and the device another, each as fast as it can
(:mod:`meshfold.zero_gemini.optimizer.cpu_executor`). The kernels give the same bits on both.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from meshfold.kernels import AdamState
from meshfold.zero_gemini.memory.arena import Block, Memory
from meshfold.zero_gemini.memory.copies import Arrival
from meshfold.zero_gemini.optimizer.master_weights import Plane, cut, lie, state_of, views

SLOT_BYTES = 32 * 2**20
SLOTS = 6
_UP_AT_A_TIME = 2  # uploads queued ahead: copies that computation waits for queue behind them
STREAMING_BYTES = SLOTS * SLOT_BYTES
"""Bytes of device memory for the pieces that are there at a time."""
_MOST_VIEWS = 64
"""Piece sizes whose views a buffer caches: a shard has one size, and another at the end of each of its runs."""
_ALIGN_ELEMS = 2**14  # alignment of pieces, for blocks of 8-bit moments that share a scale

StepPiece = Callable[[int, AdamState, Tensor, int], None]
"""Steps a piece, given its run, its state, its gradient, and its first element in the shard."""


@dataclass(kw_only=True)
class _Slot:
    """Device memory for a piece, and the event after which its last contents have been copied back."""

    block: Block
    free: torch.cuda.Event | None = None
    _views: dict[tuple[tuple[Plane, ...], int], dict[str, Tensor]] = field(default_factory=dict)

    def views(self, planes: tuple[Plane, ...], elements: int) -> dict[str, Tensor]:
        """Return the planes of a piece in this memory.

        Those of one size are made once: while Python makes them, the thread that trains waits.
        """
        known = self._views.get((planes, elements))
        if known is None:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            known = self._views[planes, elements] = views(self.block.tensor, planes, elements)
        return {**known}

    def forget(self) -> None:
        """Drop the views, which would keep the memory."""
        self._views.clear()


@dataclass(frozen=True, kw_only=True)
class _Streams:
    up: torch.cuda.Stream
    step: torch.cuda.Stream
    down: torch.cuda.Stream


@functools.cache
def _streams_of(device: torch.device) -> _Streams:
    """Return a device's streams, always the same ones: torch has 32, and gives another owner's stream after that many."""
    up, step, down = (torch.cuda.Stream(device) for _ in range(3))
    return _Streams(up=up, step=step, down=down)


@dataclass(frozen=True, kw_only=True)
class HostState:
    """State to be stepped, flat in the host's memory.

    Attributes:
        weights: of the shard, in the dtype that the model computes in.
        planes: stored in addition.
        tensors: by plane.
        gradient: of the shard.
    """

    weights: Tensor
    planes: tuple[Plane, ...]
    tensors: Mapping[str, Tensor]
    gradient: Tensor

    def planes_up(self) -> tuple[Plane, ...]:
        """Return all planes that are copied up, in order."""
        return (Plane("", self.weights.dtype), Plane("gradient", self.gradient.dtype), *self.planes)


@dataclass(kw_only=True, eq=False)
class GpuStreaming:
    """A few device buffers for state that is stepped there. One thread at a time may use it.

    Attributes:
        memory: whose compute device it is.
        halves: the device does only first halves where it can: parameters are copied down, and moments are left to the cores.
    """

    memory: Memory
    halves: bool = False
    slot_bytes: int = SLOT_BYTES
    slots: int = SLOTS
    _slots: list[_Slot] = field(default_factory=list)
    _streams: _Streams | None = None
    _turn: int = 0
    _going_up: deque[torch.cuda.Event] = field(default_factory=deque)

    def __post_init__(self) -> None:
        """Allocate the buffers.

        Raises:
            OutOfBudget: if the device has too little memory left.
        """
        try:
            for _ in range(self.slots):
                block = self.memory.allocate(self.slot_bytes, torch.uint8, "device", "state passing through")
                self._slots.append(_Slot(block=block))
        except BaseException:
            self.close()
            raise
        if self.memory.device.type == "cuda":
            self._streams = _streams_of(self.memory.device)
            # work queued earlier may still use this memory
            self._streams.up.wait_stream(torch.cuda.current_stream(self.memory.device))

    def step(
        self,
        host: HostState,
        spans: list[tuple[int, int]],
        do: StepPiece,
        *,
        moments: bool = True,
        into: HostState | None = None,
    ) -> Arrival:
        """Step some runs of elements.

        Args:
            host: their state; no other code may touch it until the end.
            spans: first and one past the last element of each in the shard, in order.
            do: steps a piece of a run on the device.
            moments: the step changes moments too, so they are copied down.
            into: destination; None: the source.

        Returns:
            When the last pieces are being copied up, a function that waits until all are copied down.
        """
        last: torch.cuda.Event | None = None
        size = self._elements(host)
        for index, (begin, end) in enumerate(spans):
            # Align pieces to blocks that share a scale, even if the run begins inside one.
            start = begin // _ALIGN_ELEMS * _ALIGN_ELEMS
            for at in range(start, end, size):
                a, z = max(at, begin), min(at + size, end)
                last = self._piece(host, a, z, partial(do, index), moments, into or host)
        return Arrival(last)

    def close(self) -> None:
        """Release the memory; no copy may be in flight."""
        for slot in self._slots:
            if slot.free is not None:
                slot.free.synchronize()
            slot.forget()
            slot.block.free()
        self._slots.clear()

    def _elements(self, host: HostState) -> int:
        """Return the number of elements of a piece: the most that fit a buffer."""
        planes = host.planes_up()
        elements = self.slot_bytes // sum(-(-plane.dtype.itemsize // plane.each) for plane in planes)
        elements = max(_ALIGN_ELEMS, elements // _ALIGN_ELEMS * _ALIGN_ELEMS)
        while lie(planes, elements)[1] > self.slot_bytes:
            elements -= _ALIGN_ELEMS
        return elements

    def _piece(
        self,
        host: HostState,
        begin: int,
        end: int,
        do: Callable[[AdamState, Tensor, int], None],
        moments: bool,
        into: HostState,
    ) -> torch.cuda.Event | None:
        slot = self._slots[self._turn % self.slots]
        self._turn += 1
        here = slot.views(host.planes_up(), end - begin)
        weights, gradient = here.pop(""), here.pop("gradient")
        source, target = (
            {"": state.weights[begin:end], **cut(state.planes, state.tensors, begin, end)} for state in (host, into)
        )
        arrived = {"": weights, **here}
        changed = ["", *(plane.name for plane in host.planes if moments or not plane.is_of_moments)]

        def up() -> None:
            gradient.copy_(host.gradient[begin:end], non_blocking=True)
            for name, tensor in arrived.items():
                tensor.copy_(source[name], non_blocking=True)

        def down() -> None:
            for name in changed:
                target[name].copy_(arrived[name], non_blocking=True)

        streams = self._streams
        if streams is None:
            up()
            do(state_of(weights, here), gradient, begin)
            down()
            return None
        while len(self._going_up) >= _UP_AT_A_TIME:
            self._going_up.popleft().synchronize()
        with torch.cuda.stream(streams.up):
            if slot.free is not None:
                streams.up.wait_event(slot.free)
            up()
            self._going_up.append(_point(streams.up))
        with torch.cuda.stream(streams.step):
            streams.step.wait_event(self._going_up[-1])
            do(state_of(weights, here), gradient, begin)
            stepped = _point(streams.step)
        with torch.cuda.stream(streams.down):
            streams.down.wait_event(stepped)
            down()
            slot.free = _point(streams.down)
        return slot.free


def _point(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Return an event for which a thread waits without using a core."""
    event = torch.cuda.Event(blocking=True)
    event.record(stream)
    return event
