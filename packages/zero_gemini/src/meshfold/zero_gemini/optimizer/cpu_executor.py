"""The host's optimizer steps, in parallel with compute: threads that run them in order.

With clipping the norm is known only when backward is over, and by then the device has nothing left to do. So a chunk on the host is
stepped *just in time*. Its parameters are updated right before the next forward needs them, while the device runs earlier units.
Its moments are updated after all parameters, while the device runs backward. Both halves together give the bits of the plain step.
A chunk that is stepped at once has no second half.

Speculative steps begin in the backward, and those left over overlap with the next forward. Backward completes gradients in the
reverse of the order in which forward needs parameters, so the step accepted last is made first. If chunks were stepped in the order
of their gradients, the first chunk of the forward would wait for all others, and the cores would then wait for the next backward.

One thread uses the cores. If the device steps some of the host's chunks, another thread feeds it: each takes the next
chunk when it is free.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, TypeVar

import torch

from meshfold.zero_gemini.chunks.chunk import Chunk
from meshfold.zero_gemini.errors import Faults
from meshfold.zero_gemini.memory.copies import Arrival

Work = Callable[[], None]
T = TypeVar("T")


class Halves(NamedTuple):
    """A chunk's step.

    Attributes:
        parameters: writes its parameters.
        moments: writes its moments; None if the first does all.
        on_device: starts the step on the device, or its first half, and returns a function that waits for its end; None if
            impossible.
        device_does_all: ``on_device`` replaces both.
        is_ready: returns True if its inputs have arrived.
    """

    parameters: Work
    moments: Work | None = None
    on_device: Callable[[], Arrival] | None = None
    device_does_all: bool = True
    is_ready: Callable[[], bool] = lambda: True


class Worker:
    """Pending steps of chunks.

    A failed step leaves the model between two steps: from then on everything here raises its error.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._feeder: ThreadPoolExecutor | None = None
        self._parameters: dict[Chunk, Future[Arrival | None]] = {}
        self._moments: dict[Chunk, Future[None]] = {}
        self._rest: list[Future[None]] = []
        self._latest = _Latest()
        self._failure: BaseException | None = None

    @property
    def failed(self) -> bool:
        """Return True if a failed step has been reported."""
        return self._failure is not None

    def submit(self, steps: dict[Chunk, Halves], backward: list[Chunk], then: Work | None = None) -> None:
        """Accept the steps of chunks.

        Args:
            steps: of chunks in the order in which forward needs them.
            backward: the same chunks in the order in which backward completes their gradients.
            then: called after all.
        """
        pool = self._started()
        self._parameters.update({chunk: Future() for chunk in steps})
        deal = _Deal(steps, self._parameters)
        pool.submit(deal.to_cores)
        if any(halves.on_device for halves in steps.values()):
            self._feed(deal.to_device)
        for chunk in backward:
            if steps[chunk].moments is not None:
                self._moments[chunk] = pool.submit(deal.moments, chunk)
        if then is not None:
            self._keep(pool.submit(then))

    def submit_first(self, chunk: Chunk, step: Halves) -> None:
        """Accept the step of a chunk; it goes before steps accepted here earlier that have not begun.

        Steps that are not ready wait for those that are. If none is ready, the one accepted first is begun.
        """
        pool = self._started()
        future = self._parameters[chunk] = Future()
        self._latest.add(step, future)
        pool.submit(self._latest.to_cores)
        if step.on_device is not None:
            self._feed(self._latest.to_device)

    def _feed(self, work: Work) -> None:
        """Queue work for the thread that feeds the device."""
        if self._feeder is None:
            self._feeder = ThreadPoolExecutor(1, "meshfold-feed")
        self._keep(self._feeder.submit(work))

    def _keep(self, future: Future[None]) -> None:
        """Keep a future, to be waited for with all others, and forget those that have succeeded."""
        self._rest = [rest for rest in self._rest if not rest.done() or rest.exception() is not None]
        self._rest.append(future)

    def is_done(self, chunk: Chunk) -> bool:
        """Return True if the chunk's parameters are ready, so that a wait returns at once."""
        future = self._parameters.get(chunk)
        if future is None:
            return True
        if not future.done():
            return False
        on_its_way = None if future.exception() is not None else future.result()
        return on_its_way is None or on_its_way.is_over()

    def wait_parameters(self, chunk: Chunk) -> None:
        """Wait until the chunk's parameters are written."""
        on_its_way = self._end(self._parameters.pop(chunk, None))
        if on_its_way is not None:
            on_its_way()

    def wait_moments(self, chunk: Chunk) -> None:
        """Wait until the chunk's whole step is done, and its gradient is no longer needed."""
        self.wait_parameters(chunk)
        self._end(self._moments.pop(chunk, None))

    def release_gradient(self, chunk: Chunk, faults: Faults) -> None:
        """Wait until a chunk's gradient is no longer needed. ``faults`` keeps the step's error, unless one was reported before."""
        reported = self.failed
        try:
            faults.keep(partial(self.wait_moments, chunk))
        except Exception:
            if not reported:
                raise

    def wait(self, but: Collection[Chunk] = ()) -> None:
        """Wait until everything is done, except the steps of some chunks."""
        for chunk in {**self._parameters, **self._moments}:
            if chunk not in but:
                self.wait_moments(chunk)
        while self._rest and not but:  # may belong to the excepted chunks
            self._end(self._rest.pop())

    def close(self) -> None:
        """Finish pending steps and end the threads."""
        for pool in (self._feeder, self._pool):
            if pool is not None:
                pool.shutdown()
        self._feeder = self._pool = None
        self._parameters.clear()
        self._moments.clear()
        self._rest.clear()

    def _end(self, future: Future[T] | None) -> T | None:
        if future is not None:
            error = future.exception()
            self._failure = self._failure or error
        if self._failure is not None:
            raise self._failure
        return None if future is None else future.result()

    def _started(self) -> ThreadPoolExecutor:
        if self._pool is None:
            before = torch.get_num_threads()
            self._pool = ThreadPoolExecutor(1, "meshfold-step")
            self._pool.submit(_take_threads, threads_for_steps(before)).result()
            torch.set_num_threads(before)  # the last setting is the default of new threads
        return self._pool


