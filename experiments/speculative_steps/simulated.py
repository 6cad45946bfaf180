"""Steps made before the norm is known: trained beside steps that wait for it, and both on the planner's clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from experiments.planned import GB, limits_of, workload_of
from experiments.report import read_csv
from experiments.toml_tables import read_tables
from meshfold.mesh import Mesh
from meshfold.mesh.testing import run_on_ranks
from meshfold.models import Llama, LlamaConfig
from meshfold.planner import Machine, find_machine
from meshfold.zero_gemini import Gemini, Memory, Shares
from meshfold.zero_gemini.optimizer import SPECULATE_AFTER_STEPS
from meshfold.zero_gemini.planner import SPECULATIVE_STEP, SPLIT_STEP, plan, static

FOLDER = Path(__file__).resolve().parent
STEPS, CLIPPED = 9, 4
"""Steps that train, and the one whose norm is over its bound: the step that was made ahead is dropped there."""
ROLLED_BACK = 0.0012
"""Share of steps that clip, SuperOffload's for 175 billion parameters."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A table of settings.toml: a Llama's sizes, tokens of a sequence, sequences of all GPUs, and a node of :func:`node`."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int
    sequence: int
    batch: int
    gpus: int
    node: str
    source: str

    def build(self) -> Llama:
        """Return the model."""
        return Llama(
            LlamaConfig(
                vocab_size=self.vocabulary,
                hidden=self.hidden,
                layers=self.layers,
                heads=self.heads,
                kv_heads=self.kv_heads,
                ffn=self.inner,
                max_positions=self.sequence,
            )
        )


def everything() -> dict[str, Any]:
    """All numbers."""
    waited, ahead = (run_on_ranks(1, train, speculative)[0] for speculative in (False, True))
    published = [{"system": row["system"], "ms": float(row["ms"])} for row in read_csv(FOLDER / "published.csv")]
    plans = {name: clock(one) for name, one in settings().items()}
    trained = {"steps": STEPS, "clipped": CLIPPED, "ahead": ahead["ahead"], "differ": differences(waited, ahead)}
    return {"trained": trained, "plans": plans, "published": published}


def settings() -> dict[str, Setting]:
    """Return the models by name."""
    return read_tables(FOLDER / "settings.toml", Setting)


def node(name: str) -> Machine:
    """Return a machine: A100s of 40 GB, or one superchip by its data sheet."""
    if name == "a100":
        known = find_machine("a100x8")
        return replace(known, memory=39.5 * 2**30, devices=2)
    known = find_machine("h200")
    host = replace(known.host, memory=480 * GB, up=380 * GB, down=380 * GB, both=600 * GB, cores=72, bandwidth=400 * GB)
    return replace(known, name="gh200", memory=95 * 2**30, host=host)


def clock(one: Setting) -> dict[str, float]:
    """Return milliseconds of a step with clipping, by who steps what and when.

    ``host``: the optimizer steps on the host and waits for the norm. ``ahead``: the same, but before the norm is known.
    ``planned``: the planner's own choice.
    """
    machine = node(one.node)
    workload, rates = workload_of(
        one.build, one.gpus, machine, batch=one.batch, sequence=one.sequence, clip=True, stage=2
    )
    rare = replace(workload, clip_probability=ROLLED_BACK)
    limits = limits_of(machine)
    host = partial(static, machine=rates, limits=limits, offload_optim_frac=1.0)
    made = {
        "host": host(replace(rare, strategies=(SPLIT_STEP,))),
        "ahead": host(replace(rare, strategies=(SPECULATIVE_STEP,))),
        "planned": plan(rare, rates, limits),
    }
    return {name: 1e3 * found.seconds for name, found in made.items()}


def train(speculative: bool) -> dict[str, list[float]]:
    """Train a model whose states are on the host.

    Returns:
        Losses, norms, all weights at the end, and the numbers of the steps that were made before the norm was known.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(40, 32), torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 40)
    )
    gemini = Gemini(
        model,
        Mesh({"data": 1}),
        stage=3,
        memory=Memory(torch.device("cpu")),
        chunk_elems=2048,
        dtype=torch.bfloat16,
        master_dtype=torch.float32,
        placements=Shares(host_optimizer=1.0, host_parameters=0.5),
        make_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    )
    if gemini.step_speculatively(speculative) != speculative:
        raise RuntimeError("the host has no memory for the copies that steps go to")
    losses, norms = [], []
    ahead: list[float] = []
    generator = torch.Generator().manual_seed(0)
    for step in range(STEPS):
        tokens = torch.randint(40, (16, 8), generator=generator)
        if speculative and gemini.steps_alike >= SPECULATE_AFTER_STEPS:
            ahead.append(step)
        gemini.begin(last=True)
        loss = F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
        loss.backward()
        gemini.finish()
        norms.append(float(gemini.clip(1e-3 if step == CLIPPED else 1e3)))
        gemini.step()
        losses.append(loss.item())
    weights = [float(x) for one in model.parameters() for x in gemini.read(one).flatten()]
    gemini.close()
    return {"losses": losses, "norms": norms, "weights": weights, "ahead": ahead}


def differences(waited: Mapping[str, Sequence[float]], ahead: Mapping[str, Sequence[float]]) -> dict[str, int]:
    """Return how many losses, norms and weights of two runs differ."""
    return {
        key: sum(a != b for a, b in zip(waited[key], ahead[key], strict=True)) for key in ("losses", "norms", "weights")
    }
