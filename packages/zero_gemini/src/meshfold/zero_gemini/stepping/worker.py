"""The host's optimizer steps, beside the computation: a thread of its own that works through them in order.

With clipping the norm is known only when backward is over, and by then the device has nothing left to do. So a chunk on
the host is stepped *just in time*: its parameters right before the next forward wants them, while the device runs what
comes before it; its moments after all parameters, while the device runs backward. Both halves together are the plain
step to the bit. What is stepped in one go has no second half.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch

from meshfold.zero_gemini.chunk import Chunk

Work = Callable[[], None]


class Halves(NamedTuple):
    """A chunk's step: what writes its parameters, and what writes its moments; None if the first does all."""

    parameters: Work
    moments: Work | None = None


class Worker:
    """Steps of chunks that were promised and may not be done yet.

    A step that failed leaves the model between two steps: from then on everything here raises what it raised.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._parameters: dict[Chunk, Future[None]] = {}
        self._moments: dict[Chunk, Future[None]] = {}
        self._rest: list[Future[None]] = []
        self._failure: BaseException | None = None

    @property
    def failed(self) -> bool:
        """Whether somebody was told that a step failed."""
        return self._failure is not None

    def submit(self, steps: dict[Chunk, Halves], backward: list[Chunk], then: Work | None = None) -> None:
        """Take the steps of chunks.

        Args:
            steps: of chunks in the order in which forward wants them.
            backward: the same chunks in the order in which backward gives their gradients.
            then: done after all.
        """
        pool = self._started()
        for chunk, halves in steps.items():
            self._parameters[chunk] = pool.submit(halves.parameters)
        for chunk in backward:
            moments = steps[chunk].moments
            if moments is not None:
                self._moments[chunk] = pool.submit(moments)
        if then is not None:
            self._rest.append(pool.submit(then))

    def wait_parameters(self, chunk: Chunk) -> None:
        """Return once the chunk's parameters are written."""
        self._end(self._parameters.pop(chunk, None))

    def wait_moments(self, chunk: Chunk) -> None:
        """Return once the chunk's whole step is done, and its gradient is needed no more."""
        self.wait_parameters(chunk)
        self._end(self._moments.pop(chunk, None))

    def wait(self) -> None:
        """Return once everything is done."""
        for chunk in [*self._parameters, *self._moments]:
            self.wait_moments(chunk)
        while self._rest:
            self._end(self._rest.pop())

    def close(self) -> None:
        """Finish what was promised and end the thread."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        self._parameters.clear()
        self._moments.clear()
        self._rest.clear()

    def _end(self, future: Future[None] | None) -> None:
        if future is not None:
            error = future.exception()
            self._failure = self._failure or error
        if self._failure is not None:
            raise self._failure

    def _started(self) -> ThreadPoolExecutor:
        if self._pool is None:
            before = torch.get_num_threads()
            self._pool = ThreadPoolExecutor(1, "meshfold-step")
            # The thread that launches the device's work keeps a core for itself, and autograd's another where there are
            # many: with 14 of 16 cores the kernels are 8 % faster than with 15.
            self._pool.submit(_take_threads, max(1, before - (2 if before >= 8 else 1))).result()
            torch.set_num_threads(before)  # what one thread sets is what later ones begin with
        return self._pool


def _take_threads(count: int) -> None:
    """Let torch, and the kernels that go by it, use so many threads when they are called from this one."""
    import numba

    numba.get_num_threads()  # where it starts its own threads it changes how many torch has
    torch.set_num_threads(count)
    torch.get_num_threads()  # settles it: what other threads set from now on does not count here
