"""Lower bound on a family's seconds, before its layout is traced: from a single rank's operators and its modes' least messages."""

from __future__ import annotations

import math

from meshfold.mesh import LayoutError, Mesh
from meshfold.planner.suggestions.layouts import Family
from meshfold.planner.suggestions.part_clock import Clock
from meshfold.planner.suggestions.profile import Profile
from meshfold.planner.suggestions.stages import stage_blocks
from meshfold.tensor_parallel import find_mode, matmul_cost

_SURE = 0.92
"""Share of a single rank's operators, and of all messages, that every layout has: some fuse, or share, a little more."""


class Bound:
    """Bounds for one model, batch and machine."""

    def __init__(self, serial: Profile, clock: Clock, ranks: int, seq_len: int) -> None:
        """Args:
        serial: the profile of a single rank.
        clock: of the model, batch and machine.
        ranks: world size.
        seq_len: tokens of a sequence.
        """
        self.clock, self.ranks, self.blocks = clock, ranks, serial.shape.blocks
        rows = clock.batch_size
        self.block, rest = (
            sum(clock.seconds_of(part, rows, phase).in_turn for phase in ("forward", "backward"))
            for part in (serial.block, serial.rest)
        )
        self.tokens, self.shape = rows * seq_len, serial.shape
        # A layout that splits the vocabulary may keep logits that a single rank computes twice.
        rate = clock.machine.efficiency.matmuls * clock.machine.flops[clock.precision]
        self.rest = min(rest, 6 * self.shape.head * self.tokens / rate)
        self.stream = serial.block.at(rows, lambda step: step.stream)  # bytes of the whole batch
        self.width = 2 if clock.precision in ("bf16", "fp16") else 4 if clock.precision == "fp32" else 8

    def seconds(self, family: Family) -> float:
        """Return the least seconds of a step."""
        messages = self.blocks / family.stages * (self._tensor(family) + self._sequence(family))
        return max(_SURE * (self._compute(family.stages) + messages), self._gradients(family))

    def _gradients(self, family: Family) -> float:
        """Return the seconds of summing gradients and gathering parameters once over the data ranks, in two bytes an element."""
        spec = family.spec
        ranks = round(self._rows(family))
        if ranks == 1 or spec.expert is not None:
            return 0.0
        held = self.shape.parameters / (self.ranks / ranks)
        axes = tuple(
            axis for axis, size in spec.axes.items() if axis in ("data", "seq", "ring", "ulysses") and size > 1
        )
        return _SURE * 2 * 2 * held * (ranks - 1) / ranks / self.clock.rate(spec, axes)

    def _compute(self, stages: int) -> float:
        """Return the seconds of the busiest rank: stages have whole blocks, and the last one the head."""
        shape, best = self.shape, math.inf
        for chunks in (1, 2, 4):
            if chunks * stages <= shape.blocks:
                work = [n * self.block for n in stage_blocks(shape, chunks * stages)]
                work[-1] += self.rest
                ranks = [sum(work[rank::stages]) for rank in range(stages)]
                if chunks == 2:  # or V-shaped stages
                    turned = [work[rank] + work[-1 - rank] for rank in range(stages)]
                    ranks = min(ranks, turned, key=max)
                best = min(best, max(ranks))
        return best / (self.ranks / stages)

    def _rows(self, family: Family) -> float:
        """Return the number of ranks that share the batch by rows or tokens."""
        spec = family.spec
        return family.data * (1 if spec.sequence is None else spec.sequence.size)

    def _sequence(self, family: Family) -> float:
        """Return the seconds of a block's messages over sequence axes: of queries and outputs, or of keys and values in a ring."""
        spec, sequence = family.spec, family.spec.sequence
        if sequence is None or sequence.mode == "megatron":
            return 0.0
        tensor = 1 if spec.tensor is None else spec.tensor.size
        local = self.stream / self._rows(family) / tensor
        inner = sequence.size if sequence.mode == "ulysses" else sequence.ulysses or 1
        ring, seconds = sequence.size // inner, 0.0
        if inner > 1:
            axis = "seq" if ring == 1 else "ulysses"
            seconds += 4 * (inner - 1) / inner * local / self.clock.rate(spec, (axis,))
        if ring > 1:
            axis = "seq" if inner == 1 else "ring"
            seconds += 4 * (ring - 1) * self.shape.key_values * local / self.clock.rate(spec, (axis,))
        return seconds

    def _tensor(self, family: Family) -> float:
        """Return the seconds of a block's messages over tensor axes."""
        spec, tensor = family.spec, family.spec.tensor
        if tensor is None or tensor.size == 1:
            return 0.0
        split = self.shape.split_parts
        if tensor.mode == "1d":
            # Two sums of the stream for attention, unless that is by tokens, and two for an MLP.
            sums = 2 * (split if tensor.attention is None else split - 1)
            sent = 2 * (tensor.size - 1) / tensor.size * sums * self.stream / self._rows(family)
            return sent / self.clock.rate(spec, ("tensor",))
        hidden = max(1, round(self.stream / self.tokens / self.width))
        side = math.prod(tensor.sizes)
        sizes = dict(m=-(-round(self.tokens / self._rows(family)) // side) * side, k=hidden, n=hidden)
        plans, mesh = find_mode(tensor.mode_name).plans, Mesh(tensor.axes, rank=0)
        try:
            costs = [matmul_cost(plans[role], sizes, mesh, itemsize=self.width) for role in ("column", "row")]
        except LayoutError:  # the engine reports it later
            return 0.0
        return split * sum(float(e.bytes) / self.clock.rate(spec, e.axes) for cost in costs for e in cost.entries)