class _Deal:
    """Work queue of one step's chunks; each is taken by the cores or the device, whichever is free first."""

    def __init__(self, steps: dict[Chunk, Halves], done: dict[Chunk, Future[Arrival | None]]) -> None:
        """Args:
        steps: by chunk, in the order of their use.
        done: futures set once the parameters are written or on their way, to a function that waits for them.
        """
        self._steps, self._left = steps, [*steps]
        self._done = {chunk: done[chunk] for chunk in steps}
        self._lock = threading.Lock()
        self._on_device: set[Chunk] = set()

    def to_cores(self) -> None:
        """Let the cores take chunks until none is left."""
        while (chunk := self._next(on_device=False)) is not None:
            self._do(chunk, self._steps[chunk].parameters)

    def to_device(self) -> None:
        """Let the device take chunks that it can step until none is left."""
        while (chunk := self._next(on_device=True)) is not None:
            start = self._steps[chunk].on_device
            assert start is not None  # _next chose it
            self._do(chunk, start)

    def moments(self, chunk: Chunk) -> None:
        """Run the second half of a chunk's step, unless the device has done it."""
        steps = self._steps[chunk]
        if steps.moments is None or (chunk in self._on_device and steps.device_does_all):
            return
        on_its_way = self._done[chunk].result()
        if on_its_way is not None:  # the device still reads the old moments
            on_its_way()
        steps.moments()

    def _next(self, *, on_device: bool) -> Chunk | None:
        with self._lock:
            for place, chunk in enumerate(self._left):
                if not on_device or self._steps[chunk].on_device is not None:
                    del self._left[place]
                    if on_device:
                        self._on_device.add(chunk)
                    return chunk
        return None

    def _do(self, chunk: Chunk, work: Callable[[], Arrival | None]) -> None:
        _fulfil(self._done[chunk], work)


class _Latest:
    """Stack of chunks' steps: the cores and the device take the one accepted last, one with each call."""

    def __init__(self) -> None:
        self._left: list[tuple[Halves, Future[Arrival | None]]] = []
        self._lock = threading.Lock()

    def add(self, step: Halves, done: Future[Arrival | None]) -> None:
        """Accept a step; ``done`` is set as by :class:`_Deal`."""
        with self._lock:
            self._left.append((step, done))

    def to_cores(self) -> None:
        """Let the cores take one, if one is left."""
        if (taken := self._next(on_device=False)) is not None:
            step, done = taken
            _fulfil(done, step.parameters)

    def to_device(self) -> None:
        """Let the device take one, if one is left that it can step."""
        if (taken := self._next(on_device=True)) is not None:
            step, done = taken
            assert step.on_device is not None  # _next chose it
            _fulfil(done, step.on_device)

    def _next(self, *, on_device: bool) -> tuple[Halves, Future[Arrival | None]] | None:
        with self._lock:
            able = [i for i, (step, _) in enumerate(self._left) if not on_device or step.on_device is not None]
            ready = [i for i in able if _is_ready(self._left[i][0])]
            return self._left.pop(ready[-1] if ready else able[0]) if able else None


def _is_ready(step: Halves) -> bool:
    try:
        return step.is_ready()
    except Exception:  # an error of the device: the wait for this step raises it, where it is reported
        return True


def _fulfil(future: Future[Arrival | None], work: Callable[[], Arrival | None]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)


def threads_for_steps(there: int) -> int:
    """Return how many of a process's threads run optimizer steps.

    The thread that launches the device's work needs a core, and autograd's another if there are many: with
    14 of 16 cores the kernels are 8 % faster than with 15.
    """
    return max(1, there - (2 if there >= 8 else 1))


def _take_threads(count: int) -> None:
    """Set the number of threads of torch, and of kernels that follow it, for calls from this thread."""
    import numba

    numba.get_num_threads()  # starting numba's threads may change torch's number
    torch.set_num_threads(count)
    torch.get_num_threads()  # fixes it for this thread: later settings elsewhere do not apply
