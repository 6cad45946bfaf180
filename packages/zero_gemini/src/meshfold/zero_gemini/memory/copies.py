"""Copies between the host and a GPU in parallel with compute, on a stream for each direction, and waits of the host.

A link carries both directions at once. So a gradient that goes to the host does not wait for parameters that come from there, and
the host's optimizer begins earlier.

Hooks in backward may have to wait for the optimizer's last step, or for room for a gradient. The device then gets no work and
idles. `Waiting` reports each such wait, so that profilers do not count it as compute.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch


@functools.cache
def stream_of(device: torch.device) -> torch.cuda.Stream:
    """Return the device's stream for copies, all but those to the host's memory."""
    return torch.cuda.Stream(device)


@functools.cache
def stream_to_host(device: torch.device) -> torch.cuda.Stream:
    """Return the device's stream for gradients that go to the host."""
    return torch.cuda.Stream(device)


@contextmanager
def beside(device: torch.device, *, to_host: bool = False) -> Iterator[None]:
    """Queue the operations inside on one of the device's copy streams, after all that was queued before for compute.

    On a CPU they run at once.
    """
    if device.type != "cuda":
        yield
        return
    stream = stream_to_host(device) if to_host else stream_of(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield


def mark(device: torch.device) -> torch.cuda.Event | None:
    """Record an event on the current stream; return None on a CPU."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def queue_behind(event: torch.cuda.Event | None, device: torch.device) -> None:
    """Make work that is queued from now on wait for an event; the host does not wait."""
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)


@dataclass(frozen=True)
class Arrival:
    """Callable that makes the host wait for an event; without one it does nothing."""

    event: torch.cuda.Event | None = None

    def __call__(self) -> None:
        if self.event is not None:
            self.event.synchronize()

    def is_over(self) -> bool:
        """Return True if the event is over."""
        return self.event is None or self.event.query()


def copy_to_host(
    source: torch.Tensor, target: torch.Tensor, device: torch.device, *, lasts: bool = False
) -> torch.cuda.Event | None:
    """Start copying a tensor of the device to the host, in parallel with compute; return what waits for it (None: done).

    The source's memory may be released at once, unless ``lasts`` says that it stays until then. Waiting does not use a core.
    """
    arrived: torch.cuda.Event | None = None
    with beside(device, to_host=True):
        target.copy_(source, non_blocking=True)
        if device.type == "cuda":
            arrived = torch.cuda.Event(blocking=True)
            arrived.record()
    if source.is_cuda and not lasts:
        source.record_stream(stream_to_host(device))
    return arrived


def fetch(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a host tensor on the device, for work that is queued there from now on; a copy to it may be under way."""
    with beside(device):
        if device.type == "cuda":
            torch.cuda.current_stream(device).wait_stream(stream_to_host(device))
        here = tensor.to(device, non_blocking=True)
        there = mark(device)
    queue_behind(there, device)
    if here.is_cuda:
        here.record_stream(torch.cuda.current_stream(device))
    return here


def wait_for_copies(device: torch.device) -> None:
    """Let the host wait for all copies between it and a device."""
    if device.type == "cuda":
        for stream in (stream_of(device), stream_to_host(device)):
            stream.synchronize()


def synchronize(device: torch.device) -> None:
    """Wait for all that was queued on a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


Watch = Callable[[str], AbstractContextManager[None]]
"""Context manager around one wait, made from a description of the wait."""


class Waiting:
    """Context manager around each wait of the host: ``with waiting("the optimizer's step"): ...``."""

    def __init__(self) -> None:
        self._watch: Watch | None = None

    def __call__(self, what: str) -> AbstractContextManager[None]:
        return nullcontext() if self._watch is None else self._watch(what)

    @property
    def is_watched(self) -> bool:
        """True inside of :meth:`watched`."""
        return self._watch is not None

    @contextmanager
    def watched(self, watch: Watch) -> Iterator[None]:
        """Context manager: wrap each wait inside in ``watch``.

        Raises:
            RuntimeError: if waits are watched already.
        """
        if self._watch is not None:
            raise RuntimeError("another watch of waits is active: leave it first")
        self._watch = watch
        try:
            yield
        finally:
            self._watch = None
