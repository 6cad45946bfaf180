"""``meshfold reproduce tensor-parallel-volume``: what each mode sends, published and counted."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that this file runs on its own, too

import torch

from experiments.report import parser, with_results
from experiments.tensor_parallel_volume import counting, plots, tables
from experiments.tensor_parallel_volume.checks import Check, checks
from experiments.tensor_parallel_volume.config import (
    RANKS,
    Config,
    cuboid,
    isoefficiency_meshes,
    isoefficiency_sizes,
    meshes,
    side,
)
from experiments.tensor_parallel_volume.records import Record, Results

FOLDER = Path(__file__).resolve().parent


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiment.

    Returns:
        0 if every check gave its verdict, 1 if one did not, or a count differs from its plan.
    """
    options = _options(argv)
    folder: Path = options.output
    try:
        if not options.render:
            folder.mkdir(parents=True, exist_ok=True)
            results = count(configuration(options.max_ranks), progress=True)
            results.save(folder / "counts.json")
        found = render(Results.load(folder / "counts.json"), folder, plot=not options.no_plots)
    except (counting.CountError, OSError) as error:
        said = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else error
        print(f"meshfold reproduce tensor-parallel-volume: {said}", file=sys.stderr)
        return 1
    for check in found:
        print(f"{check.said.strip('*'):<34} {check.claim}")
        for case in check.failed:
            print(f"{'':<34}   not in: {case}", file=sys.stderr)
    print(f"\nTable: {folder / 'table.md'}")
    return 1 if any(check.failed for check in found) else 0


def configuration(max_ranks: int) -> Config:
    """The settings for meshes up to a size; the isoefficiency fit goes further, where it may."""
    return Config(max_ranks=max_ranks, isoefficiency_max_ranks=min(4096, max(512, 8 * max_ranks)))


def count(config: Config, *, progress: bool = False) -> Results:
    """Count everything, on simulated ranks.

    Raises:
        CountError: if the recorder saw anything but what the plan says.
    """
    started = time.perf_counter()
    records: list[Record] = []
    before = ""
    for record in counting.run(_jobs(config)):
        stage = f"isoefficiency of {record.mode}" if record.what == "isoefficiency" else record.mode
        if progress and stage != before:
            print(f"[{time.perf_counter() - started:5.1f} s] counting {stage}", flush=True)
            before = stage
        records.append(record)
    machine = {
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "devices": "a fake back end with meta tensors",
        "seconds": round(time.perf_counter() - started, 1),
    }
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    return Results(machine=machine, versions=versions, config=config, records=tuple(records))


def render(results: Results, folder: Path, *, plot: bool = True) -> list[Check]:
    """Write table.md and the plots; in the experiment's own folder, the README's part too."""
    found = checks(results)
    (folder / "table.md").write_text(tables.page(results), encoding="utf-8")
    if folder.resolve() == FOLDER / "results":
        readme = FOLDER / "README.md"
        text = with_results(readme.read_text(encoding="utf-8"), tables.checks_table(found))
        readme.write_text(text, encoding="utf-8")
    if plot:
        try:
            plots.draw(results, folder)
        except ImportError:
            print("no plots: matplotlib is missing; pip install 'meshfold[plot]'", file=sys.stderr)
    return found


def _jobs(config: Config) -> Iterator[counting.Job]:
    """Every count, those on the same mesh one after the other."""
    sizes = {name: getattr(config, name) for name in ("hidden", "heads", "batch", "sequence")}
    for mode, axes in meshes(config):
        for (shape, shaped), role, keep in product(config.shapes.items(), ("column", "row"), (False, True)):
            yield counting.linear(mode, axes, role, shape, shaped, keep=keep)
        for recompute in (True, False):
            yield counting.layer(mode, axes, recompute=recompute, **sizes)
        if mode == "2d" and side(axes):
            yield counting.layer(mode, axes, recompute=True, lowering="stream", **sizes)
    squares = [cuboid(1, side(axes)) for mode, axes in meshes(config) if mode == "2d" and side(axes)]
    for axes in squares + [axes for mode, axes in meshes(config) if mode == "2.5d"]:
        yield counting.tesseract(axes, "square", config.shapes["square"])
    for mode, axes in isoefficiency_meshes(config):
        for times, lowering in product((1, 2), ("gather", "stream") if mode == "2d" else ("gather",)):
            yield counting.layer(
                mode,
                axes,
                what="isoefficiency",
                shape=str(times),
                recompute=True,
                lowering=lowering,
                **isoefficiency_sizes(config, times),
            )


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    made = parser(
        "tensor-parallel-volume",
        "Count what 1d, 1d+sequence, 2d, 2.5d and 3d tensor parallelism send, beside the papers' formulas.",
        FOLDER,
    )
    made.add_argument("--max-ranks", type=int, choices=RANKS[1:], default=RANKS[-1], help="largest mesh (default 512)")
    return made.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
