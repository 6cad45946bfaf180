"""Weights of the next products of a token, fetched into the GPU's cache while attention or a sum over ranks runs.

Those kernels have few programs and wait for one another more than for memory, which is idle meanwhile. A product of one row reads
each weight once, so what is in the cache when it begins is time saved. Such a kernel gets more programs than it needs: the others
ask for weights and end. They wait for nothing, nothing waits for them, and they change no value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from torch import Tensor

AHEAD_BYTES = 16 << 20
"""Fetched at most at a time: a third of the cache of an H100, which it reads in 5.6 us."""
PIECE = 1024
"""Bytes that a thread asks for."""


class Ahead(NamedTuple):
    """Two runs of bytes that the spare programs of a kernel ask for.

    Attributes:
        first, second: addresses.
        pieces: of each run.
    """

    first: int
    second: int
    pieces: int

    def programs(self, threads: int) -> int:
        """Return how many programs of so many threads ask for all pieces."""
        return -(-2 * self.pieces // threads)


NOTHING = Ahead(0, 0, 0)


class WeightsAhead:
    """The products of one row of a token, in their order.

    Attributes:
        problem: why no weights are fetched any more; empty if they are.
    """

    def __init__(self) -> None:
        self.problem = ""
        self._products: list[tuple[Tensor, ...]] = []
        self._waits: set[int] = set()  # products before which something else runs
        self._recorded = False
        self._at = self._done = 0

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

    def take_product(self, weights: tuple[Tensor, ...]) -> None:
        """Take note of a product with these weights."""
        if not self._recorded:
            self._products.append(weights)
        self._at += 1

    def next(self) -> Ahead:
        """Return the first weights of the product that comes next, once before each."""
        if not self._recorded:
            self._waits.add(self._at)
        elif not self.problem and self._done <= self._at < len(self._products):
            self._done = self._at + 1
            return _first_bytes(self._products[self._at])
        return NOTHING


def _first_bytes(weights: tuple[Tensor, ...]) -> Ahead:
    """Return the first bytes of one weight, or of two of equal shape; none if they do not begin at a multiple of 16 bytes."""
    pieces = min(AHEAD_BYTES, len(weights) * weights[0].nbytes) // (2 * PIECE)
    first = weights[0].data_ptr()
    second = weights[1].data_ptr() if len(weights) > 1 else first + pieces * PIECE
    return NOTHING if first % 16 or second % 16 or not pieces else Ahead(first, second, pieces)


_current: ContextVar[WeightsAhead | None] = ContextVar("weights_ahead", default=None)


def take_product(*weights: Tensor) -> None:
    """Take note of a product of one row, where :meth:`WeightsAhead.token` is entered."""
    ahead = _current.get()
    if ahead is not None:
        ahead.take_product(weights)


def launch_ahead(launch: Callable[[Ahead], None]) -> None:
    """Launch a kernel that reads little; where :meth:`WeightsAhead.token` is entered, it asks for the weights that come next.

    Args:
        launch: runs the kernel, and tells it what to ask for. One that fails runs again without, since other ranks go on.
    """
    token = _current.get()
    ahead = NOTHING if token is None else token.next()
    try:
        launch(ahead)
    except Exception as problem:  # of Triton's compiler
        if token is None or not ahead.pieces:
            raise
        token.problem = (str(problem) or type(problem).__name__).strip().split("\n")[0]
        launch(NOTHING)
