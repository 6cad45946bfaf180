"""A captured step: compute in graph segments, and between them the moves of chunks, which each replay makes again.

While a step is captured, hooks run as in any step. Where one of them gathers a chunk, waits for one or sends a gradient to the
host, the segment ends, the move is made, and a function that makes it again is noted. It also ends where a unit begins that is
not light, so that replays show what each unit computes (:mod:`meshfold.zero_gemini.planner.observed`). A replay runs segments and
noted functions in this order, without hooks and without autograd. Copies and the host's optimizer stay outside of graphs, so they
overlap with compute as in an eager step: a move still waits for its chunk's optimizer step, and a gradient's step may begin once
its copy is queued.

Memory comes from the pool of the segments, also that of gathered chunks and of gradients. So every move has the same addresses in
each replay. The order of waits is that of the captured step too: memory is used again only after the same events.

Only for a single rank: collectives are not captured.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from meshfold.zero_gemini.chunks.chunk import Chunk
from meshfold.zero_gemini.chunks.fp8_gather import Operands
from meshfold.zero_gemini.chunks.gradient import ChunkGradient
from meshfold.zero_gemini.memory.arena import Block
from meshfold.zero_gemini.memory.copies import Waiting, queue_behind
from meshfold.zero_gemini.runtime.graph_segments import Segments

Work = Callable[[], None]
Move = tuple[Work, Work]
"""Two functions: one makes a move now, the other in a replay."""

SENT_AT_A_TIME = 2
"""Gradients whose memory is kept while they are copied to the host. Compute waits for the oldest copy before another is sent."""


class CapturedMoves:
    """Forward and backward of a step, captured once, then replayed.

    Attributes:
        segments: graphs so far.
        waiting: context manager around the host's waits; whoever watches it can time what units compute; None: nobody.
    """

    def __init__(self, segments: Segments) -> None:
        """Args:
        segments: captures the compute between moves.
        """
        self._segments = segments
        self._parts: list[list[Work]] = []
        self._visits: dict[Chunk, _Visit] = {}  # chunks on the device now, or on their way
        self._residents: set[Chunk] = set()  # resident chunks whose pending step was waited for
        self._early: set[Chunk] = set()  # chunks that a move starts ahead of their use
        self._sent: deque[_Sent] = deque()
        self._is_open = False
        self.segments = 0
        self._at = _Place()
        self.waiting: Waiting | None = None

    # -- capturing ----------------------------------------------------------------------------------------------

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Context manager: capture the next part of the step while it runs: its forward, then its backward."""
        self._parts.append([])
        self._open()
        try:
            yield
            self._close()
            self._wait_for_sent(0)
        except BaseException:
            if self._is_open:
                self._is_open = False
                self._segments.break_off()
            raise

    def between(self, moves: Sequence[Move]) -> None:
        """End the segment, make moves, and begin the next segment."""
        if not moves:
            return
        self._close()
        for now, again in moves:
            now()
            self._parts[-1].append(again)
        self._open()

    def note(self, again: Work) -> None:
        """Record work that each replay repeats on the host where the current segment begins; the captured step has done it."""
        self._parts[-1].append(again)

    def _open(self) -> None:
        self._segments.begin()
        self._is_open = True

    def _close(self) -> None:
        self._is_open = False
        self._parts[-1].append(self._segments.end())
        self.segments += 1

    # -- moves ----------------------------------------------------------------------------------------------------

    def enter(
        self,
        wanted: Mapping[Chunk, Operands],
        ahead: Mapping[Chunk, Operands],
        waited: Iterable[Chunk],
        *,
        place: int,
        cut: bool,
    ) -> list[Chunk]:
        """Gather the chunks that entered units read, start to gather others ahead, and wait for those that one unit reads.

        Args:
            wanted: chunks of entered units, with what is read of them.
            ahead: chunks of the units that come next.
            waited: chunks of the unit that is entered now.
            place: number of units that the step has entered, with this one.
            cut: end the segment before the unit also if nothing moves, so that it is timed by itself.

        Returns:
            All that are gathered or on their way.
        """
        reached = partial(self._reach, self._at, place, self.waiting if cut else None)
        moves: list[Move] = [(reached, reached)] if cut else []
        if not cut:
            reached()
            self.note(reached)
        for chunk, read in wanted.items():
            moves += self._gather(chunk, read, ahead=False)
        for chunk, read in ahead.items():
            if chunk not in self._visits and chunk not in self._early:
                moves += self._gather(chunk, read, ahead=True)
            elif cut:  # a segment ends here anyway
                moves += self._ask_again(chunk, read)
        for chunk in waited:
            moves += self._wait(chunk)
        self.between(moves)
        return [*wanted, *ahead]

    def leave(self, chunks: Iterable[Chunk]) -> None:
        """Wait for those chunks that are still on their way, before all are released."""
        chunks = [*chunks]
        self.between([move for chunk in chunks if chunk.is_gathering for move in self._wait(chunk)])
        for chunk in chunks:
            self._visits.pop(chunk, None)

    def send(self, gradient: ChunkGradient, whole: Block) -> None:
        """Hand a chunk's complete gradient on: to the host if its tier is there, now and in each replay."""
        stays = gradient.tier == "device"
        sent = _Sent(
            gradient,
            whole.tensor if stays else self._segments.alias(whole.tensor),
            frozenset(gradient.used),
            gradient.measured,
            None if stays else whole.tensor,
        )
        if stays:
            self.note(sent.send_again)
            return
        self._wait_for_sent(SENT_AT_A_TIME - 1, then=[(partial(sent.send, whole), sent.send_again)])
        self._sent.append(sent)

    @staticmethod
    def _reach(at: _Place, place: int, waiting: Waiting | None) -> None:
        at.entered = place
        if waiting is not None:
            with waiting("parameters"):
                pass

    def _gather(self, chunk: Chunk, read: Operands, *, ahead: bool) -> Iterator[Move]:
        if chunk.resident:
            yield from self._gather_resident(chunk, read, ahead=ahead)
        elif chunk not in self._visits:
            visit = self._visits[chunk] = _Visit(chunk, self._segments.alias(chunk.allocate()))
            yield partial(chunk.gather, read), visit.start_early if ahead else visit.start

    def _gather_resident(self, chunk: Chunk, read: Operands, *, ahead: bool) -> Iterator[Move]:
        """Yield the moves of a resident chunk: at its first use in a step new parameters may come from the host."""
        if chunk in self._residents:
            return
        self._early.add(chunk)
        start_early = partial(_gather_early, chunk, read)

        def gather() -> None:
            chunk.gather(read)
            chunk.wait()

        if ahead:
            yield start_early, start_early
        else:
            self._residents.add(chunk)
            yield gather, gather

    def _ask_again(self, chunk: Chunk, read: Operands) -> Iterator[Move]:
        """Yield a move that starts a chunk in a replay if its step had not ended when a unit before began."""
        visit = self._visits.get(chunk)
        if visit is not None and not visit.is_waited_for:
            yield _nothing, visit.start_early
        elif chunk in self._early and chunk not in self._residents:
            yield _nothing, partial(_gather_early, chunk, read)

    def _wait(self, chunk: Chunk) -> Iterator[Move]:
        visit = self._visits.get(chunk)
        if visit is not None and not visit.is_waited_for:
            visit.is_waited_for = True
            yield chunk.wait, visit.wait

    def _wait_for_sent(self, most: int, then: Sequence[Move] = ()) -> None:
        """Let compute wait for the oldest copies of gradients, until there are no more than ``most``; then make other moves."""
        done = [self._sent.popleft() for _ in range(len(self._sent) - most)]
        moves = [*((sent.wait, sent.wait) for sent in done), *then]
        if self._is_open:
            self.between(moves)
        else:
            for now, again in moves:
                now()
                self._parts[-1].append(again)
        for sent in done:
            sent.held = None  # the pool has its memory again

    # -- replaying ------------------------------------------------------------------------------------------------

    @property
    def place(self) -> int:
        """Number of units that the step has entered where it is captured or replayed now."""
        return self._at.entered

    def replay(self, part: int) -> None:
        """Run a part of the step again: 0 is its forward, 1 its backward."""
        self._at.entered = self.place if part else 0
        for work in self._parts[part]:
            work()


