"""Stacks of layers under modes of tensor parallelism, run for real: speed, bytes sent and bytes held beside those of the trace.

The ``measured.py`` of an experiment is what :func:`stacks` returns. The trace is made before the ranks meet.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from experiments.measuring import Measured, Notes, largest_of_ranks, median, shared_cores
from experiments.report import markdown
from experiments.sequence_parallelism.bert import Stack
from experiments.tensor_layers import Grid, Size, hold, largest_batch, memory, trace
from meshfold.mesh import Mesh, record
from meshfold.mesh.model_io import LiveBytes
from meshfold.tensor_parallel import MODES, parallelize

PAGE = """<!-- made from measured.json by run.py --measure; edit neither -->

# {title}

{ranks} ranks on {device}, {kind}; {layers} layers of {hidden} with {heads} heads, {batch} sequences of {sequence} tokens, every
layer recomputed, forward and backward, median of {repeats}. *Sent* and *held*: by a rank in a step, measured and traced. *Largest
batch*: in {cap} GB, from what is held with {batch} sequences and half as many. *Off by*: from the output of one rank with the same
weights, dropout off, relative to its largest element.

{table}

{verdict}
"""


def grids(ranks: int, modes: Sequence[str]) -> list[Grid]:
    """Every grid of these modes with so many ranks whose sides are equal; depth is as it must be."""
    found = []
    for mode in modes:
        axes = MODES[mode].axes
        free = [axis for axis in axes if axis != "depth"]
        for side in range(1 if "depth" in axes else 2, ranks + 1):
            depth, left = divmod(ranks, side ** len(free))
            if left == 0 and (depth > 1 if "depth" in axes else depth == 1):
                found.append(Grid(mode=mode, sizes=tuple(depth if axis == "depth" else side for axis in axes)))
    return found


SIZES = (
    ("layers", 2, 24, "of the stack"),
    ("hidden", 64, 2048, "channels"),
    ("heads", 8, 32, "of attention"),
    ("sequence", 32, 512, "tokens"),
    ("batch", 8, 64, "sequences of all ranks"),
    ("half", 0, 1, "1: bfloat16, 0: float32"),
    ("cap", 1, 16, "GB of a device, for the largest batch"),
    ("repeats", 3, 7, "of every time"),
)
"""On GPUs by default those of Optimus' code."""


def stacks(file: str, about: str | None, modes: Sequence[str], title: str, large: Mapping[str, int] = {}) -> Measured:
    """Return a measured.py of stacks under modes.

    Args:
        file: its ``__file__``.
        about: its docstring.
        modes: of tensor parallelism; the first is what the others are compared with.
        title: of its page.
        large: sizes on GPUs, in place of those of Optimus' code.
    """

    def planned(options: argparse.Namespace) -> list[tuple[Grid, dict[str, float]]]:
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        return [(grid, plan(grid, options)) for grid in grids(ranks, modes)]

    def measure(notes: Notes) -> None:
        notes.head |= {"title": title, "kind": "bfloat16" if notes.options.half else "float32"}
        Measurement(notes).everything(notes.plan)

    return Measured(
        file=file,
        about=about,
        sizes=[(name, small, large.get(name, most), meaning) for name, small, most, meaning in SIZES],
        shown=("layers", "hidden", "heads", "sequence", "batch", "cap", "repeats"),
        plan=planned,
        run=measure,
        page=page,
    )


def size_of(options: argparse.Namespace) -> Size:
    """The layer."""
    precision = "bf16" if options.half else "fp32"
    shape = {name: getattr(options, name) for name in ("hidden", "heads", "sequence", "batch")}
    return Size(**shape, precision=precision)


def plan(grid: Grid, options: argparse.Namespace) -> dict[str, float]:
    """What the trace says: bytes that a rank sends and holds in a step, and the largest batch."""
    size = size_of(options)
    traced = trace(grid, size)
    return {
        "sent": options.layers * (2 * traced.moved("forward") + traced.moved("backward")),
        "held": memory(hold(grid, size), options.layers).total,
        "largest": largest_batch(grid, size, options.layers, options.cap * 1e9),
    }


