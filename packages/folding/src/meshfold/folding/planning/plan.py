"""The plan of a stack's memory: what is alive at the peak, and the chunks and recomputation that fit in the least time.

The stack runs on meta tensors, forward and backward, with one block and with two. So every tensor counts that the code makes,
under any layout; a deeper stack is as many times the difference larger.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from meshfold.folding.axial.modes import AxialMode, find_axial_mode
from meshfold.folding.axial.sizes import Sizes
from meshfold.folding.memory.parts import counting_some_parts
from meshfold.folding.memory.settings import MemorySettings
from meshfold.folding.planning.count import LiveTensor, LiveTensors, sum_by_name
from meshfold.folding.planning.run import FoldingRun
from meshfold.folding.stack import Stack
from meshfold.kernels import count_kernels
from meshfold.mesh import MeshfoldError, MetaMesh
from meshfold.mesh.spec import format_bytes, parse_bytes

_LINE_OF_GPU = 512  # bytes that the CUDA allocator rounds to
WORKSPACE_BYTES = 34 << 20
"""Bytes that cuBLAS keeps on a GPU: a workspace of 32 MiB on an H100, and a little (measured: 33.01 MiB above the tensors)."""


class MemoryPlanError(MeshfoldError):
    """No chunks and no recomputation fit: the message names the largest tensor and what would help.

    Attributes:
        least: bytes of a device that would do.
        fixed: bytes among them of weights and what else is on a device.
        ranks: how many ranks would do, up to eight times as many; None: no such number.
        residues: about so many would fit; 0: none.
    """

    def __init__(
        self, message: str, *, least: int = 0, fixed: int = 0, ranks: int | None = None, residues: int = 0
    ) -> None:
        super().__init__(message)
        self.least, self.fixed, self.ranks, self.residues = least, fixed, ranks, residues


@dataclass(frozen=True, kw_only=True)
class MemoryCount:
    """Memory of a stack under settings.

    Attributes:
        settings: chunks and recomputation.
        peak: bytes of tensors that are alive at once, inputs and outputs too, weights and their gradients not.
        tensors: those of a stack of at most two blocks at its peak.
        block: bytes that each further block adds.
    """

    settings: MemorySettings
    peak: int
    tensors: tuple[LiveTensor, ...]
    block: int

    @property
    def largest(self) -> LiveTensor:
        """The largest tensor at the peak."""
        return max(self.tensors, key=lambda tensor: tensor.bytes)


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """A choice of chunks and recomputation; ``print`` it for a table.

    Attributes:
        run: what it is for.
        count: of what was chosen.
        no_blocks: blocks of the stack.
        weights: bytes of weights, and of their gradients in training.
        other_bytes: of what else is on a device, the workspace of cuBLAS too.
        limit: bytes of a device; None: no limit.
        tried: every candidate that was counted.
        after_bytes: of tensors after the stack, such as those of a structure module.
    """

    run: FoldingRun
    count: MemoryCount
    no_blocks: int
    weights: int
    other_bytes: int
    limit: int | None
    tried: tuple[MemoryCount, ...] = ()
    after_bytes: int = 0

    @property
    def settings(self) -> MemorySettings:
        """The chosen settings: pass them to :func:`.parallelize_folding` as ``memory``."""
        return self.count.settings

    @property
    def bytes(self) -> int:
        """All bytes of a device."""
        return max(self.count.peak, self.after_bytes) + self.weights + self.other_bytes

    @property
    def fits(self) -> bool:
        """True if that is within the limit."""
        return self.limit is None or self.bytes <= self.limit

    def __str__(self) -> str:
        sizes, count = self.run.sizes, self.count
        does = "forward and backward" if self.run.training else "inference"
        room = "" if self.limit is None else f" of {format_bytes(self.limit)}"
        lines = [
            f"{sizes.residues} residues, {sizes.sequences} sequences, {self.no_blocks} blocks, {self.run.ranks}, {does}",
            f"{'fits' if self.fits else 'does NOT fit'} with {self.settings}: {format_bytes(self.bytes)}{room}",
            f"{'weights and gradients' if self.run.training else 'weights':<40}{format_bytes(self.weights):>12}",
        ]
        if self.after_bytes > count.peak:
            lines.append(f"{'tensors after the stack, its peak':<40}{format_bytes(self.after_bytes):>12}")
        if self.other_bytes:
            lines.append(f"{'other':<40}{format_bytes(self.other_bytes):>12}")
        kept = count.block * max(self.no_blocks - 2, 0)
        if kept:
            lines.append(f"{f'kept of {self.no_blocks - 2} more blocks':<40}{format_bytes(kept):>12}")
        rows = sum_by_name(count.tensors)
        lines += [f"{f'{name} ({number})':<40}{format_bytes(total):>12}" for name, number, total in rows[:6]]
        rest = sum(total for _, _, total in rows[6:])
        if rest:
            lines.append(f"{'what is smaller':<40}{format_bytes(rest):>12}")
        return "\n".join(lines)


def plan_memory(
    stack: Stack,
    *,
    residues: int,
    sequences: int = 1,
    batch: int = 1,
    templates: int = 1,
    mode: str | AxialMode = "dap",
    axes: Mapping[str, int] | None = None,
    limit: int | str | None = None,
    training: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    other_bytes: int = 0,
    kernels: bool = True,
) -> MemoryPlan:
    """Choose chunks and recomputation for a stack, before anything runs: the least time that fits.

    Args:
        stack: such as an ``EvoformerStack``, on any device, the meta device too. Training mode counts its dropout.
        residues: tokens of a chain, without padding.
        sequences: of the MSA.
        batch: samples.
        templates: of each sample.
        mode: of the axial layout.
        axes: its axes with their sizes, such as ``dict(axial=2)``; None: one rank.
        limit: bytes of a device, or a text such as ``"80GiB"``; None: no limit, so that nothing is chunked or recomputed.
        training: forward and backward; else forward under ``torch.no_grad()``.
        dtype: of tensors and weights.
        other_bytes: of what else is on a device, such as the state of an optimizer.
        kernels: count what a GPU runs; False: what a CPU runs.

    Raises:
        MemoryPlanError: if nothing fits.
    """
    limit = parse_bytes(limit) if isinstance(limit, str) else limit
    sizes = Sizes(residues=residues, sequences=sequences, batch=batch, templates=templates, itemsize=dtype.itemsize)
    found = find_axial_mode(mode)
    run = FoldingRun(sizes=sizes, mode=found, axes=_axes(found, axes), training=training, dtype=dtype, kernels=kernels)
    plan = find_plan(stack, run, limit=limit, other_bytes=other_bytes)
    if not plan.fits:
        assert limit is not None
        raise _refusal(stack, run, plan.tried, plan.weights + plan.other_bytes, limit)
    return plan


def find_plan(stack: Stack, run: FoldingRun, *, limit: int | None = None, other_bytes: int = 0) -> MemoryPlan:
    """Return the plan of the first candidate that fits, or if none does, of the one with the least memory.

    Arguments are those of :func:`plan_memory`.
    """
    weights = _weight_bytes(stack, run)
    other_bytes += _workspace_bytes(run)
    room = None if limit is None else limit - weights - other_bytes
    chosen, tried = _first_that_fits(stack, run, room)
    return MemoryPlan(
        run=run,
        count=chosen or min(tried, key=lambda count: count.peak),
        no_blocks=len(stack.blocks),
        weights=weights,
        other_bytes=other_bytes,
        limit=limit,
        tried=tuple(tried),
    )


def _first_that_fits(stack: Stack, run: FoldingRun, room: int | None) -> tuple[MemoryCount | None, list[MemoryCount]]:
    """Return the first candidate whose tensors fit into ``room`` bytes, and every one that was counted."""
    given = list(candidates(stack, run))
    counted = {settings: count_memory(stack, run, settings) for settings in given[:1]}
    if room is not None and counted[given[0]].peak > room:
        counted[given[-1]] = count_memory(stack, run, given[-1])  # the leanest: if it does not fit, none does
        if counted[given[-1]].peak > room:
            return None, list(counted.values())
    for settings in given:
        count = counted[settings] if settings in counted else count_memory(stack, run, settings)
        counted[settings] = count
        if room is None or count.peak <= room:
            return count, list(counted.values())
    return None, list(counted.values())


def choose_settings(stack: Stack, run: FoldingRun, limit: int) -> MemorySettings:
    """Return the first candidate whose tensors, weights apart, fit.

    Raises:
        MemoryPlanError: if none does.
    """
    chosen, tried = _first_that_fits(stack, run, limit)
    if chosen is None:
        raise _refusal(stack, run, tried, 0, limit)
    return chosen.settings


def candidates(stack: Stack, run: FoldingRun) -> Iterator[MemorySettings]:
    """Yield settings in the order of their time; chunks are shares of this rank's largest block."""
    block = _largest_block(stack, run)
    chunks = [max(int(share * block), 1) for share in (2, 0.5, 0.125)]
    yield MemorySettings()
    if not run.training:
        yield from (MemorySettings(chunk_bytes=chunk) for chunk in chunks)
        return
    yield MemorySettings(recompute="updates")
    yield MemorySettings(recompute="blocks")
    for recompute in ("updates", "both"):
        yield from (MemorySettings(chunk_bytes=chunk, recompute=recompute) for chunk in chunks)


