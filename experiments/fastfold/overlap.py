"""A block on the clock: its operators by the planner's roofline, its collectives beside them as the code starts and awaits them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from experiments.fastfold.settings import Phase, inputs, rank_of
from meshfold.folding import sum_gradients
from meshfold.kernels import count_kernels, use
from meshfold.mesh import Mesh, moved_bytes
from meshfold.mesh.model_io import DryRun, Operator, OperatorCounter
from meshfold.planner import Machine, find_machine
from meshfold.planner.clock import Work

MACHINE = "a100x8"
PRECISION = "bf16"
KINDS = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}


class Timeline(OperatorCounter):
    """Two clocks, of the device's operators and of its link: a collective begins when both are free, and a wait is for its end.

    Attributes:
        now: seconds, of the operators.
        link: seconds at which the link is free.
        sent: seconds that the link worked.
    """

    def __init__(self, machine: Machine, mesh: Mesh, *, overlaps: bool) -> None:
        """Args:
        machine: rates.
        mesh: of the ranks.
        overlaps: operators run beside a collective; else each is waited for where it begins.
        """
        super().__init__()
        self._machine, self._overlaps = machine, overlaps
        self._rate = machine.slowest(mesh, tuple(mesh.axes)) if mesh.world_size > 1 else 1.0
        self._ranks = mesh.world_size
        self.now = self.link = self.sent = 0.0
        self._ends: dict[int, float] = {}  # by storage of what a collective returns
        self._keep: list[Tensor] = []  # so that no address is used twice

    def note(self, operator: Operator) -> None:
        """Let the device run an operator."""
        super().note(operator)
        self.now += Work(operators={operator: 1}).seconds(self._machine, PRECISION)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func._schema.name
        if not name.startswith("_c10d_functional::"):
            return super().__torch_dispatch__(func, types, args, kwargs)
        made = func(*args, **(kwargs or {}))
        if name.endswith("::wait_tensor"):
            self.now = max(self.now, self._ends.get(_address(args[0]), 0.0))
        else:
            self._send(name.partition("::")[2], args[0], made)
        return made

    def _send(self, kind: str, given: Tensor, made: Tensor) -> None:
        block = max(given.nbytes, made.nbytes)
        kind = KINDS.get(kind, kind)
        seconds = self._machine.latency + float(moved_bytes(kind, block, self._ranks)) / self._rate  # type: ignore[arg-type]
        self.sent += seconds
        self.link = max(self.now, self.link) + seconds
        self._ends[_address(made)] = self.link
        self._keep.append(made)
        if not self._overlaps:
            self.now = self.link


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def everything(phases: Sequence[Phase], ranks: Sequence[int]) -> list[dict[str, Any]]:
    """A row for each phase and number of ranks: seconds of a block, forward, backward and the sum of gradients."""
    return [
        {"phase": phase.name, "N": n, **block_seconds(n, phase.sequences, phase.residues)}
        for phase in phases
        for n in ranks
    ]


def block_seconds(ranks: int, sequences: int, residues: int) -> dict[str, float]:
    """Seconds of a block with waits where its code has them, with a wait at once, and of the link alone."""
    found = {}
    for name, overlaps in (("async", True), ("sync", False)):
        with rank_of(ranks) as (block, mesh):
            timeline = Timeline(find_machine(MACHINE), mesh, overlaps=overlaps)
            with use("triton"), DryRun() as run, run.counting(timeline), count_kernels(timeline.as_one):
                out = block(*inputs(ranks, sequences, residues))
                torch.autograd.backward(out, [torch.empty_like(y) for y in out])
                sum_gradients(block)
            found[name] = max(timeline.now, timeline.link)
            found["link"] = timeline.sent
    return found
