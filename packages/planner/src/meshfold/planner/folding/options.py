"""The choice for each number of residues and of GPUs: a layout, chunks and recomputation that fit, in the least time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from meshfold.engine.precision import Precision
from meshfold.folding import FoldingOutline, FoldingRun, MemoryPlan, Sizes, count_work, find_axial_mode, find_plan
from meshfold.mesh import Mesh, SpecError
from meshfold.mesh.recording import moved_bytes
from meshfold.planner.clock import Work, optimizer_seconds
from meshfold.planner.estimates import Memory, Times
from meshfold.planner.machines import Machine


@dataclass(frozen=True, kw_only=True)
class FoldingOption:
    """The best layout for a number of residues and of GPUs.

    Attributes:
        residues: numbers of tokens of a chain.
        gpus: ranks that share pairs.
        plan: its layout, settings and memory; if none fits, of the layout that needs the least memory.
        times: of a step; None if it does not fit.
    """

    residues: int
    gpus: int
    plan: MemoryPlan
    times: Times | None

    @property
    def fits(self) -> bool:
        """True if its memory is within the limit."""
        return self.plan.fits

    @property
    def seconds(self) -> float:
        """Seconds of a step; infinite if it does not fit."""
        return float("inf") if self.times is None else self.times.overlapped

    @property
    def stack_limit(self) -> int:
        """Bytes that the tensors of the stack may have: the limit without weights and what else is on a GPU."""
        limit = self.plan.bytes if self.plan.limit is None else self.plan.limit
        return limit - self.plan.weights - self.plan.other_bytes


@dataclass(frozen=True, kw_only=True)
class FoldingTable:
    """Options of a folding model.

    Attributes:
        outline: the model.
        machine: its memory is the limit.
        sequences: of the MSA.
        batch: proteins of a step.
        precision: of tensors and weights.
        training: forward, backward and the step of an optimizer; else inference.
        options: by residues, then GPUs.
    """

    outline: FoldingOutline
    machine: Machine
    sequences: int
    batch: int
    precision: str
    training: bool
    options: tuple[FoldingOption, ...]


def plan_folding(
    outline: FoldingOutline,
    machine: Machine,
    *,
    residues: Sequence[int],
    gpus: Sequence[int],
    sequences: int | None = None,
    batch: int = 1,
    precision: str = "bf16",
    training: bool = False,
    optimizer: str = "adamw",
    on_option: Callable[[FoldingOption], None] | None = None,
) -> FoldingTable:
    """Choose layout, chunks and recomputation for each number of residues and of GPUs, before anything runs.

    Time is that of the planner's clock: operators by roofline, collectives by the links that they cross. It is of the stack alone:
    one pass, or forward, backward and the step of the optimizer.

    Args:
        outline: the model, see :func:`meshfold.folding.find_outline`.
        machine: its GPUs and links.
        residues: numbers of tokens of a chain.
        gpus: numbers of ranks that share a protein.
        sequences: of the MSA; None: the model's.
        batch: proteins of a step.
        precision: ``"bf16"``, ``"fp32"`` ...; in training masters are in float32.
        training: plan a step of training; else a pass without gradients.
        optimizer: of training.
        on_option: called with each option as soon as it is known.

    Raises:
        SpecError: for more GPUs than residues.
    """
    if max(gpus) > min(residues):
        raise SpecError(f"{max(gpus)} GPUs for {min(residues)} residues: rows of pairs are split, so give fewer GPUs")
    outline.stack.train(training)
    dtype = Precision.parse(precision).dtype
    count = sequences or outline.sequences
    options = []
    for length in residues:
        for ranks in gpus:
            sizes = Sizes(residues=length, sequences=count, batch=batch, itemsize=dtype.itemsize)
            option = _best(outline, machine, sizes, ranks, precision, dtype, optimizer if training else None)
            options.append(option)
            if on_option is not None:
                on_option(option)
    return FoldingTable(
        outline=outline,
        machine=machine,
        sequences=count,
        batch=batch,
        precision=precision,
        training=training,
        options=tuple(options),
    )


def layouts(gpus: int) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield the axial mode and the axes of each layout: ``dap``, and grids of more than one row and column.

    >>> list(layouts(4))
    [('dap', {'axial': 4}), ('grid', {'row': 2, 'col': 2})]
    """
    yield "dap", {"axial": gpus}
    for rows in range(2, gpus // 2 + 1):
        if gpus % rows == 0:
            yield "grid", {"row": rows, "col": gpus // rows}


def _best(
    outline: FoldingOutline,
    machine: Machine,
    sizes: Sizes,
    gpus: int,
    precision: str,
    dtype: torch.dtype,
    optimizer: str | None,
) -> FoldingOption:
    found = []
    for mode, axes in layouts(gpus):
        run = FoldingRun(
            sizes=sizes, mode=find_axial_mode(mode), axes=axes, training=optimizer is not None, dtype=dtype
        )
        state, update = _optimizer_bytes(outline, dtype, optimizer)
        beside = outline.beside(sizes.residues, gpus, dtype.itemsize) + state
        plan = find_plan(outline.stack, run, limit=int(machine.memory), other_bytes=beside)
        times = _times(outline, plan, machine, precision, update) if plan.fits else None
        found.append(FoldingOption(residues=sizes.residues, gpus=gpus, plan=plan, times=times))
    return min(found, key=lambda option: (option.seconds, option.plan.bytes))


def _optimizer_bytes(outline: FoldingOutline, dtype: torch.dtype, optimizer: str | None) -> tuple[int, int]:
    """Return the bytes of an optimizer without weights and gradients of ``dtype``, and those that its step reads and writes."""
    if optimizer is None:
        return 0, 0
    weights = [torch.empty_like(weight, dtype=dtype, device="meta") for weight in outline.stack.parameters()]
    wide = torch.promote_types(dtype, torch.float32)
    masters = weights if wide == dtype else [torch.empty_like(weight, dtype=wide) for weight in weights]
    memory = Memory.without_zero(weights, masters, optimizer)
    return memory.total - 2 * memory.parameters, memory.update_bytes(clip=True)


def _times(outline: FoldingOutline, plan: MemoryPlan, machine: Machine, precision: str, update: int) -> Times:
    """Return the seconds of a plan: operators, collectives of its layout, the sum of gradients, and the optimizer."""
    work = count_work(outline.stack, plan.run, plan.settings)
    mesh = Mesh(plan.run.axes, rank=0)
    tensor = sum(
        count * (machine.latency + float(entry.bytes) / machine.slowest(mesh, entry.axes))
        for entry, count in work.collectives.items()
    )
    data = 0.0
    if plan.run.training and mesh.world_size > 1:  # every weight sees blocks only
        sent = float(moved_bytes("all_reduce", plan.weights // 2, mesh.world_size))
        data = machine.latency + sent / machine.slowest(mesh, mesh.names)
    return Times(
        compute=Work(operators=dict(work.operators)).seconds(machine, precision),
        tensor=tensor,
        data=data,
        optimizer=optimizer_seconds(update, machine),
    )
