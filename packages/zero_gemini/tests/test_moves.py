"""Chunks that change placements need hardly more memory on the way than at both ends."""

from __future__ import annotations

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from meshfold.zero_gemini.chunks.placement import Move, in_turn

sizes = st.integers(0, 1000)


@st.composite
def moves(draw: st.DrawFn) -> list[Move[int]]:
    """Each thing leaves the device for the host, comes to it, or goes between either and the disk."""
    found = []
    for number in range(draw(st.integers(0, 12))):
        size = draw(sizes)
        device, host = draw(st.sampled_from([(-1, 1), (1, -1), (-1, 0), (1, 0), (0, 1), (0, -1)]))
        found.append(Move(what=number, device_bytes=device * size, host_bytes=host * size))
    return found


@given(moves())
def test_nothing_is_lost_and_neither_side_has_more_than_it_may(given_moves: list[Move[int]]) -> None:
    order = in_turn(given_moves)
    assert sorted(move.what for move in order) == [move.what for move in given_moves]
    device = [0, *accumulate(move.device_bytes for move in order)]
    host = [0, *accumulate(move.host_bytes for move in order)]
    assert max(device) <= max(0, device[-1])
    coming = max((-move.host_bytes for move in order if move.device_bytes > 0), default=0)
    leaving = max((move.host_bytes for move in order if move.device_bytes < 0), default=0)
    assert max(host) <= max(0, host[-1]) + coming + leaving


def test_a_swap_takes_turns() -> None:
    out = [Move(what=f"out {i}", device_bytes=-10, host_bytes=10) for i in range(4)]
    back = [Move(what=f"in {i}", device_bytes=10, host_bytes=-10) for i in range(4)]
    order = in_turn([*out, *back])
    assert max(accumulate(move.host_bytes for move in order)) == 10
    assert max(accumulate(move.device_bytes for move in order)) == 0
