"""Losses of a small GPT trained under every spec on CPU ranks, and on one process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from experiments.toml_tables import read_tables
from meshfold.engine import Engine
from meshfold.mesh.testing import run_on_ranks
from meshfold.models import GPT, GPTConfig

FOLDER = Path(__file__).resolve().parent
CONFIG = GPTConfig(vocab_size=64, hidden=64, layers=4, heads=8, max_positions=16)
STEPS, BATCH = 50, 16
OPTIMIZER = dict(name="sgd", lr=0.1, momentum=0.9)
"""Not Adam, which hides a gradient that is wrong by a factor."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A table of settings.toml.

    Attributes:
        kind: the claim that it belongs to.
        ranks: that train.
        spec: as JSON.
    """

    kind: str
    ranks: int
    spec: str


def everything() -> dict[str, Any]:
    """All numbers."""
    found = settings()
    runs = {name: run(one) for name, one in found.items()}
    rows = [
        {
            "spec": name,
            "parallel": found[name].spec,
            "kind": found[name].kind,
            "ranks": found[name].ranks,
            "losses": losses,
        }
        for name, losses in runs.items()
    ]
    return {"steps": STEPS, "serial": run(Setting(kind="", ranks=1, spec="{}")), "rows": rows}


def settings() -> dict[str, Setting]:
    """Return the specs by name."""
    return read_tables(FOLDER / "settings.toml", Setting)


def run(one: Setting, steps: int = STEPS) -> list[float]:
    """Return the loss of every step, which is the same on all ranks."""
    losses: list[float] = run_on_ranks(one.ranks, train, json.loads(one.spec), steps)[0]
    return losses


def train(spec: Mapping[str, object], steps: int) -> list[float]:
    """Train on this rank from the weights that every spec begins with, on the same batches."""
    settings: dict[str, Any] = dict(optimizer=OPTIMIZER, precision="fp32", device="cpu", seed=1)
    with Engine(partial(GPT, CONFIG), spec, **settings) as engine:
        return [float(engine.train_step(engine.shard_batch(batch(step)))) for step in range(steps)]


def batch(step: int) -> dict[str, torch.Tensor]:
    """``tokens``: rows that count on in strides, which a model can learn."""
    generator = torch.Generator().manual_seed(step)
    first, stride = (torch.randint(1, most, (BATCH, 1), generator=generator) for most in (CONFIG.vocab_size, 4))
    tokens = (first + stride * torch.arange(CONFIG.max_positions)) % CONFIG.vocab_size
    return {"input_ids": tokens, "labels": tokens}