def leanest(stack: Stack, run: FoldingRun) -> MemorySettings:
    """Return the candidate with the least memory."""
    return list(candidates(stack, run))[-1]


def longest_chain(
    stack: Stack, *, limit: int, sequences: int = 1, other_bytes: int = 0, step: int = 16, **run: Any
) -> int:
    """Return the most residues, a multiple of ``step``, that fit with the smallest chunks and full recomputation; 0: none.

    Arguments are those of :func:`plan_memory`.
    """
    found = find_axial_mode(run.pop("mode", "dap"))
    axes, dtype = _axes(found, run.pop("axes", None)), run.pop("dtype", torch.bfloat16)
    kept = {name: run.pop(name) for name in ("training", "kernels") if name in run}
    given = FoldingRun(
        sizes=Sizes(residues=step, sequences=sequences, itemsize=dtype.itemsize, **run),
        mode=found,
        axes=axes,
        dtype=dtype,
        **kept,
    )
    room = limit - _weight_bytes(stack, given) - _workspace_bytes(given) - other_bytes

    def need(residues: int) -> int:
        one = replace(given, sizes=replace(given.sizes, residues=residues))
        return count_memory(stack, one, leanest(stack, one)).peak

    least, most = 0, 0  # in steps: fits, does not fit
    guess = 64
    while not most or most - least > 1:
        needed = need(guess * step)
        if needed <= room:
            least = guess
        else:
            most = guess
        # Memory is between linear and square in the residues.
        guess = int(guess * (max(room, 1) / needed) ** 0.5)
        guess = max(guess, least + 1)
        if most:
            guess = min(guess, most - 1)
    return least * step


