"""Settings of torch's CUDA allocator that hold for the whole process, shared by the engines in it: earlier values come back."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class ProcessSetting(Generic[T]):
    """A setting of the process that several objects ask for at the same time.

    While it is held it is ``combine`` of the value before the first request and of all requests that are open. The last one to
    close puts the value before back. A value that other code has set in between stays.
    """

    def __init__(self, read: Callable[[], T], write: Callable[[T], None], combine: Callable[[Sequence[T]], T]) -> None:
        """Args:
        read: returns the current value.
        write: sets it.
        combine: what holds if all of these values are wanted.
        """
        self._read, self._write, self._combine = read, write, combine
        self._lock = threading.RLock()
        self._wanted: dict[int, T] = {}
        self._count = 0
        self._before: T | None = None
        self._ours: T | None = None

    def hold(self, value: T) -> Held:
        """Request a value until the result is closed or garbage collected."""
        with self._lock:
            if not self._wanted:
                self._before = self._ours = self._read()
            self._count += 1
            self._wanted[self._count] = value
            try:
                self._apply()
            except BaseException:
                self._release(self._count)
                raise
            return Held(self._release, self._count)

    def _release(self, number: int) -> None:
        with self._lock:
            del self._wanted[number]
            self._apply()

    def _apply(self) -> None:
        before = self._before
        assert before is not None  # there was a request
        wanted = self._combine([before, *self._wanted.values()]) if self._wanted else before
        if wanted != self._ours and self._read() == self._ours:
            self._write(wanted)
            self._ours = self._read()  # what is read may be rounded


class Held:
    """One request for a :class:`ProcessSetting`; it ends with :meth:`close`, or when the garbage collector takes it."""

    def __init__(self, release: Callable[..., None], *args: object) -> None:
        self._finalizer = weakref.finalize(self, release, *args)
        self._finalizer.atexit = False  # the driver may be gone then

    def close(self) -> None:
        """Withdraw the request. May be called twice."""
        self._finalizer()


def _no_request() -> None:
    pass


_limits: dict[torch.device, ProcessSetting[float]] = {}


def limit_allocator(device: torch.device, limit: int | None) -> Held:
    """Let this process take no more than ``limit`` bytes of a GPU, as on a smaller card, until the result is closed.

    With several limits the lowest counts, also one that was set by ``torch.cuda.set_per_process_memory_fraction`` before. Without
    a limit or without a GPU this does nothing.
    """
    if limit is None or device.type != "cuda":
        return Held(_no_request)

    def read() -> float:
        return float(torch.cuda.get_per_process_memory_fraction(device))

    def write(fraction: float) -> None:
        torch.cuda.set_per_process_memory_fraction(fraction, device)

    setting = _limits.setdefault(device, ProcessSetting(read, write, min))
    return setting.hold(min(1.0, limit / torch.cuda.get_device_properties(device).total_memory))


_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_GROWING, _FIXED = "expandable_segments:True", "expandable_segments:False"
_told = ""


def _settings() -> str:
    """Return the settings that the allocator got last; empty if none."""
    ask = getattr(torch._C, "_accelerator_getAllocatorSettings", None)  # not in every torch that we support
    return _told if ask is None else str(ask())


def _tell(grows: bool) -> None:
    global _told
    tell = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if tell is None:
        tell = torch._C._cuda_cudaCachingAllocator_set_allocator_settings  # type: ignore[attr-defined]
    _told = _GROWING if grows else _FIXED
    tell(_told)


_segments = ProcessSetting(lambda: _settings() == _GROWING, _tell, any)


def grow_segments(device: torch.device) -> Held:
    """Let the allocator grow and shrink its segments in the whole process until the result is closed.

    Chunks come and go in sizes of their own between activations. With segments of fixed sizes this leaves gaps (8 % of an H200
    with a model of 13B parameters), and allocation fails although the memory is free. Segments that exist stay as they are, also
    at the end. Where the environment or the program itself configures the allocator its settings are kept.
    """
    configured = any(os.environ.get(name) for name in _VARIABLES)
    if device.type != "cuda" or configured or _settings() not in ("", _GROWING, _FIXED):
        return Held(_no_request)
    return _segments.hold(True)
