"""Measures how long the stages of a model take, so that it can be cut better."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch

from meshfold.mesh import Group, all_reduce
from meshfold.pipeline.runtime.microbatch import Microbatch
from meshfold.pipeline.runtime.stage import Stage
from meshfold.pipeline.runtime.transfer_plan import TransferPlan
from meshfold.pipeline.scheduling.costs import Costs


class DeviceClock:
    """CUDA events, which need no wait in between; the clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> Any:
        """Return a timestamp."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the seconds between two timestamps that have happened."""
        return float(begin.elapsed_time(end)) / 1e3 if self._device.type == "cuda" else float(end - begin)


_KEY = -1  # not the number of any micro-batch


def measure(
    stages: Mapping[int, Stage],
    work: Microbatch,
    plan: TransferPlan,
    group: Group,
    count: int,
    device: torch.device,
    repeats: int,
) -> Costs:
    """Time F, B and W of only this rank's stages, and share the result with all ranks; leave gradients unchanged.

    Args:
        stages: this rank's.
        work: a micro-batch.
        plan: what travels for it.
        group: of the pipeline axis; all of it must call.
        count: stages of the model.
        device: where stages run.
        repeats: runs after a warm-up run; the median is returned.

    Returns:
        Seconds.
    """
    clock = DeviceClock(device)
    table = torch.zeros(count, 3, dtype=torch.float64, device=device)
    for number, stage in stages.items():
        parameters = {p: p.grad for p in stage.parameters()}
        for parameter in parameters:
            parameter.grad = None
        runs = [_run(stage, work, plan, device, clock) for _ in range(repeats + 1)][1:]
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        for parameter, gradient in parameters.items():
            parameter.grad = gradient
        seconds = [[clock.seconds(*pair) for pair in pairwise(points)] for points in runs]
        table[number] = torch.tensor([statistics.median(column) for column in zip(*seconds, strict=True)])
    forward, backward_input, backward_weight = all_reduce(table, group).t().tolist()
    return Costs(forward=forward, backward_input=backward_input, backward_weight=backward_weight)


def rehearse(stages: Mapping[int, Stage], work: Microbatch, plan: TransferPlan, device: torch.device) -> None:
    """Run F of all these stages in order, then B and W of each in reverse order, on noise.

    Args:
        stages: a rank's.
        work: a micro-batch.
        plan: what travels for it.
        device: where stages run.
    """
    for stage in stages.values():
        stage.forward(_KEY, work, plan, stage.random_inputs(plan, device))
    for stage in reversed([*stages.values()]):
        stage.backward(_KEY, stage.random_gradients(plan, device))


def _run(stage: Stage, work: Microbatch, plan: TransferPlan, device: torch.device, clock: DeviceClock) -> list[Any]:
    """Return the times before F, between F, B and W, and after W.

    On a GPU the host does not wait in between, so launches overlap with computation, as in a step.
    """
    received, gradients = stage.random_inputs(plan, device), stage.random_gradients(plan, device)
    points = [clock.now()]
    stage.forward(_KEY, work, plan, received)
    points.append(clock.now())
    stage.backward_input(_KEY, gradients)
    points.append(clock.now())
    stage.backward_weight(_KEY)
    points.append(clock.now())
    return points
