"""Bytes that an element of a model takes: its parameter, master weight, optimizer state and gradient, and what a step moves."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Regime:
    """Bytes per element: stored, and of host memory traffic in an optimizer step."""

    name: str
    parameter: float
    """the plane the GPU computes with: ``hi`` of the split master."""
    state: float
    """everything else: ``lo`` and the moments."""
    gradient: float
    step: float
    """read and written by one pass that does the whole step."""
    first_pass: float
    """read and written by a pass that writes only the new master."""
    second_pass: float
    """read and written by the pass that writes the moments afterwards."""
    overwritten: float = 0.0
    """also read by a pass into a shadow copy: its old values, which caches load before they are overwritten."""
    disk_reads: int = 1
    """times that a step reads state on disk; it writes it once."""
    ours: bool = True
    """kernels of ours step, each chunk by itself; else torch, all chunks together unless it steps them during the backward."""

    @property
    def out_of_place(self) -> float:
        """Bytes read and written by one pass that does the whole step into a shadow copy."""
        return self.step + self.overwritten

    @classmethod
    def of(
        cls,
        state: str,
        dtype: torch.dtype,
        master_dtype: torch.dtype,
        *,
        accumulation: int,
        ranks: int,
        moments: float = 2,
        ours: bool = True,
        disk_reads: int = 1,
    ) -> Regime:
        """Return the bytes that an element of a model takes.

        Our Adam keeps two numbers an element beside a float32 master weight. Everything else is stepped by torch, which keeps
        all numbers in the master weights' dtype.

        Args:
            state: how our Adam keeps its state for a bfloat16 model: ``"A"``, ``"B"`` or ``"C"``.
            dtype: of the parameters that the model computes with.
            master_dtype: of the master weights.
            accumulation: micro-steps of an optimizer step.
            ranks: that share a chunk.
            moments: numbers that the optimizer keeps for an element; Adam keeps two.
            ours: an optimizer with two numbers is our Adam, if master weights are in float32.
            disk_reads: times that a step reads state on disk.
        """
        gradient = gradient_dtype(dtype, master_dtype, accumulation=accumulation, ranks=ranks).itemsize
        if ours and moments == 2 and master_dtype == torch.float32:
            return REGIMES[_OF_DTYPE.get(dtype, state)].with_gradient(gradient)
        width, master = dtype.itemsize, master_dtype.itemsize
        kept = master * (moments + (master != width))
        step = gradient + 2 * (width + kept)  # reads everything, writes everything but the gradient
        return cls(
            name=f"{moments:.4g} moments",
            parameter=width,
            state=kept,
            gradient=gradient,
            step=step,
            first_pass=step,
            second_pass=0,
            disk_reads=disk_reads,
            ours=False,
        )

    def with_gradient(self, gradient: float) -> Regime:
        """Return this regime with gradients of so many bytes, each read once in a pass."""
        more = gradient - self.gradient
        return replace(
            self,
            gradient=gradient,
            step=self.step + more,
            first_pass=self.first_pass + more,
            second_pass=self.second_pass + more,
        )


REGIMES = {
    "A": Regime(name="A", parameter=2, state=10, gradient=2, step=26, first_pass=18, second_pass=18),
    "B": Regime(name="B", parameter=2, state=6, gradient=2, step=18, first_pass=14, second_pass=10),
    # two 8-bit moments, each with an fp32 scale per 256 elements: 2 + 8/256
    "C": Regime(
        name="C",
        parameter=2,
        state=4.03125,
        gradient=2,
        step=14.0625,
        first_pass=12.03125,
        second_pass=6.0625,
        overwritten=6.03125,
    ),
    # a full fp32 master weight in addition to the fp16 parameter, which a step only writes
    "fp16": Regime(name="fp16", parameter=2, state=12, gradient=2, step=28, first_pass=20, second_pass=18),
    # the parameter is its own master
    "fp32": Regime(name="fp32", parameter=4, state=8, gradient=4, step=28, first_pass=20, second_pass=20),
}
"""A: exact split master, fp32 moments (12 B). B: bf16 moments (8 B). C: 8-bit moments (6.03 B). fp16: 14 B. fp32: 12 B."""
_OF_DTYPE = {torch.float32: "fp32", torch.float16: "fp16"}


def gradient_dtype(dtype: torch.dtype, master_dtype: torch.dtype, *, accumulation: int, ranks: int) -> torch.dtype:
    """Return the dtype in which gradients are summed: the masters', unless there is nothing to sum."""
    return dtype if accumulation == 1 and ranks == 1 else master_dtype