def count_memory(stack: Stack, run: FoldingRun, settings: MemorySettings) -> MemoryCount:
    """Count the memory of a stack under settings, on meta tensors."""
    blocks = len(stack.blocks)
    runs = [_run(stack, number, run, settings) for number in range(1, min(blocks, 2) + 1)]
    peak = runs[-1].take()[0]
    block = peak - runs[0].take()[0] if blocks > 1 else 0
    return MemoryCount(settings=settings, peak=peak + max(blocks - 2, 0) * block, tensors=runs[-1].at_peak, block=block)


def _run(stack: Stack, blocks: int, run: FoldingRun, settings: MemorySettings) -> LiveTensors:
    with _disable_current_modes(), ExitStack() as context:
        model = run.skeleton(stack, blocks, settings)
        live = LiveTensors(model, round_bytes=_LINE_OF_GPU if run.kernels else 1, gloo=not run.kernels)
        context.enter_context(counting_some_parts())
        context.enter_context(live)
        if run.kernels:
            context.enter_context(count_kernels(live.as_one))
        run.step(model, live.named)
    return live


def _axes(mode: AxialMode, axes: Mapping[str, int] | None) -> Mapping[str, int]:
    return dict.fromkeys(mode.axes, 1) if axes is None else dict(axes)


def _weight_bytes(stack: Stack, run: FoldingRun) -> int:
    count = sum(parameter.numel() for parameter in stack.parameters())
    return count * run.dtype.itemsize * (2 if run.training else 1)


def _workspace_bytes(run: FoldingRun) -> int:
    return WORKSPACE_BYTES if run.kernels else 0


def _largest_block(stack: Stack, run: FoldingRun) -> int:
    """Return the bytes of this rank's block of the largest input."""
    ranks = MetaMesh(run.axes).world_size
    largest = max(torch.Size(shape).numel() for shape in stack.shapes(run.sizes)[0].values())
    return -(-largest // ranks) * run.dtype.itemsize


def _refusal(stack: Stack, run: FoldingRun, tried: Sequence[MemoryCount], fixed: int, limit: int) -> MemoryPlanError:
    least = min(tried, key=lambda count: count.peak)
    sizes, largest = run.sizes, least.largest
    depth = f" with {sizes.sequences} sequences" if sizes.sequences > 1 else ""
    words = (
        f"{sizes.residues} residues{depth} do not fit into {format_bytes(limit)} over {run.ranks}: "
        f"{least.settings} need least, {format_bytes(least.peak + fixed)}, and the largest tensor is {largest}, "
        f"{format_bytes(largest.bytes)}."
    )
    told: dict[str, Any] = dict(least=least.peak + fixed, fixed=fixed)
    axis = run.mode.axes[-1]
    for times in (2, 4, 8) if fixed < limit else ():
        axes = {**run.axes, axis: times * run.axes.get(axis, 1)}
        more = replace(run, axes=axes)
        needed = count_memory(stack, more, leanest(stack, more)).peak + fixed
        if needed <= limit:
            ranks = MetaMesh(axes).world_size
            return MemoryPlanError(f"{words} Over {more.ranks} it fits: {format_bytes(needed)}.", ranks=ranks, **told)
    shorter = int(sizes.residues * (max(limit - fixed, 0) / least.peak) ** 0.5) // 16 * 16
    if shorter:
        advice = f"Give fewer residues, about {shorter}{', or fewer sequences' if depth else ''}."
    elif fixed >= limit:
        advice = f"Weights and what else is on a device take {format_bytes(fixed)}: give a larger limit."
    else:
        advice = "Give a larger limit."
    return MemoryPlanError(f"{words} {advice}", residues=shorter, **told)
