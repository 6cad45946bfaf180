"""The demo: a small GPT learns to write Python, split over a 2D mesh, and is compared with one process.

The text is the source of Python's standard library, which every machine has, as bytes. With 8 GPUs each rank has one. With 4 to 7
only the tensor part runs, on 4 of them. With fewer, 8 processes share the CPU.

When a demo ends it lists its files with sizes and times. The next demo in that folder removes only these files. A file that is not
listed, or has changed since, belongs to something else, such as a run that resumed from the checkpoint.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshfold.checkpoint.files import write_atomically
from meshfold.train.loop import open_inputs, train
from meshfold.train.metrics import read_metrics
from meshfold.train.plots import can_plot, plot_loss
from meshfold.train.progress import Progress
from meshfold.train.settings import TrainSettings

TENSOR = dict(mode="2d", size=4)
MAX_BYTES = 16 * 2**20
# Excluded: packages that pip installed there, tests, and tables of data.
EXCLUDE = ("site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data")


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Hardware and spec of a demo.

    Attributes:
        parallel: the spec.
        device: for all ranks.
        why: reason in words.
    """

    parallel: dict[str, Any]
    device: str
    why: str

    @property
    def ranks(self) -> int:
        """Processes to start."""
        return 4 * int(self.parallel.get("data", 1))


def scene(gpus: int) -> Scene:
    """Return the scene for a machine with this many GPUs."""
    whole = dict(data=2, tensor=TENSOR)
    if gpus >= 8:
        return Scene(parallel=whole, device="cuda", why=f"{gpus} GPUs: one for each of 8 ranks, over NCCL")
    if gpus >= 4:
        return Scene(
            parallel=dict(tensor=TENSOR),
            device="cuda",
            why=f"{gpus} GPUs: the tensor part alone, on 4, over NCCL",
        )
    found = "no GPU" if gpus == 0 else f"{gpus} GPU{'s' if gpus > 1 else ''}, fewer than the 4 it takes"
    return Scene(parallel=whole, device="cpu", why=f"{found}: 8 processes share the CPU, over gloo")


def settings(here: Scene, out: str, *, steps: int, sample_tokens: int) -> TrainSettings:
    """Return the settings of the demo's run."""
    return TrainSettings(
        data=sysconfig.get_path("stdlib"),
        out=out,
        extensions=(".py",),
        exclude=EXCLUDE,
        max_bytes=MAX_BYTES,
        parallel=here.parallel,
        device=here.device,
        model="gpt-small",
        # Found by trial: in the given time, this model and these short sequences learn the most.
        changes=dict(hidden=128, layers=2, heads=4, max_positions=64),
        steps=steps,
        batch_size=64,
        seq_len=64,
        lr=3e-3,
        warmup=min(20, steps // 4),
        eval_every=-(-steps // 4),
        eval_batches=min(8, steps),
        prompt="def ",
        sample_tokens=sample_tokens,
    )


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Losses of the parallel and the serial model in the same steps."""

    steps: tuple[int, ...]
    parallel: tuple[float, ...]
    serial: tuple[float, ...]

    @property
    def largest_difference(self) -> float:
        """Over all steps."""
        return max(abs(a - b) for a, b in zip(self.parallel, self.serial, strict=True))

    def __str__(self) -> str:
        return (
            f"loss after {self.steps[-1]} steps: {self.parallel[-1]:.6f} in parallel, {self.serial[-1]:.6f} on one "
            f"process; largest difference in these {len(self.steps)} steps {self.largest_difference:.1e}"
        )


def compare_with_serial(parallel: TrainSettings, steps: int) -> Comparison:
    """Repeat the first steps in this process, with the same seed and data, and draw both curves."""
    alone = replace(
        parallel,
        parallel={},
        out=str(Path(parallel.out) / "serial"),
        stop_after=steps,
        eval_every=0,
        prompt=None,
    )
    progress = Progress()
    # The parallel run has filled the token cache.
    inputs = open_inputs(parallel, progress)
    serial = {row["step"]: row["loss"] for row in train(alone, inputs, progress) if "loss" in row}
    rows = read_metrics(parallel.metrics)
    curves = {
        name: [(row["step"], row[key]) for row in rows if key in row]
        for name, key in (("parallel", "loss"), ("validation", "validation_loss"))
    }
    if can_plot():
        title = "The demo: a small GPT on the standard library's source"
        plot_loss(Path(parallel.out) / "loss.png", {**curves, "serial": list(serial.items())}, title)
    split = dict(curves["parallel"])
    common = tuple(step for step in serial if step in split)
    return Comparison(
        steps=common,
        parallel=tuple(split[step] for step in common),
        serial=tuple(serial[step] for step in common),
    )


FILE_LIST = ".demo.json"
WRITTEN = ("checkpoint", "serial", "metrics.jsonl", "settings.json", "loss.png", "sample.txt")
"""Files and folders that a demo writes, except the tokens, which the next demo reuses"""


def list_files(out: Path) -> None:
    """List the files that this demo has made."""
    if not out.is_dir():
        return
    listed = {_name(path, out): _seen(path) for path in _there(out) if not _is_folder(path)}
    write_atomically(out / FILE_LIST, lambda part: part.write_text(json.dumps(listed, indent=1)))


def foreign_files(out: Path) -> list[Path]:
    """Return the files in a demo's folder that no demo has written, or that have changed since."""
    listed = _listed(out)
    return [path for path in _there(out) if not _is_folder(path) and listed.get(_name(path, out)) != _seen(path)]


def remove_files(out: Path) -> None:
    """Remove the files that an earlier demo listed, and folders that this leaves empty."""
    listed = _listed(out)
    for path in reversed([*_there(out)]):  # contents before their folder
        if not _is_folder(path):
            if listed.get(_name(path, out)) == _seen(path):
                path.unlink()
        elif not any(path.iterdir()):
            path.rmdir()


def _listed(out: Path) -> dict[str, list[int]]:
    try:
        found = json.loads((out / FILE_LIST).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _there(out: Path) -> Iterator[Path]:
    """Yield the files and folders that a demo writes, each folder before its contents."""
    for name in WRITTEN:
        path = out / name
        if path.is_symlink() or path.exists():
            yield path
        if _is_folder(path):
            yield from path.rglob("*")


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _name(path: Path, out: Path) -> str:
    return path.relative_to(out).as_posix()


def _seen(path: Path) -> list[int]:
    """Return size, time and inode, which change when a file is written again."""
    status = path.lstat()
    return [status.st_size, status.st_mtime_ns, status.st_ino]
