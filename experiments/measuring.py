"""What experiments that run for real have in common: ``measured.py`` on every rank, its clock, its files."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.report import rounded
from meshfold.mesh import Group, all_reduce, barrier, start


def sizes(
    description: str | None, folder: Path, table: Sequence[tuple[str, int, int, str | None]]
) -> argparse.ArgumentParser:
    """The arguments of a measured.py.

    Args:
        description: its docstring.
        folder: the experiment's.
        table: name, default without a GPU, default with one, and what it is.
    """
    big = torch.cuda.is_available()
    made = argparse.ArgumentParser(prog="measured.py", description=description)
    made.add_argument("--output", type=Path, default=folder / "results")
    for name, small, large, meaning in table:
        made.add_argument(f"--{name}", type=int, default=large if big else small, help=meaning)
    return made


def measured(
    argv: Sequence[str] | None,
    arguments: argparse.ArgumentParser,
    measure: Callable[[argparse.Namespace, int, torch.device], dict[str, Any]],
    page: Callable[[Mapping[str, Any]], str],
) -> int:
    """Run a measured.py on this rank; rank 0 writes measured.json and measured.md.

    Args:
        argv: the words after the script's name; None: those of this process.
        arguments: made by :func:`sizes`.
        measure: takes the options, the number of ranks and this rank's device.
        page: the text of measured.md.
    """
    options = arguments.parse_args(argv)
    with start() as process:
        found = measure(options, process.world_size, torch.device(process.device))
    if process.rank == 0:
        publish(found, page, options.output)
    return 0


def results(
    options: argparse.Namespace,
    names: Sequence[str],
    ranks: int,
    device: torch.device,
    kind: torch.dtype,
    rows: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Return what measured.json holds: where it ran, the options of these names, and the rows."""
    return {
        "ranks": ranks,
        **surroundings(device, kind),
        **{name: getattr(options, name) for name in names},
        "rows": list(rows),
    }


def median(action: Callable[[], object], repeats: int, group: Group, device: torch.device) -> float:
    """Seconds between two barriers, of the slowest rank, after one run that does not count."""
    times = []
    for _ in range(repeats + 1):
        barrier(group, device)
        began = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    slowest = all_reduce(torch.tensor(times[1:], dtype=torch.float64, device=device), group, op="max")
    return float(statistics.median(slowest.tolist()))


def surroundings(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """What the numbers were measured on."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "kind": str(dtype).removeprefix("torch."),
        "torch": str(torch.__version__),
        "cores": os.cpu_count(),
    }


def publish(found: Mapping[str, Any], page: Callable[[Mapping[str, Any]], str], folder: Path) -> None:
    """Write measured.json and measured.md, and print the page without its first line."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(rounded(found), indent=1, ensure_ascii=False)
    (folder / "measured.json").write_text(text + "\n", encoding="utf-8")
    (folder / "measured.md").write_text(page(found), encoding="utf-8")
    print(page(found).split("-->")[1])


def shared_cores(found: Mapping[str, Any]) -> list[str]:
    """A sentence where times say nothing: more ranks than cores."""
    if found["device"] == "CPU" and found["ranks"] > (found["cores"] or 1):
        return [f"{found['ranks']} ranks shared {found['cores']} cores: times say nothing."]
    return []
