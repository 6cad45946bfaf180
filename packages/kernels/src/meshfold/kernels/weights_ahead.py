"""Weights of the next products of a token, fetched into the GPU's cache while attention or a sum over ranks runs.

Those kernels have few programs and wait for one another more than for memory, which is idle meanwhile. A product of one row reads
each weight once, so what is in the cache when it begins is time saved. The fetch is a kernel on a stream of its own that ends as
soon as it has asked for the weights; nothing waits for it, and it changes no value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

AHEAD_BYTES = 16 << 20
"""Fetched at most at a time: a third of the cache of an H100, which it reads in 5.6 us."""

Fetch = Callable[[Sequence[Tensor], int], None]
"""Asks for the first bytes of each of some weights."""


class WeightsAhead:
    """The products of one row of a token, in their order.

    Attributes:
        problem: why no weights are fetched any more; empty if they are.
    """

    def __init__(self, device: torch.device, fetch: Fetch | None = None) -> None:
        """Args:
        device: of the weights.
        fetch: asks for weights; None: by a Triton kernel.
        """
        self.problem = ""
        self._fetch = fetch or self._launch
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._products: list[tuple[Tensor, ...]] = []
        self._waits: set[int] = set()  # products before which something else runs
        self._recorded = self._forked = False
        self._at = self._done = self._forked_at = 0

    @property
    def fetches(self) -> bool:
        """True if the recorded token has products before which something else runs."""
        return any(at < len(self._products) for at in self._waits)

    @contextmanager
    def token(self) -> Iterator[None]:
        """Context manager: the kernels of a token are launched. The first time records them; later, weights are fetched."""
        self._at = self._done = 0
        mark = _current.set(self)
        try:
            yield
        finally:
            _current.reset(mark)
            self._recorded = True
            if self._side is not None and self._forked:  # a graph ends when all of its streams have joined
                torch.cuda.current_stream(self._side.device).wait_stream(self._side)
            self._forked = False

    def take_product(self, weights: tuple[Tensor, ...]) -> None:
        """Take note of a product with these weights."""
        if not self._recorded:
            self._products.append(weights)
        self._at += 1

    def fetch(self) -> None:
        """Ask for the weights of the products that come next, once before each."""
        if not self._recorded:
            self._waits.add(self._at)
        elif not self.problem and self._done <= self._at < len(self._products):
            self._done, left = self._at + 1, AHEAD_BYTES
            for weights in self._products[self._at :]:
                each = min(left // len(weights), weights[0].nbytes)
                if not each:
                    break
                try:
                    self._fetch(weights, each)
                except Exception as problem:  # of Triton's compiler; other ranks go on
                    self.problem = (str(problem) or type(problem).__name__).strip().split("\n")[0]
                    break
                left -= each * len(weights)

    def _launch(self, weights: Sequence[Tensor], count: int) -> None:
        from meshfold.kernels.weights_ahead_triton import launch_fetch  # which needs Triton

        if self._side is None:
            return
        if not self._forked or self._at != self._forked_at:
            self._side.wait_stream(torch.cuda.current_stream(self._side.device))
            self._forked, self._forked_at = True, self._at
        with torch.cuda.stream(self._side):
            launch_fetch(weights, count)


_current: ContextVar[WeightsAhead | None] = ContextVar("weights_ahead", default=None)


def take_product(*weights: Tensor) -> None:
    """Take note of a product of one row, where :meth:`WeightsAhead.token` is entered."""
    ahead = _current.get()
    if ahead is not None:
        ahead.take_product(weights)


def fetch_ahead() -> None:
    """Fetch the weights of the next products, where :meth:`WeightsAhead.token` is entered.

    Call it before a kernel that reads little.
    """
    ahead = _current.get()
    if ahead is not None:
        ahead.fetch()
