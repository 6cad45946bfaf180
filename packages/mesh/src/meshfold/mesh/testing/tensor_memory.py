"""Count the bytes that tensors hold while a test's block runs: the same number on every machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

from torch.autograd.profiler import profile


@dataclass(slots=True)
class TensorMemory:
    """Bytes of CPU tensors that a block allocated; set when the block ends.

    Attributes:
        peak: the most at one time.
        held: what is left at the end; negative if the block freed tensors from before it.
    """

    peak: int = 0
    held: int = 0


@contextmanager
def tensor_memory() -> Iterator[TensorMemory]:
    """Context manager: count what this thread, and backward passes that it starts, get from torch's allocator and give back.

    Use it instead of the memory of the process, which also holds code, imports and free pages, and differs by machine.
    Memory-mapped files and memory of other libraries do not count. What another thread releases is not seen. Threads of gloo do
    that to messages between ranks, so measure these in a :func:`fake_world`.

    >>> with tensor_memory() as memory:
    ...     _ = torch.zeros(1000).sum()
    >>> memory.peak, memory.held
    (4004, 4)
    """
    found = TensorMemory()
    # Not torch.profiler: it imports torch's compiler, for more than a second.
    # Without ``acc_events``: with it, every operator becomes Python objects, in a hundred times the time of the operators.
    with profile(use_device=None, profile_memory=True, acc_events=False) as recorded:
        yield found
    assert recorded.kineto_results is not None  # the profiler has ended
    changes = [event for event in recorded.kineto_results.events() if event.name() == "[memory]"]
    sizes = list(accumulate(event.nbytes() for event in sorted(changes, key=lambda event: event.start_ns())))
    found.peak, found.held = max(sizes, default=0), sizes[-1] if sizes else 0
