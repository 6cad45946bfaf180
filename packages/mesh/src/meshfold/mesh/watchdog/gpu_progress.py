"""Progress of a GPU with the collectives that were handed to it."""

from __future__ import annotations

import time

from meshfold.mesh.recording.flight_recorder import Call, Flight


class Progress:
    """The first call of the queue that is not over, and since when it has been that one."""

    def __init__(self, recorder: Flight) -> None:
        """``recorder``: has the queue, with an event on the GPU behind every call."""
        self._flight = recorder
        self._moved = time.monotonic()

    def look(self) -> None:
        """Let go of the calls that are over; to be done again and again."""
        now, queue = time.monotonic(), self._flight.on_device
        while queue and queue[0].event is not None and queue[0].event.query():
            queue.popleft()
            self._moved = now
        if not queue:
            self._moved = now

    def held_up_by(self, seconds: float) -> Call | None:
        """The call that was the first for longer than so many seconds when one looked last."""
        queue = self._flight.on_device
        return queue[0] if queue and time.monotonic() - self._moved > seconds else None
