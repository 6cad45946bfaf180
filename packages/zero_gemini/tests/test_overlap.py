"""What a plan lets overlap is what the executor lets overlap.

The host's steps are made as late as anything allows, so that each is done where the executor waits for it: a plan may hide
it until then and no longer. And what the host waits for is no time of compute.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshfold.zero_gemini import Gemini, Shares
from meshfold.zero_gemini.chunks.chunk import Chunk
from meshfold.zero_gemini.chunks.host_gradients import BUFFERS
from meshfold.zero_gemini.optimizer.cpu_executor import Worker
from meshfold.zero_gemini.planner import REGIMES, Workload, cpu
from meshfold.zero_gemini.planner.options import HOST_STREAMED
from meshfold.zero_gemini.planner.seconds import seconds_table
from meshfold.zero_gemini.profiler import LiveBytes, StepTracer, Trace, workload_of
from meshfold.zero_gemini.runtime.module_hooks import Runtime
from meshfold.zero_gemini.runtime.units import Unit

sys.path.append(str(Path(__file__).parent))
from hand_clock import HandClock
from lazy_steps import LazySteps
from planner_cases import EMULATED
from training_cases import in_chunks

WIDTH, LAYERS = 16, 6
HOST = Shares(host_optimizer=1.0, host_parameters=1.0)
PARAMETERS, MOMENTS, WHOLE = "adam_update_parameters", "adam_update_moments", "adam_step"


class Tower(nn.Module):
    """A chunk to each block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        loss: Tensor = x.square().mean()
        return loss


@dataclass
class Seen:
    """What happened in the last step, in order: ``(what, number of the chunk or of the unit)``."""

    events: list[tuple[str, int]] = field(default_factory=list)
    trace: Trace = field(init=False)
    workload: Workload = field(init=False)

    def within(self, begin: str, end: str, *what: str) -> list[int]:
        """Numbers of some events between the two that stand for the parts of a step."""
        first, last = self.events.index((begin, 0)), self.events.index((end, 0))
        return [number for name, number in self.events[first:last] if name in what]


def record(monkeypatch: pytest.MonkeyPatch, kind: Any, accumulate: int) -> Seen:
    """Three steps of a model whose chunks all live on the host: the last one's events and trace."""
    seen, clock = Seen(), HandClock()  # kernels on the host move it by a second
    torch.manual_seed(0)
    model = Tower()
    gemini = in_chunks(
        model,
        torch.bfloat16,
        HOST,
        chunk_elems=WIDTH * WIDTH,
        gradient_dtype=torch.float32 if accumulate > 1 else torch.bfloat16,
    )
    numbers = {chunk: number for number, chunk in enumerate(gemini.chunks)}
    assert len(numbers) == LAYERS

    def stepped(kernel: str, chunk: Chunk) -> None:
        clock.now += 1.0
        seen.events.append((kernel, numbers[chunk]))

    enter, gather = Runtime._enter, Chunk.gather

    def entered(runtime: Runtime, unit: Unit, operands: Any, **more: Any) -> None:
        seen.events.append(("enter", int(unit.name.rpartition(".")[2])))
        enter(runtime, unit, operands, **more)

    def gathered(chunk: Chunk, operands: Any) -> None:
        came = not chunk.is_gathered
        gather(chunk, operands)
        if came:
            seen.events.append(("copy", numbers[chunk]))

    monkeypatch.setattr(Runtime, "_enter", entered)
    monkeypatch.setattr(Chunk, "gather", gathered)
    LazySteps(monkeypatch, stepped)
    for number in range(3 * accumulate):
        last = number % accumulate == accumulate - 1
        first = number == 2 * accumulate
        if first:
            seen.events.clear()
        gemini.begin(last=last)
        tracer = StepTracer(model, memory=LiveBytes(), clock=clock)
        if first:
            with gemini.memory.waiting.watched(tracer.waiting), tracer:
                one_micro_step(model, gemini, kind if last else "more", seen)
            seen.trace = tracer.trace()
        else:
            one_micro_step(model, gemini, kind if last else "more", seen)
        if last:
            gemini.finish()
            seen.events.append(("end", 0))
            gemini.step()
    seen.workload = workload_of(
        seen.trace,
        gemini.uses(),
        name="tower",
        regime=REGIMES["A"],
        tokens=8,
        accumulation=accumulate,
        clipping=gemini.holds_gradients,
    )
    gemini.close()
    return seen