class Measurement:
    """Grids of one stack, one after the other."""

    def __init__(self, notes: Notes) -> None:
        self.notes, self.options, self.device = notes, notes.options, notes.device
        self.dtype = torch.bfloat16 if notes.options.half else torch.float32
        self.world = Mesh({"data": notes.ranks})
        self.group = self.world.group("data")

    def everything(self, chosen: Sequence[tuple[Grid, Mapping[str, float]]]) -> None:
        """Measure every grid beside its plan."""
        for grid, planned in chosen:
            self.notes.add(grid.name, partial(self.one, grid, planned))
        self.world.close()

    def one(self, grid: Grid, planned: Mapping[str, float]) -> dict[str, Any]:
        """A grid: its time, what a rank sends and holds, and how far its output is off; beside what was planned."""
        o = self.options
        mesh = Mesh(grid.axes)
        torch.manual_seed(0)
        with self.device:  # on a GPU at once; every rank draws the same there
            stack = Stack(o.hidden, o.heads, o.layers).to(self.dtype)
        stack.flat_tokens = True  # type: ignore[assignment]
        few = torch.randn(grid.divisor() * o.sequence, o.hidden, device=self.device).to(self.dtype)
        wanted = self.output(stack, few)
        parallelize(stack, mesh, grid.mode)
        seen = self.output(stack, few)
        off = float((seen - wanted).abs().max() / wanted.abs().max())
        stack.train()
        del few, wanted, seen
        held = {rows: self.held(stack, self.step(stack, mesh, grid, rows)) for rows in (o.batch // 2, o.batch)}
        step = self.step(stack, mesh, grid, o.batch)
        with record() as log:
            step()
        seconds = median(step, o.repeats, self.group, self.device)
        mesh.close()
        low, high = held.values()
        slope = (high - low) / (o.batch - o.batch // 2)
        largest = int((o.cap * 1e9 - high) / slope + o.batch)
        return {
            "grid": grid.name,
            "seconds": seconds,
            "sent": sum(float(entry.bytes) for entry in log.entries),
            "held": largest_of_ranks(high, self.group, self.device),
            "largest": largest - largest % grid.divisor(),
            "off": largest_of_ranks(off, self.group, self.device),
            "planned": dict(planned),
        }

    def step(self, stack: Stack, mesh: Mesh, grid: Grid, rows: int) -> Callable[[], None]:
        """A forward and backward of this rank's blocks; gradients of parameters stay where they are."""
        o = self.options
        residual = MODES[grid.mode].layout("residual")
        shape = rows * o.sequence // mesh.size(*residual["m"]), o.hidden // mesh.size(*residual["h"])
        x = torch.randn(shape, device=self.device, dtype=self.dtype, requires_grad=True)
        dy = torch.randn(shape, device=self.device, dtype=self.dtype)

        def run() -> None:
            stack.zero_grad(set_to_none=False)
            x.grad = None
            y = x
            with set_checkpoint_early_stop(False):
                for layer in stack.layers:
                    y = checkpoint(layer, y, o.sequence, use_reentrant=False)
                y.backward(dy)

        return run

    def held(self, stack: Stack, step: Callable[[], None]) -> float:
        """Bytes of a step: the most that is alive, parameters and their gradients included."""
        step()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            step()
            torch.cuda.synchronize(self.device)
            return float(torch.cuda.max_memory_allocated(self.device))
        peaks = []
        for _ in range(3):  # the least: threads of gloo may release messages late
            with LiveBytes(base_bytes=2 * sum(parameter.nbytes for parameter in stack.parameters())) as alive:
                step()
                peaks.append(float(alive.take()[0]))
        return min(peaks)

    def output(self, stack: Stack, x: Tensor) -> Tensor:
        """``m h -> m h``, whole, without gradients and dropout."""
        with torch.no_grad():
            y: Tensor = stack.eval()(x, self.options.sequence)
        return y


def page(found: Mapping[str, Any]) -> str:
    """measured.md."""
    rows = [
        [
            row["grid"],
            f"{1e3 * row['seconds']:.1f}",
            f"{found['batch'] / row['seconds']:.2f}",
            *(f"{one[key] / 1e6:.2f}" for key in ("sent", "held") for one in (row, row["planned"])),
            *(f"{one['largest']:g}" for one in (row, row["planned"])),
            f"{row['off']:.0e}",
        ]
        for row in found["rows"]
    ]
    head = [
        "grid",
        "ms",
        "sequences/s",
        "sent, MB",
        "traced",
        "held, MB",
        "traced",
        "largest batch",
        "traced",
        "off by",
    ]
    return PAGE.format(**{**found, "rows": "", "table": markdown(head, rows), "verdict": said(found)})


def said(found: Mapping[str, Any]) -> str:
    """What the numbers say."""
    first, *others = found["rows"]
    parts = [
        f"{row['grid']} is {first['seconds'] / row['seconds']:.2f} times as fast as {first['grid']}, its largest batch "
        f"{row['largest'] / max(1, first['largest']):.1f} times as large."
        for row in others
    ]
    sent = all(row["sent"] == row["planned"]["sent"] for row in found["rows"])
    parts.append(
        "A rank sends what the trace says, to the byte." if sent else "A rank does not send what the trace says."
    )
    off = max(abs(row["held"] / row["planned"]["held"] - 1) for row in found["rows"])
    parts.append(
        f"What it holds is within {off:.1%} of the trace. Outputs are at most {max(row['off'] for row in found['rows']):.0e} off."
    )
    return " ".join([*parts, *shared_cores(found)])
