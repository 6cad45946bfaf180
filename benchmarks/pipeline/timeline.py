"""When the actions of a step really ran: an event before and behind each, on every rank."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.common import synchronize
from meshfold.mesh import all_reduce, barrier
from meshfold.pipeline import Costs, Pipeline, Schedule
from meshfold.pipeline.runtime.profile import DeviceClock

_METHODS = ("forward", "backward_input", "backward_weight", "backward")


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One step as it ran.

    Attributes:
        ranks: for every rank its actions in order: text, begin and end in milliseconds after the barrier.
    """

    ranks: tuple[tuple[tuple[str, float, float], ...], ...]

    @property
    def makespan(self) -> float:
        """From the barrier to the end of the last action of all."""
        return max(end for actions in self.ranks for _, _, end in actions)

    @property
    def bubble(self) -> float:
        """Share of all ranks' time in which no action ran."""
        busy = sum(end - begin for actions in self.ranks for _, begin, end in actions)
        return 1 - busy / (len(self.ranks) * self.makespan)

    def costs(self, schedule: Schedule, send: float) -> Costs:
        """What the actions of each stage took here, their medians; where a stage had no B and W of their own, half
        of BW counts for each, and where it had no BW, B and W together count for it."""
        seen: dict[tuple[int, str], list[float]] = {}
        for actions in self.ranks:
            for text, begin, end in actions:
                stage, op = _read(text)
                seen.setdefault((stage, op), []).append(end - begin)
        middle = {key: statistics.median(values) for key, values in seen.items()}

        def of(stage: int, op: str) -> float:
            if (stage, op) in middle:
                return middle[stage, op]
            if op == "BW":
                return of(stage, "B") + of(stage, "W")
            return middle[stage, "BW"] / 2

        stages = range(schedule.stages)
        return Costs(
            forward=[of(s, "F") for s in stages],
            backward_input=[of(s, "B") for s in stages],
            backward_weight=[of(s, "W") for s in stages],
            backward=[of(s, "BW") for s in stages],
            send=send,
        )


def watch(pipeline: Pipeline, step: Callable[[], object], microbatches: int) -> Timeline:
    """Run a step after a barrier and say when each action of each rank ran; all ranks call."""
    group, device = pipeline.mesh.group(pipeline.axis), pipeline.device
    clock = DeviceClock(device)
    seen: list[tuple[Any, Any, int]] = []
    barrier(group, device)
    begin = clock.now()
    with _timed(pipeline, clock, seen):
        step()
    synchronize()
    schedule = pipeline.program(microbatches).schedule
    longest = max(len(actions) for actions in schedule.ranks)
    table = torch.zeros(group.size, longest, 2, dtype=torch.float64, device=device)
    place = 0
    for start, end, count in seen:
        first, length = 1e3 * clock.seconds(begin, start), 1e3 * clock.seconds(start, end) / count
        for part in range(count):  # weight gradients of several micro-batches that were made at once
            table[group.index, place] = torch.tensor([first + part * length, first + (part + 1) * length])
            place += 1
    rows = all_reduce(table, group).tolist()
    return Timeline(
        ranks=tuple(
            tuple((str(action), *rows[rank][place]) for place, action in enumerate(actions))
            for rank, actions in enumerate(schedule.ranks)
        )
    )


@contextmanager
def _timed(pipeline: Pipeline, clock: DeviceClock, seen: list[tuple[Any, Any, int]]) -> Iterator[None]:
    """Have the stages note when they begin and end what the schedule asks of them."""
    stages = list(pipeline._stages.values())

    def noting(method: Callable[..., Any], weights: bool) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            begin = clock.now()
            found = method(*args)
            seen.append((begin, clock.now(), len(args) if weights else 1))
            return found

        return call

    for stage in stages:
        for name in _METHODS:
            setattr(stage, name, noting(getattr(stage, name), name == "backward_weight"))
    try:
        yield
    finally:
        for stage in stages:
            for name in _METHODS:
                delattr(stage, name)


def _read(text: str) -> tuple[int, str]:
    from meshfold.pipeline import Action

    action = Action.parse(text)
    return action.stage, action.op.value