def _nothing() -> None: ...


def _gather_early(chunk: Chunk, read: Operands) -> None:
    """Start to gather a resident chunk's new parameters, unless that waits for the optimizer, which would delay the unit before."""
    if chunk.can_gather_early:
        chunk.gather(read)


@dataclass(eq=False)
class _Place:
    """A place in a step: how many units were entered."""

    entered: int = 0


@dataclass(eq=False)
class _Visit:
    """A stay of a chunk on the device, from its gather to its release.

    Attributes:
        chunk: which.
        place: where the graphs read it.
        is_waited_for: a segment after this one may read it.
    """

    chunk: Chunk
    place: Tensor
    is_waited_for: bool = False
    _arrived: torch.cuda.Event | None = None
    _is_started: bool = False

    def start(self) -> None:
        """Start to copy the shard, after its pending step."""
        if not self._is_started:
            self._arrived = self.chunk.copy_shard(self.place)
            self._is_started = True

    def start_early(self) -> None:
        """Start, unless that waits for the optimizer, which would delay the unit before."""
        if self.chunk.can_gather_early:
            self.start()

    def wait(self) -> None:
        """Let compute wait for the copy."""
        self.start()
        with self.chunk.memory.waiting("parameters"):
            queue_behind(self._arrived, self.chunk.device)
        self._is_started = False


@dataclass(eq=False)
class _Sent:
    """A chunk's gradient as backward leaves it.

    Attributes:
        gradient: whose.
        whole: where the graphs write it; a gradient that stays on the device keeps this memory.
        used: indices of the parameters that have one.
        measured: for the norm; the graphs write it too.
        held: keeps the memory while it is copied in the captured step.
    """

    gradient: ChunkGradient
    whole: Tensor
    used: frozenset[int]
    measured: Tensor | None
    held: Tensor | None
    _arrived: torch.cuda.Event | None = None

    def send(self, block: Block) -> None:
        """Send it to the host in the captured step."""
        self._arrived = self.gradient.send(block, lasts=True)

    def send_again(self) -> None:
        """Let a replay hand it on."""
        self._arrived = self.gradient.take_replayed(self.whole, self.used, self.measured)

    def wait(self) -> None:
        """Let compute wait for the copy: its memory is used again."""
        with self.gradient.chunk.memory.waiting("gradients on their way"):
            queue_behind(self._arrived, self.gradient.chunk.device)
