"""Your own pipeline schedule: a function that returns a list of actions for every rank, validated, simulated and run.

meshfold run --ranks 2 examples/own_schedule.py
"""

import copy

import torch

from meshfold.engine import Engine
from meshfold.models import build
from meshfold.pipeline import ScheduleError, schedule, simulate


def by_pairs(*, ranks, microbatches):
    """Backwards two by two. 1F0: forward of stage 1 on micro-batch 0; B: its gradient of the input; W: of the weights."""
    lists = []
    for rank in range(ranks):
        forward = [f"{rank}F{i}" for i in range(microbatches)]
        ahead = 2 * (ranks - rank)  # micro-batches in flight before the first backward
        actions = forward[:ahead]
        for i in range(0, microbatches, 2):
            pair = range(i, min(i + 2, microbatches))
            actions += [f"{rank}B{j}" for j in pair] + [f"{rank}W{j}" for j in pair]
            actions += forward[ahead + i : ahead + i + 2]
        lists.append(actions)
    return lists


def without_the_last(*, ranks, microbatches):
    return [actions[:-1] for actions in by_pairs(ranks=ranks, microbatches=microbatches)]


torch.manual_seed(0)
model, ids = build("gpt-tiny").double(), torch.randint(256, (8, 32))
serial = copy.deepcopy(model)  # each rank trains it by itself, to compare
adamw = torch.optim.AdamW(serial.parameters(), lr=1e-2)
parallel = dict(pipeline=dict(size=2, schedule=by_pairs, microbatches=4))
engine = Engine(model, parallel, optimizer=dict(name="adamw", lr=1e-2), precision="fp64")

engine.print(schedule(by_pairs, ranks=2, microbatches=4))
for way in (by_pairs, "1f1b"):
    clock = simulate(schedule(way, ranks=2, microbatches=4))
    name = clock.schedule.name
    engine.print(f"{name}: bubble {clock.bubble:.1%}, {max(clock.peak):.0f} activations at most")
try:
    schedule(without_the_last, ranks=2, microbatches=4)
except ScheduleError as error:
    engine.print(error)
for _ in range(3):
    one = serial(ids, labels=ids).loss
    one.backward()
    adamw.step()
    adamw.zero_grad()
    engine.print(f"loss {engine.train_step(ids):.8f}, in one process {one:.8f}")
