"""The host's optimizer steps made as late as the executor allows: each begins only when somebody waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from meshfold.zero_gemini.chunks.chunk import Chunk
from meshfold.zero_gemini.optimizer.cpu_executor import Worker
from meshfold.zero_gemini.optimizer.kernel_runs import ChunkStep


class LazySteps:
    """Stands in the way of kernels on the host.

    Attributes:
        done: told of every kernel that was run, by its name, with its chunk; while it is told, whoever waits stands still.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, done: Callable[[str, Chunk], object]) -> None:
        self._changed = threading.Condition()
        self._hungry = False  # the worker would begin the next kernel
        self._allowed = 0
        run, end = ChunkStep._do, Worker._end

        def lazily(step: ChunkStep, kernel: Callable[..., None]) -> None:
            if step.held.place != "device":
                with self._changed:
                    self._hungry = True
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._allowed)
                    self._allowed -= 1
            run(step, kernel)
            if step.held.place != "device":
                done(kernel.__name__, step.held.chunk)

        def waited_for(worker: Worker, future: Future[Any] | None) -> Any:
            if future is not None:
                future.add_done_callback(self._wake)
                while self._let_one(future):
                    pass
            return end(worker, future)

        monkeypatch.setattr(ChunkStep, "_do", lazily)
        monkeypatch.setattr(Worker, "_end", waited_for)

    def _wake(self, future: Future[Any]) -> None:
        with self._changed:
            self._changed.notify_all()

    def _let_one(self, future: Future[Any]) -> bool:
        """Let the worker run one kernel more, if what is waited for is not there yet; whether it was so."""
        with self._changed:
            self._changed.wait_for(lambda: future.done() or self._hungry)
            if future.done():
                return False
            self._hungry = False
            self._allowed += 1
            self._changed.notify_all()
            return True