def one_micro_step(model: nn.Module, gemini: Gemini, kind: Any, seen: Seen) -> None:
    seen.events.append(("forward", 0))
    loss = model(torch.ones(8, WIDTH, dtype=torch.bfloat16))
    gemini.expect(kind)
    seen.events.append(("backward", 0))
    loss.backward()
    seen.events.append(("over", 0))


def planned_bytes(workload: Workload) -> dict[str, float]:
    """Bytes an element that a plan counts on the host's memory in each phase for the optimizer's step."""
    regime = replace(workload.regime, step=1e-9, first_pass=1e-9, second_pass=1e-9)
    strategy = cpu(workload, EMULATED).strategy
    found = {}
    table, phases = seconds_table(workload, EMULATED, strategy)
    without, _ = seconds_table(replace(workload, regime=regime), EMULATED, strategy)
    for phase in phases:
        row = next(i for i in range(phase.start, phase.stop) if table.names[i] == "host memory")
        more = (table.chunk[0, HOST_STREAMED, row] - without.chunk[0, HOST_STREAMED, row]) * EMULATED.host_memory
        found[phase.name] = round(more / workload.chunks[0].elems, 6)
    return found


UP, DOWN = [*range(LAYERS)], [*reversed(range(LAYERS))]


def held_for_clipping(patch: pytest.MonkeyPatch) -> None:
    seen = record(patch, "last", 1)
    assert planned_bytes(seen.workload) == {"forward": 18.0, "backward": 18.0}
    assert seen.within("forward", "backward", PARAMETERS, MOMENTS, WHOLE) == UP
    assert seen.within("forward", "backward", MOMENTS) == []
    assert seen.within("backward", "end", PARAMETERS, MOMENTS, WHOLE) == DOWN
    assert seen.within("backward", "end", MOMENTS) == DOWN
    # 6 first halves before units are entered, 6 second ones inside of the backward: no time of compute
    assert sum(one.waited_seconds for one in seen.trace.timesteps) == LAYERS
    assert sum(one.stalled_seconds for one in seen.trace.timesteps) == LAYERS
    assert seen.trace.seconds == 0.0


def through_the_ring(patch: pytest.MonkeyPatch) -> None:
    seen = record(patch, "final", 1)
    assert planned_bytes(seen.workload) == {"forward": 0.0, "backward": 26.0}
    # what is in the ring at the end of the step before is all that a forward may hide
    assert seen.within("forward", "backward", WHOLE) == DOWN[-BUFFERS:]
    assert seen.within("backward", "end", WHOLE) == DOWN[:-BUFFERS]
    assert seen.trace.timesteps[0].waited_seconds == BUFFERS
    stalled = seen.within("backward", "over", WHOLE)
    assert sum(one.stalled_seconds for one in seen.trace.timesteps) == len(stalled) > 0
    assert seen.trace.seconds == 0.0


def held_for_micro_steps(patch: pytest.MonkeyPatch) -> None:
    seen = record(patch, "final", 2)
    assert planned_bytes(seen.workload) == {"step": 26.0, "later forwards": 0.0, "later backwards": 0.0}
    assert seen.within("forward", "backward", WHOLE) == DOWN  # nothing makes the backward wait
    assert seen.trace.timesteps[0].waited_seconds == LAYERS and seen.trace.seconds == 0.0


def copies_take_turns(patch: pytest.MonkeyPatch) -> None:
    """What is still being stepped is brought up when its unit is entered; what is not, or no more, a unit ahead."""
    for kind, is_done in (("last", False), ("final", False), ("last", True)):
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Worker, "is_done", lambda worker, chunk, is_done=is_done: is_done)
            events = record(inner, kind, 1).events
        turn = events.index(("backward", 0))
        forward = [event for event in events[:turn] if event[0] in ("enter", "copy")]
        ahead = [event for k in UP for event in (("enter", k), ("copy", k + 1))]
        turns = [event for k in UP for event in (("enter", k), ("copy", k))]
        assert forward == ([("enter", 0), ("copy", 0), *ahead[1:-1]] if is_done else turns)
        backward = [event for event in events[turn:] if event[0] in ("enter", "copy")]
        wanted = [event for k in DOWN for event in (("enter", k), ("copy", k - 1))]
        assert backward == wanted[:-1]


@pytest.mark.parametrize(
    "body",
    [held_for_clipping, through_the_ring, held_for_micro_steps, copies_take_turns],
    ids=lambda body: body.__name__,
)
def test_a_plan_hides_what_the_executor_hides(
    body: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    body(monkeypatch)
