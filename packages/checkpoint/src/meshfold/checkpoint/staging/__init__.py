"""Copies of tensors to host memory during training: only changes of a tensor wait until it was copied.

Three groups of work are ordered::

    what was queued before save()   <   the copies   <   what changes what is copied

On a GPU the thread of the save queues the copies on a separate stream, a few at a time. A copy to the host waits for all copies
that were queued before it, on any stream, and training also copies (its loss, the norm of a gradient). Host tensors, and
everything without a GPU, are copied by that thread itself.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

__all__ = [
    "BackgroundCopies",
    "CopyPair",
    "CopyQueue",
    "HostCopyQueue",
    "StreamCopyQueue",
    "copy_queue",
    "with_pauses",
]

SLICE_BYTES = 32 * 2**20
"""Queued at once: about a millisecond of the bus, the longest that a copy of the training waits."""

AT_ONCE = 2
"""Slices in flight: one on the bus, and the next one."""

CopyPair = tuple[Tensor, Tensor]
"""Destination on the host, and source, of a copy."""


class CopyQueue(Protocol):
    """A queue of copies that the device makes."""

    def takes(self, tensor: Tensor) -> bool:
        """Return True if this queue copies a tensor."""

    def begin(self) -> None:
        """Let copies begin after the work queued so far. Training calls this."""

    def queue(self, pairs: Sequence[CopyPair]) -> Callable[[], None]:
        """Queue copies; return what lets the host wait for them."""

    def settle(self) -> None:
        """Make the host wait for the work queued before ``begin``."""

    def hold(self) -> None:
        """Let work queued from now on begin after the queued copies. Training calls this."""


class HostCopyQueue:
    """No queue: without a GPU the host makes all copies itself."""

    def takes(self, tensor: Tensor) -> bool:
        return False

    def begin(self) -> None: ...

    def queue(self, pairs: Sequence[CopyPair]) -> Callable[[], None]:
        raise RuntimeError("a copy queue needs a GPU: without one the host copies directly")

    def settle(self) -> None: ...

    def hold(self) -> None: ...


class StreamCopyQueue:
    """Copies on a stream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        """Args:
        device: on which the training computes.
        """
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._before: torch.cuda.Event | None = None
        self._last: torch.cuda.Event | None = None

    def takes(self, tensor: Tensor) -> bool:
        return tensor.is_cuda

    def begin(self) -> None:
        self._last = None
        self._before = torch.cuda.Event(blocking=True)
        self._before.record(torch.cuda.current_stream(self._device))

    def queue(self, pairs: Sequence[CopyPair]) -> Callable[[], None]:
        with torch.cuda.stream(self._stream):
            if self._last is None and self._before is not None:
                self._stream.wait_event(self._before)
            to, of = zip(*pairs, strict=True)
            torch._foreach_copy_(to, of, non_blocking=True)  # one copy per pair, without a loop in Python
            self._last = torch.cuda.Event(blocking=True)
            self._last.record(self._stream)
        return self._last.synchronize

    def settle(self) -> None:
        if self._before is not None:
            self._before.synchronize()

    def hold(self) -> None:
        if self._last is not None:
            torch.cuda.current_stream(self._device).wait_event(self._last)


def copy_queue(device: torch.device) -> CopyQueue:
    """Return the queue of copies for the device that trains."""
    return StreamCopyQueue(device) if device.type == "cuda" else HostCopyQueue()


class BackgroundCopies:
    """The copies of one save."""

    def __init__(self, lane: CopyQueue) -> None:
        """Let copies begin after the work queued so far. Training makes this object."""
        self._lane = lane
        self._queued = threading.Event()  # set when every copy is queued and the host's own copies are done
        self._is_held = False
        lane.begin()

    @torch.no_grad()
    def run(self, pairs: Iterable[CopyPair]) -> None:
        """Make the copies, in a separate thread; they are complete on return. The tensors are kept until then."""
        queued: deque[Callable[[], None]] = deque()
        try:
            mine: list[CopyPair] = []
            for some in _slices(self._taken(pairs, mine)):
                if len(queued) == AT_ONCE:
                    queued.popleft()()
                queued.append(self._lane.queue(some))
            if mine:
                self._lane.settle()  # a GPU may still be writing into this host memory
            for to, of in mine:
                to.copy_(of)
        finally:
            self.over()
        for wait in queued:
            wait()

    def _taken(self, pairs: Iterable[CopyPair], rest: list[CopyPair]) -> Iterator[CopyPair]:
        """Yield the pairs for the queue lazily, so that the first copies start before the last views exist."""
        for pair in pairs:
            if self._lane.takes(pair[1]):
                yield pair
            else:
                rest.append(pair)

    def over(self) -> None:
        """Record that no further copy will be queued, also after a failure."""
        self._queued.set()

    def hold(self) -> None:
        """Order later work of training after the copies; training calls this before it changes the copied tensors.

        The host waits until the last of them is queued, while a GPU runs forward and backward.
        """
        if not self._is_held:
            self._queued.wait()
            self._lane.hold()
            self._is_held = True


def _slices(pairs: Iterable[CopyPair]) -> Iterator[list[CopyPair]]:
    """Yield pairs, split or grouped to about ``SLICE_BYTES`` each."""
    some: list[CopyPair] = []
    nbytes = 0
    for pair in pairs:
        for part in _cut(*pair):
            if some and nbytes + part[1].nbytes > SLICE_BYTES:
                yield some
                some, nbytes = [], 0
            some.append(part)
            nbytes += part[1].nbytes
    if some:
        yield some


def _cut(to: Tensor, of: Tensor) -> Iterator[CopyPair]:
    if of.nbytes <= SLICE_BYTES:
        yield to, of
        return
    if of.is_contiguous() and to.is_contiguous():
        to, of = to.view(-1), of.view(-1)
    rows = max(1, SLICE_BYTES * len(of) // of.nbytes)
    yield from zip(to.split(rows), of.split(rows), strict=True)


BURST_S = 0.0002
"""How long the interpreter is kept: about as long as a large kernel runs, so that a GPU does not wait for the next one."""

PAUSE_S = 0.0001
"""How long it is left to other threads: enough for one to wake up and launch a few kernels."""

T = TypeVar("T")


def with_pauses(items: Iterable[T]) -> Iterator[T]:
    """Yield the items; sleep for a moment between two of them whenever ``BURST_S`` have passed.

    Python threads share one interpreter. A thread that only computes keeps it for five milliseconds at a time
    (``sys.getswitchinterval``). Training releases it in every torch operation, so it would launch one kernel per five
    milliseconds. While this thread sleeps for a moment, training launches dozens.
    """
    since = time.perf_counter()
    for item in items:
        yield item
        if time.perf_counter() - since > BURST_S:
            time.sleep(PAUSE_S)
            since = time.perf_counter()
