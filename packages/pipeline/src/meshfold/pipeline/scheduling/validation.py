"""Checks of schedules, mainly hand-written ones: the mistake, its place, and the change to make.

Places in a rank's list count from 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from meshfold.pipeline.errors import ScheduleError
from meshfold.pipeline.scheduling.actions import Action, Op, Schedule
from meshfold.pipeline.scheduling.costs import Costs
from meshfold.pipeline.scheduling.simulation import Replay, peak_activations, source_of


def check(schedule: Schedule, *, memory: float | Sequence[float] | None = None, costs: Costs | None = None) -> None:
    """Raise if a schedule cannot run, or holds more than it may.

    Args:
        schedule: to check.
        memory: the most activations that a rank may hold at a time, for all ranks or for each; None: no bound. In
            the unit of ``costs.activation``: by default activations of one stage for one micro-batch.
        costs: what an activation of each stage takes, and the share that B leaves; None: 1, and all of it.

    Raises:
        ScheduleError: if an action is on a rank that does not hold its stage, is missing or duplicated; if F, B and W
            of a stage and a micro-batch are out of order; if ranks would deadlock; if a rank
            holds too much. The message says where, and what to change.
    """
    _Judge(schedule).judge()
    if memory is not None:
        _memory(schedule, memory, costs or Costs())


@dataclass(frozen=True)
class _Judge:
    schedule: Schedule

    def judge(self) -> None:
        self._stages()
        at = self._once()
        self._complete(at)
        self._local_order(at)
        self._no_deadlock(at)

    def _fail(self, problem: str, change: str) -> NoReturn:
        raise ScheduleError(f"schedule {self.schedule.name!r}: {problem}. {change}.")

    def _stages(self) -> None:
        """Check that every stage is on an existing rank, and every action on its stage's rank."""
        schedule = self.schedule
        ranks = len(schedule.ranks)
        if not schedule.stage_ranks or schedule.microbatches < 1:
            self._fail("there is nothing to do", "Give every rank a list of actions, such as '0F0 0BW0'")
        for stage, rank in enumerate(schedule.stage_ranks):
            if not 0 <= rank < ranks:
                self._fail(
                    f"stage {stage} is on rank {rank}, and there are {ranks} ranks",
                    f"Give it to one of the ranks 0 to {ranks - 1}",
                )
        for rank, place, action in self._all():
            if not 0 <= action.stage < schedule.stages:
                self._fail(
                    f"rank {rank} lists {action} at position {place}, and there are stages 0 to {schedule.stages - 1}",
                    "Take it out, or say on which rank that stage is",
                )
            if not 0 <= action.microbatch < schedule.microbatches:
                self._fail(
                    f"rank {rank} lists {action} at position {place}, and there are micro-batches 0 to {schedule.microbatches - 1}",
                    "Take it out, or make the step larger",
                )
            owner = schedule.stage_ranks[action.stage]
            if owner != rank:
                self._fail(
                    f"rank {rank} lists {action} at position {place}, and stage {action.stage} is on rank {owner}",
                    f"Move {action} to rank {owner}",
                )

    def _all(self) -> list[tuple[int, int, Action]]:
        return [(r, i, action) for r, actions in enumerate(self.schedule.ranks) for i, action in enumerate(actions)]

    def _once(self) -> dict[Action, int]:
        """Return the position of every action on its rank; check that none is duplicated."""
        at: dict[Action, int] = {}
        for rank, place, action in self._all():
            if action in at:
                self._fail(
                    f"rank {rank} lists {action} twice, at positions {at[action]} and {place}",
                    "Take one of them out",
                )
            at[action] = place
        return at

    def _complete(self, at: dict[Action, int]) -> None:
        """Check that every stage does F, and B and W or BW, on every micro-batch."""
        for stage, rank in enumerate(self.schedule.stage_ranks):
            for i in range(self.schedule.microbatches):
                f, b, w, both = (Action(op, stage, i) for op in (Op.F, Op.B, Op.W, Op.BW))
                if both in at and (b in at or w in at):
                    other = b if b in at else w
                    self._fail(
                        f"rank {rank} lists {both} at position {at[both]} and {other} at position {at[other]}: a gradient twice",
                        f"Take {other} out, or write {b} and {w} in place of {both}",
                    )
                if f not in at:
                    later = next((one for one in (both, b, w) if one in at), None)
                    self._fail(
                        f"{f} is missing on rank {rank}",
                        f"Add it before {later}" if later else f"Add {f}, {b} and {w}",
                    )
                if both in at:
                    continue
                if b not in at:
                    what = f"Add it before {w}" if w in at else f"Add {b} and {w}, or {both}, behind {f}"
                    self._fail(f"{b} is missing on rank {rank}", what)
                if w not in at:
                    self._fail(
                        f"{w} is missing on rank {rank}",
                        f"Add it after {b}, or write {both} in place of {b}",
                    )

    def _local_order(self, at: dict[Action, int]) -> None:
        """Check that F comes before B before W of the same stage and micro-batch."""
        for action, place in at.items():
            first = {Op.B: Op.F, Op.BW: Op.F, Op.W: Op.B}.get(action.op)
            if first is None:
                continue
            before = Action(first, action.stage, action.microbatch)
            if at[before] > place:
                rank = self.schedule.stage_ranks[action.stage]
                self._fail(
                    f"rank {rank} lists {action} at position {place}, before {before} at position {at[before]}",
                    f"Move {before} before {action}",
                )

    def _no_deadlock(self, at: dict[Action, int]) -> None:
        """Run the lists; if no rank can continue, raise with the ranks that wait for each other."""
        schedule = self.schedule
        times, _ = Replay(schedule.stage_ranks, Costs().for_stages(schedule.stages)).run(schedule.ranks)
        done = [len(own) for own in times]
        stuck = [rank for rank, actions in enumerate(schedule.ranks) if done[rank] < len(actions)]
        if stuck:
            self._cycle(stuck[0], done, at)

    def _cycle(self, rank: int, done: list[int], at: dict[Action, int]) -> NoReturn:
        """Follow the chain of waiting ranks until one repeats."""
        schedule = self.schedule
        waits: list[tuple[int, Action, Action]] = []  # rank, its next action, the action it waits for
        while rank not in [one[0] for one in waits]:
            action = schedule.ranks[rank][done[rank]]
            source = source_of(action, schedule.stages)
            if source is None:
                break
            forward, stage, microbatch = source
            awaited = Action(Op.F if forward else Op.B, stage, microbatch)
            if awaited not in at:
                awaited = Action(Op.BW, stage, microbatch)
            waits.append((rank, action, awaited))
            rank = schedule.stage_ranks[stage]
        circle = waits[[one[0] for one in waits].index(rank) :]
        if len(circle) == 1:
            _, action, awaited = circle[0]
            self._fail(
                f"rank {rank} lists {action} at position {at[action]}, before {awaited} at position {at[awaited]}, "
                "whose result it needs",
                f"Move {awaited} before {action}",
            )
        stories = [
            f"rank {where} at position {at[action]} has {action}, which needs {awaited} of rank "
            f"{schedule.stage_ranks[awaited.stage]}"
            for where, action, awaited in circle
        ]
        blocker = {where: action for where, action, _ in circle}
        moves = []
        for _, _, awaited in circle:
            owner = schedule.stage_ranks[awaited.stage]
            moves.append(f"{awaited} before {blocker[owner]} on rank {owner}")
        self._fail(f"ranks wait for each other forever: {'; '.join(stories)}", f"Move {', or '.join(moves)}")


def _memory(schedule: Schedule, memory: float | Sequence[float], costs: Costs) -> None:
    read = costs.for_stages(schedule.stages)
    bounds = [float(memory)] * len(schedule.ranks) if isinstance(memory, int | float) else list(memory)
    if len(bounds) != len(schedule.ranks):
        raise ScheduleError(
            f"memory has {len(bounds)} bounds and there are {len(schedule.ranks)} ranks. Give one for each, or a single one."
        )
    for rank, (actions, bound) in enumerate(zip(schedule.ranks, bounds, strict=True)):
        if peak_activations(actions, read.activation, read.kept) <= bound * (1 + 1e-9):
            continue
        place = next(
            i
            for i in range(len(actions))
            if peak_activations(actions[: i + 1], read.activation, read.kept) > bound * (1 + 1e-9)
        )
        held = peak_activations(actions[: place + 1], read.activation, read.kept)
        raise ScheduleError(
            f"schedule {schedule.name!r}: with {actions[place]} at position {place} rank {rank} holds {held:.6g} activations, but "
            f"the bound is {bound:.6g}. Move it after gradients (B, W or BW) that free some, or choose a leaner schedule."
        )
