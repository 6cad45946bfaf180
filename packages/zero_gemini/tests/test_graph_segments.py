"""The pool of CUDA graphs in segments: when it takes memory, and how much. The calls of CUDA are replaced."""

from __future__ import annotations

import pytest
import torch

from meshfold.zero_gemini import segments_on
from meshfold.zero_gemini.runtime import graph_segments

GPU = torch.device("cuda", 0)
TOTAL, ALLOWED, RESIDENT = 80_000, 0.5, 20_000


class Graph:
    """A graph that only notes what is done."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def capture_begin(self, pool: tuple[int, int], capture_error_mode: str) -> None:
        assert pool == (0, 7) and capture_error_mode == "thread_local"
        self.done.append("begin")

    def capture_end(self) -> None:
        self.done.append("end")

    def replay(self) -> None:
        self.done.append("replay")


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of what is allocated for the pool, on a GPU of 80,000 bytes of which the process may have half."""
    found: list[int] = []
    for name, value in (
        ("synchronize", None),
        ("empty_cache", None),
        ("reset_peak_memory_stats", None),
        ("graph_pool_handle", (0, 7)),
        ("memory_allocated", RESIDENT),
        ("memory_reserved", RESIDENT),
        ("max_memory_allocated", RESIDENT + 10_000),
        ("mem_get_info", (60_000, TOTAL)),
        ("get_per_process_memory_fraction", ALLOWED),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(graph_segments, "_allocate", lambda nbytes, device: found.append(nbytes))
    return found


def test_a_pool_takes_its_memory_when_the_first_segment_begins(taken: list[int]) -> None:
    """Until then other forwards may need it, such as the one that looks for random numbers."""
    segments = segments_on(GPU)
    assert segments is not None and not taken
    segments.begin()
    assert taken == [11_000]  # what the step allocates, and a tenth
    again = segments.end()
    segments.begin()
    segments.end()
    again()
    assert len(taken) == 1


@pytest.mark.parametrize(
    ("peak", "wanted"),
    [(RESIDENT, []), (RESIDENT - 5, []), (RESIDENT + 19_000, [19_000 + 200]), (RESIDENT + 30_000, [19_400])],
)
def test_a_pool_leaves_room_beside_it(
    taken: list[int], monkeypatch: pytest.MonkeyPatch, peak: int, wanted: list[int]
) -> None:
    """Half of what is left is for others; 3 % of what the process may take stay free."""
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: peak)
    segments = segments_on(GPU)
    assert segments is not None
    segments.begin()
    assert taken == wanted
