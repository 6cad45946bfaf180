"""The ranks that new meshes span, where they are not all ranks of the job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from meshfold.mesh.errors import SpecError

_ranks: range | None = None


def current_ranks() -> range | None:
    """Return the global ranks that a mesh made now spans; None for all."""
    return _ranks


@contextmanager
def only_ranks(ranks: range) -> Iterator[None]:
    """Let meshes and engines made inside span some consecutive ranks of the job, numbered from 0; for good.

    This process is one of them, and all of them must make the same ones. Others may make theirs at the same time.

    Args:
        ranks: global ranks, with step 1, at least one.

    Raises:
        SpecError: for other ranges, and inside another one.
    """
    global _ranks
    if ranks.step != 1 or not len(ranks) or ranks.start < 0:
        raise SpecError(f"ranks={ranks!r}: consecutive ranks from 0 up, at least one, as in range(2, 4)")
    if _ranks is not None:
        raise SpecError(f"ranks={ranks!r} inside {_ranks!r}: leave the outer one first")
    _ranks = ranks
    try:
        yield
    finally:
        _ranks = None
