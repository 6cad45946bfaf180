"""A small GPT under a grid on CPU ranks, in float64: its loss and every gradient beside those of one process."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from experiments.report import Case, markdown
from experiments.tensor_layers import Grid
from meshfold.mesh import Mesh
from meshfold.mesh.parameters import metadata_on
from meshfold.mesh.testing import run_on_ranks
from meshfold.models import GPT, GPTConfig
from meshfold.tensor_parallel import parallelize

CONFIG = GPTConfig(vocab_size=64, hidden=32, layers=2, heads=8, max_positions=8, tie=False)
BATCH = 8


def parity(grid: Grid) -> dict[str, Any]:
    """The worst of all ranks; errors are relative to the largest element, projections are of a gradient on the wanted one."""
    found = run_on_ranks(grid.ranks, on_rank, grid.mode, grid.sizes)
    return {
        "grid": grid.name,
        "gradients": found[0]["gradients"],
        "loss error": max(one["loss error"] for one in found),
        "gradient error": max(one["gradient error"] for one in found),
        "projection": max((one["projection"] for one in found), key=lambda ratio: abs(ratio - 1)),
    }


def exact_cases(runs: Sequence[Mapping[str, Any]]) -> list[Case]:
    """Return the cases of a claim that losses and gradients are those of one process."""
    return [Case(f"{run['grid']}, {what}", 0, run[f"{what} error"]) for run in runs for what in ("loss", "gradient")]


def runs_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the runs as a table, one a line."""
    rows = [
        [
            f"`{run['grid']}`",
            str(run["gradients"]),
            f"{run['loss error']:.0e}",
            f"{run['gradient error']:.0e}",
            f"{run['projection']:.12f}",
        ]
        for run in runs
    ]
    return markdown(["grid", "gradients", "loss off by", "gradient off by", "projection"], rows)


def on_rank(mode: str, sizes: tuple[int, ...]) -> dict[str, float]:
    """Compare this rank with one process."""
    mesh = Mesh(Grid(mode=mode, sizes=sizes).axes)
    torch.manual_seed(1)
    serial = GPT(CONFIG).double()
    with torch.no_grad():  # biases begin at zero, norms at one, which would hide what is wrong
        for parameter in serial.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    tokens = torch.randint(CONFIG.vocab_size, (BATCH, CONFIG.max_positions))
    split = copy.deepcopy(serial)
    wanted = serial(tokens, labels=tokens).loss
    wanted.backward()
    parallelize(split, mesh, mode)
    seen = split(tokens, labels=tokens).loss
    seen.backward()
    gradients = {name: parameter.grad for name, parameter in serial.named_parameters()}
    errors, ratios = [], []
    for name, parameter in split.named_parameters():
        whole, mine = gradients[name], parameter.grad
        if whole is None or mine is None:
            raise RuntimeError(f"{name} has no gradient")
        part = metadata_on(parameter, mesh).placement.shard(whole, mesh)
        errors.append(float((mine - part).abs().max() / whole.abs().max()))
        if float(part.abs().max()) > 0:
            ratios.append(float((mine * part).sum() / (part * part).sum()))
    mesh.close()
    return {
        "gradients": len(gradients),
        "loss error": float((seen - wanted).detach().abs() / wanted.detach().abs()),
        "gradient error": max(errors),
        "projection": max(ratios, key=lambda ratio: abs(ratio - 1)),
    }
