"""Common parts of experiments that run for real: ``measured.py`` on every rank, its clock, its files.

A run that is cut loses the row that it measured then, and no other: rank 0 says which row runs, and writes the files after each.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from experiments.report import rounded
from meshfold.mesh import Group, all_reduce, barrier, start

CUT = "Not all rows are here: the run was cut, or goes on."
"""The last line of a page that is written while rows are missing."""
ON_CPU = "Times of small sizes on a CPU say nothing of what is published for GPUs."
"""The verdict of a run without GPUs."""
Found = Mapping[str, Any]
"""Content of measured.json."""


class Notes:
    """Rows of a measurement on one rank, in the order of their runs.

    Attributes:
        options: sizes, from the command line.
        ranks: that run.
        device: of this rank.
        head: what measured.json holds beside rows; a measurement may add to it.
        plan: what was made before the ranks met.
        rows: those that have run.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        ranks: int,
        device: torch.device,
        head: Mapping[str, Any],
        plan: Any = None,
        write: Callable[[list[dict[str, Any]]], None] | None = None,
    ) -> None:
        """Begin without rows.

        Args:
            options: sizes.
            ranks: that run.
            device: of this rank.
            head: what measured.json holds beside rows.
            plan: what was made before the ranks met.
            write: called with all rows after each; None on a rank that neither writes nor prints.
        """
        self.options, self.ranks, self.device = options, ranks, device
        self.head, self.plan = dict(head), plan
        self.rows: list[dict[str, Any]] = []
        self._write = write

    @property
    def cuda(self) -> bool:
        """Whether ranks run on GPUs."""
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """bfloat16 on a GPU, float32 on a CPU."""
        return precision_of(self.device)

    def add(self, name: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Run a row on all ranks, keep it, and return it.

        Args:
            name: printed before it runs; its seconds follow.
            run: makes the row.
        """
        began = time.perf_counter()
        if self._write:
            print(f"{name} ...", end="", flush=True)
        row = run()
        self.rows.append(row)
        if self._write:
            print(f" {time.perf_counter() - began:.1f} s", flush=True)
            self._write(self.rows)
        return row


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A measured.py: the sizes that it takes, what runs, and what it writes.

    Attributes:
        file: its ``__file__``.
        about: its docstring.
        sizes: name, default without a GPU, default with one, and what it is; None: the name says it.
        shown: names of sizes that measured.json keeps.
        run: measures rows, on every rank.
        page: the text of measured.md, from what measured.json holds; some rows may be missing.
        key: of the rows in measured.json.
        plan: what is made before the ranks meet, as simulated ranks cannot be made after that; None: nothing.
    """

    file: str
    about: str | None
    sizes: Sequence[tuple[str, int, int, str | None]]
    shown: Sequence[str]
    run: Callable[[Notes], None]
    page: Callable[[Found], str]
    key: str = "rows"
    plan: Callable[[argparse.Namespace], Any] | None = None

    def options(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """Return the sizes of a command line; None: the process's."""
        big = torch.cuda.is_available()
        made = argparse.ArgumentParser(prog="measured.py", description=self.about)
        made.add_argument("--output", type=Path, default=Path(self.file).parent / "results")
        for name, small, large, meaning in self.sizes:
            made.add_argument(f"--{name}", type=int, default=large if big else small, help=meaning)
        return made.parse_args(argv)

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Measure on this rank; rank 0 writes measured.json and measured.md, and prints the page.

        Returns:
            0.
        """
        options = self.options(argv)
        plan = self.plan(options) if self.plan else None
        with start() as process:
            found = self.take(options, process.world_size, torch.device(process.device), plan, writes=process.rank == 0)
        if process.rank == 0:
            print(self.page(found).split("-->")[1])
        return 0

    def take(
        self,
        options: argparse.Namespace,
        ranks: int,
        device: torch.device,
        plan: Any = None,
        *,
        writes: bool = False,
    ) -> dict[str, Any]:
        """Measure all rows on ranks that have met, and return what measured.json holds.

        Args:
            options: made by :meth:`options`.
            ranks: how many there are.
            device: of this rank.
            plan: what ``plan`` made of the options.
            writes: whether this rank writes to the options' folder.
        """

        def write(rows: list[dict[str, Any]]) -> None:
            publish({**notes.head, self.key: rows, "cut": True}, self.page, options.output)

        sizes = {name: getattr(options, name) for name in self.shown}
        head = {"ranks": ranks, **surroundings(device), **sizes}
        notes = Notes(options, ranks, device, head, plan, write if writes else None)
        self.run(notes)
        found = {**notes.head, self.key: notes.rows}
        if writes:
            publish(found, self.page, options.output)
        return found


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


def largest_of_ranks(number: float, group: Group, device: torch.device) -> float:
    """Return the largest number of all ranks."""
    return float(all_reduce(torch.tensor([number], dtype=torch.float64, device=device), group, op="max"))


def precision_of(device: torch.device) -> torch.dtype:
    """bfloat16 on a GPU, float32 on a CPU."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def surroundings(device: torch.device) -> dict[str, Any]:
    """What the numbers were measured on."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "kind": str(precision_of(device)).removeprefix("torch."),
        "torch": str(torch.__version__),
        "cores": os.cpu_count(),
    }


def publish(found: Found, page: Callable[[Found], str], folder: Path) -> None:
    """Write measured.json and measured.md; ``cut`` among the numbers says that rows are missing."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(rounded(found), indent=1, ensure_ascii=False)
    (folder / "measured.json").write_text(text + "\n", encoding="utf-8")
    said = page(found) + (f"\n{CUT}\n" if found.get("cut") else "")
    (folder / "measured.md").write_text(said, encoding="utf-8")


def shared_cores(found: Found) -> list[str]:
    """A sentence where times say nothing: more ranks than cores."""
    if found["device"] == "CPU" and found["ranks"] > (found["cores"] or 1):
        return [f"{found['ranks']} ranks shared {found['cores']} cores: times say nothing."]
    return []
