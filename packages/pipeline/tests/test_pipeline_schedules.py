"""Every schedule, and lists that nobody has thought of, against the model in one process: loss, gradients, parameters."""

from __future__ import annotations

import copy
import random
from functools import partial
from typing import Any

import pytest
import torch
from pipeline_checks import assert_gradients, compare, gradients, loss_of, model, tokens
from torch import Tensor

from meshfold.mesh import Mesh
from meshfold.mesh.testing import ranks, run_on_ranks
from meshfold.pipeline import Pipeline, Schedule, schedule, simulate

SCHEDULES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("gpipe", {}),
    ("1f1b", {}),
    ("interleaved", dict(chunks=2)),
    ("zb-h1", {}),
    ("zb-h2", {}),
    ("zb-v", {}),
    ("hanayo", dict(waves=1)),
    ("hanayo", dict(waves=2)),
    ("dualpipe-v", {}),
    ("auto", {}),
)


def layers_for(name: str, settings: dict[str, Any], count: int) -> int:
    """At least one block for every stage, and never as many in each."""
    return len(schedule(name, ranks=count, microbatches=2 * count, **settings).stage_ranks) + 1


def check_schedules(count: int, microbatches: tuple[int, ...], steps: int, by_turns: bool = False) -> None:
    """Every schedule against one process, and what it holds against the simulation; by turns: with one number of micro-batches
    each, and every second pair of schedules with one step only."""
    for number, (name, settings) in enumerate(SCHEDULES):
        make = partial(model, layers_for(name, settings, count))
        for many in (microbatches[number % len(microbatches)],) if by_turns else microbatches:
            what = f"{name} {settings} of {many} on {count} ranks"
            several = steps if not by_turns or number % 4 < 2 else 1
            batches = [tokens(many + many // 2, seed) for seed in range(several)]  # rows that do not divide
            pipeline = compare(make, batches, {"pipe": count}, what, schedule=name, microbatches=many, **settings)
            plan = pipeline.program(many).schedule
            rank = pipeline.mesh.index("pipe")
            assert pipeline.peaks.microbatches == simulate(plan).peak_microbatches[rank], what
            assert pipeline.peaks.graphs == simulate(plan, kept=0.0).peak[rank], what


@pytest.mark.few(1)
@pytest.mark.parametrize("by_turns", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.parametrize(("count", "microbatches"), [(2, (1, 3, 4)), (4, (2, 8))])
def test_every_schedule_trains_as_one_process(count: int, microbatches: tuple[int, ...], by_turns: bool) -> None:
    run_on_ranks(count, check_schedules, count, microbatches, 2 if by_turns else 3, by_turns)


@pytest.mark.slow  # eight ranks on two cores
@pytest.mark.parametrize("microbatches", [(3,), (8,), (18,)])
def test_every_schedule_on_eight_ranks(microbatches: tuple[int, ...]) -> None:
    run_on_ranks(8, check_schedules, 8, microbatches, 3, timeout_s=600)


@ranks(4)
def test_reordering_changes_no_bit() -> None:
    found: dict[str, dict[str, Tensor]] = {}
    for name in ("1f1b", "zb-h1", "zb-h2"):
        pipeline = Pipeline(model(), Mesh({"pipe": 4}), schedule=name, microbatches=6)
        pipeline.step(tokens(6))
        found[name] = {key: p.grad.clone() for key, p in pipeline.named_parameters()}
    for name in ("zb-h1", "zb-h2"):
        for key, gradient in found["1f1b"].items():
            assert torch.equal(found[name][key], gradient), f"{key} under {name}"


@ranks(2)
def test_batched_weight_gradients() -> None:
    late = Schedule.of(["0F0 0F1 0F2 0B0 0B1 0B2 0W0 0W1 0W2", "1F0 1B0 1F1 1B1 1F2 1B2 1W0 1W1 1W2"])
    compare(model, [tokens(6)], {"pipe": 2}, "batched", schedule=late, batched_weights=True)


# -- lists that nobody has thought of -------------------------------------------------------------------------------


def random_schedule(seed: int, count: int) -> Schedule:
    """Stages anywhere, and on every rank any action next that can be."""
    chance = random.Random(seed)
    stage_ranks = [*range(count), *(chance.randrange(count) for _ in range(chance.randint(0, 3)))]
    chance.shuffle(stage_ranks)
    many, lists = chance.randint(1, 5), [[] for _ in range(count)]
    done: set[tuple[str, int, int]] = set()
    split_up = {stage: chance.random() < 0.7 for stage in range(len(stage_ranks))}
    waiting = [
        (op, stage, i)
        for stage in range(len(stage_ranks))
        for i in range(many)
        for op in (("F", "B", "W") if split_up[stage] else ("F", "BW"))
    ]

    def ready(op: str, stage: int, i: int) -> bool:
        if op == "F":
            return not stage or ("F", stage - 1, i) in done
        if op == "W":
            return ("B", stage, i) in done
        after = stage + 1 == len(stage_ranks) or ("B", stage + 1, i) in done
        return ("F", stage, i) in done and after

    while waiting:
        op, stage, i = chance.choice([one for one in waiting if ready(*one)])
        waiting.remove((op, stage, i))
        done |= {("B" if op == "BW" else op, stage, i)}
        lists[stage_ranks[stage]].append(f"{stage}{op}{i}")
    return Schedule.of(lists, name=f"random{seed}", microbatches=many)


@pytest.mark.parametrize("seeds", [range(5), pytest.param(range(5, 40), marks=pytest.mark.slow)], ids=["few", "many"])
@ranks(4)
def test_random_lists_train_as_one_process(seeds: range) -> None:
    serial = model(8, tie=True)
    for seed in seeds:
        plan = random_schedule(seed, 4)
        pipeline = Pipeline(copy.deepcopy(serial), Mesh({"pipe": 4}), schedule=plan)
        batch = tokens(plan.microbatches + 1, seed)
        serial.zero_grad()
        wanted = loss_of(serial, batch)
        wanted.backward()
        assert abs(float(pipeline.step(batch) - wanted)) < 1e-9, str(plan)
        assert_gradients(pipeline, gradients(serial), str(plan))
        assert pipeline.peaks.microbatches == simulate(plan).peak_microbatches[pipeline.mesh.rank]
