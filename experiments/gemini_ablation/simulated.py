"""Steps of models whose states do not fit a GPU, on the planner's clock, with one technique more in each row."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from experiments.planned import Node, Size, limits_of, workload_of
from experiments.toml_tables import read_tables
from meshfold.engine import Engine
from meshfold.mesh.testing import run_on_ranks
from meshfold.models import build
from meshfold.zero_gemini import MemoryPlanError
from meshfold.zero_gemini.planner import Limits, Plan, Workload, cpu, plan, static
from meshfold.zero_gemini.planner import Machine as Rates

FOLDER = Path(__file__).resolve().parent
NODE = Node(preset="a100x8", devices=8, gpu_gib=40, host_gb=500, source="not published")
STAGES = ("none", "prefetch", "cache", "hybrid Adam")
PLACEMENTS: dict[str, dict[str, object]] = {
    "on the GPU": dict(placement="cuda"),
    "everything on the host": dict(placement="cpu"),
    "parameters on the GPU": dict(placement="static", offload_optim_frac=1.0),
    "half of the states on the GPU": dict(placement="static", offload_optim_frac=0.5),
}
"""Placements that are trained for real: those of the clock's rows."""
STEPS = 5
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of parameters on the host. The cache holds the others, as many as fit."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A table of settings.toml: a GPT's sizes, and sequences of 1024 tokens on one GPU."""

    layers: int
    hidden: int
    heads: int
    batch: int

    @property
    def size(self) -> Size:
        """The model."""
        return Size(layers=self.layers, hidden=self.hidden, heads=self.heads)


def everything() -> dict[str, Any]:
    """All numbers."""
    rows = [{"model": name, **row} for name, one in settings().items() for row in stages(one)]
    losses = {name: run_on_ranks(1, train, zero)[0] for name, zero in PLACEMENTS.items()}
    return {"rows": rows, "losses": losses}


def settings() -> dict[str, Setting]:
    """Return the models by name."""
    return read_tables(FOLDER / "settings.toml", Setting)


def stages(one: Setting) -> list[dict[str, Any]]:
    """Return a row for each technique that is added: seconds of a step, and GB of the GPU and the host."""
    machine = NODE.machine()
    workload, rates = workload_of(one.size.builder, 1, machine, batch=one.batch)
    limits = limits_of(machine)
    streamed = cpu(workload, rates, limits)
    made = {
        "none": (streamed, waiting(streamed)),
        "prefetch": (streamed, streamed.seconds),
        "cache": (cached := cache(workload, rates, limits), cached.seconds),
        "hybrid Adam": (best := plan(workload, rates, limits), best.seconds),
    }
    return [
        {
            "stage": stage,
            "seconds": made[stage][1],
            "GB": made[stage][0].peak_gpu_bytes / 1e9,
            "host GB": made[stage][0].peak_host_bytes / 1e9,
        }
        for stage in STAGES
    ]


def waiting(made: Plan) -> float:
    """Return a step's seconds if compute waits for every copy of parameters to the GPU, as without prefetching."""
    whole = 0.0
    for name, weight, seconds in made.phases:
        terms = {term.name: term.seconds for term in made.terms if term.phase == name}
        tail = terms.get("exposed tail", 0.0)
        whole += weight * max(seconds, terms["compute"] + terms.get("h2d", 0.0) + tail)
    return whole


def cache(workload: Workload, rates: Rates, limits: Limits) -> Plan:
    """Return the plan with all states on the host and as many parameters on the GPU as fit.

    Raises:
        MemoryPlanError: if not even none do.
    """
    for share in SHARES[:-1]:
        try:
            return static(workload, rates, limits, offload_optim_frac=1.0, offload_param_frac=share)
        except MemoryPlanError:
            continue
    return static(workload, rates, limits, offload_optim_frac=1.0, offload_param_frac=SHARES[-1])


def train(zero: dict[str, object]) -> list[float]:
    """Return the losses of a few steps of a small model under a placement."""
    tokens = torch.randint(256, (4, 32), generator=torch.Generator().manual_seed(0))
    settings: dict[str, Any] = dict(precision="bf16", optimizer=dict(name="adamw", lr=3e-3), device="cpu")
    with Engine(lambda: build("gpt-tiny"), dict(zero=dict(stage=3, **zero)), **settings) as engine:
        return [float(engine.train_step({"input_ids": tokens, "labels": tokens})) for _ in range(STEPS)]
