"""The host's optimizer steps, beside the computation: a thread of its own that works through them in order.

With clipping the norm is known only when backward is over, and by then the device has nothing left to do. So a chunk on
the host is stepped *just in time*: its parameters right before the next forward wants them, while the device runs what
comes before it; its moments after all parameters, while the device runs backward. Both halves together are the plain
step to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from meshfold.zero_gemini.chunk import Chunk


class Worker:
    """Steps of chunks that were promised and may not be done yet."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._parameters: dict[Chunk, Future[None]] = {}
        self._moments: dict[Chunk, Future[None]] = {}

    def submit(
        self, halves: dict[Chunk, tuple[Callable[[], None], Callable[[], None]]], backward: list[Chunk]
    ) -> None:
        """Take the two halves of each chunk's step.

        Args:
            halves: of chunks in the order in which forward wants them: what writes its parameters, and its moments.
            backward: the same chunks in the order in which backward gives their gradients.
        """
        if self._pool is None:
            # The thread that launches the device's work keeps a core for itself.
            threads = max(1, torch.get_num_threads() - 1)
            self._pool = ThreadPoolExecutor(
                1, "meshfold-step", initializer=torch.set_num_threads, initargs=(threads,)
            )
        for chunk, (parameters, _) in halves.items():
            self._parameters[chunk] = self._pool.submit(parameters)
        for chunk in backward:
            self._moments[chunk] = self._pool.submit(halves[chunk][1])

    def has(self, chunk: Chunk) -> bool:
        """Whether a chunk's parameters are not there yet."""
        future = self._parameters.get(chunk)
        return future is not None and not future.done()

    def wait_parameters(self, chunk: Chunk) -> None:
        """Return once the chunk's parameters are written."""
        future = self._parameters.pop(chunk, None)
        if future is not None:
            future.result()

    def wait_moments(self, chunk: Chunk) -> None:
        """Return once the chunk's whole step is done, and its gradient is needed no more."""
        self.wait_parameters(chunk)
        future = self._moments.pop(chunk, None)
        if future is not None:
            future.result()

    def wait(self) -> None:
        """Return once everything is done."""
        for chunk in [*self._moments]:
            self.wait_moments(chunk)

    def close(self) -> None:
        """Finish what was promised and end the thread."""
        self.wait()
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
