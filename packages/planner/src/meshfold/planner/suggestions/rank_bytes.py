"""Bytes that the fullest rank of a candidate holds, by the formulas of a full plan."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from meshfold.planner.estimates import Memory
from meshfold.planner.suggestions.layouts import Candidate
from meshfold.planner.suggestions.profile import Profile
from meshfold.planner.suggestions.stages import live_microbatches, rank_of, stage_blocks
from meshfold.zero_gemini.planner import Regime


def outer_axes(axes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the axes over which gradients are summed: those of data and of the sequence."""
    return tuple(axis for axis, size in axes.items() if axis in ("data", "seq", "ring", "ulysses") and size > 1)


class RankBytes:
    """One candidate's bytes.

    Attributes:
        axes: of the spec's mesh.
        micro: micro-batches, or micro-steps, of an optimizer step.
        rows: sequences of each.
        counts: blocks of each stage.
        of_ranks: blocks of each rank of the pipeline.
        outer: axes over which gradients are summed.
        ranks: number of ranks along ``outer``.
        regime: bytes that an element takes under ``zero``.
        repeated: share of blocks that compute their activations again.
        kept: bytes that a block keeps for its backward.
        stream: bytes of a block's input.
    """

    def __init__(
        self,
        candidate: Candidate,
        profile: Profile,
        *,
        batch_size: int,
        regime: Regime,
        clips: bool,
        limit: float,
        workspace: int,
    ) -> None:
        """Args:
        candidate: the spec.
        profile: of its layout.
        batch_size: sequences of a global batch.
        regime: bytes an element.
        clips: gradients are held until all have arrived.
        limit: bytes of a device.
        workspace: bytes of libraries there.
        """
        self.candidate, self.profile, self.regime, self.clips = candidate, profile, regime, clips
        self.workspace = workspace
        spec, self.shape = candidate.spec, profile.shape
        self.spec, self.pipeline, self.zero = spec, spec.pipeline, spec.zero
        self.stages, self.micro = candidate.family.stages, candidate.microbatches
        self.rows = batch_size / candidate.family.data / self.micro
        chunks = 1 if self.pipeline is None else self.pipeline.chunks or 1
        self.counts = stage_blocks(self.shape, self.stages * chunks)
        self.of_ranks = [0] * self.stages
        for stage, count in enumerate(self.counts):
            self.of_ranks[rank_of(stage, self.stages, self.pipeline)] += count
        self._last = rank_of(len(self.counts) - 1, self.stages, self.pipeline)
        # The fullest rank is the first one, that of the last stage, or the one with most blocks.
        self._looked_at = {0, self._last, self.of_ranks.index(max(self.of_ranks))}
        self.axes = spec.axes
        self.outer = outer_axes(self.axes)
        self.ranks = math.prod(self.axes[axis] for axis in self.outer)
        self.alive = profile.alive(self.rows)
        self.kept, self.stream = self.alive.kept, self.alive.stream
        self.repeated = 0.0 if candidate.recompute is None else 1.0
        if candidate.recompute == "auto":
            self.repeated = self._share_to_repeat(limit)

    def elements(self, held: Memory) -> float:
        """Return the elements of the parameters that a rank holds without ``zero``."""
        return held.parameters / self.regime.parameter

    def held(self) -> Memory:
        """Return the memory of the fullest rank's parameters and their state, without ``zero``."""
        rest, whole, block = self.profile.rest.memory, self.profile.memory(0), self.profile.block.memory
        if self.stages == 1:
            return self.profile.memory(self.of_ranks[0])
        _, count, edge = max(
            (count * block.total + self._edge(rank) * rest.total, count, self._edge(rank))
            for rank, count in enumerate(self.of_ranks)
        )
        scaled = {
            name: round(count * getattr(block, name) + edge * getattr(whole, name))
            for name in ("parameters", "masters", "gradients", "optimizer")
        }
        return Memory(**scaled, activations=0)

    def total(self, live: Sequence[float] | None = None) -> tuple[float, float]:
        """Return the bytes on the fullest device with all state on it, and how many of them can move to its host.

        Args:
            live: pairs of stage and micro-batch that each rank of the pipeline holds at most; None: by the kind of schedule.
        """
        if self.zero is None:
            held = self.held()
            early = held.gradients * (
                self.micro > 1 or self.stages > 1
            )  # gradients of the first micro-step are there when the next begins
            alive = (self._alive(rank, live, self.repeated) for rank in self._looked_at)
            most = max(max(early + max(inside, outside), held.gradients + inside / 2) for inside, outside in alive)
            return held.total - held.gradients + most + self.workspace, 0.0
        return max(self._with_zero(rank, live) for rank in self._looked_at)

    def _edge(self, rank: int) -> float:
        """Return a rank's share of the parameters outside blocks: embeddings in the first stage, the head in the last."""
        total = self.shape.embedded + self.shape.head
        share = self.shape.embedded / total if total else 0.0
        return (share if rank == 0 else 0.0) + ((1 - share) if rank == self._last else 0.0)

    def _at_once(self, rank: int, live: Sequence[float] | None) -> float:
        """Return the most micro-batches that a rank holds at once, over all its stages."""
        if self.pipeline is None or self.stages == 1:
            return 1.0
        if live is not None:
            return live[rank] / (len(self.counts) / self.stages)
        most = live_microbatches(self.pipeline, self.micro)
        turns = self.pipeline.schedule in ("1f1b", "zb-h1", "interleaved")
        return min(most, max(1.0, self.stages - rank)) if turns and self.micro > 1 else most

    def _of_block(self, repeated: float) -> float:
        """Return the bytes that a block keeps until its backward."""
        return (1 - repeated) * self.kept + repeated * self.stream

    def _alive(self, rank: int, live: Sequence[float] | None, repeated: float) -> tuple[float, float]:
        """Return the most bytes alive while a block computes, and while the rest of the model does."""
        count, of_block = self.of_ranks[rank], self._of_block(repeated)
        inside, outside = self.alive.inside, self.alive.outside
        others = (self._at_once(rank, live) - 1) * (count * of_block + self.alive.rest * (rank == self._last))
        if rank != self._last:
            outside = 0.0
        return (
            inside + (count - 1) * of_block + others,
            outside and outside + count * of_block - self.kept + others,
        )

    def _with_zero(self, rank: int, live: Sequence[float] | None, repeated: float | None = None) -> tuple[float, float]:
        """Return a rank's bytes under ``zero``, and how many of them can move to the host."""
        assert self.zero is not None
        repeated = self.repeated if repeated is None else repeated
        regime, stage = self.regime, self.zero.stage
        block, edge = self.profile.block.elements, self._edge(rank) * self.profile.rest.elements
        elements = self.of_ranks[rank] * block + (edge if self.stages > 1 else self.profile.rest.elements)
        head = self.shape.head / max(1, self.shape.head + self.shape.embedded) * self.profile.rest.elements
        shard, spread = elements / self.ranks, self.ranks > 1
        parameters = regime.parameter * (elements if stage < 3 else shard)
        state = regime.state * shard
        whole = (self.stages > 1 and spread) or (stage == 1 and self.micro > 1)
        gradients = regime.gradient * (elements if whole else shard)
        early = self.micro > 1 or self.stages > 1  # gradients of a first micro-step are there when the next begins
        late = early or self.clips
        inside, outside = self._alive(rank, live, repeated)
        gathered = regime.parameter * (stage == 3) * spread
        passing = regime.gradient * (not whole) * (spread or not late)
        most = max(
            inside + gathered * 2 * block + passing * 2 * block + gradients * early,
            outside + gathered * head + gradients * early,
            gradients * late + (gathered + passing) * 2 * block + self.alive.inside / 2,
        )
        fixed = parameters + state + self.workspace
        return fixed + most, parameters + state + gradients * late

    def _share_to_repeat(self, limit: float) -> float:
        """Return the share of blocks that must recompute their activations for the plan to fit."""
        without, with_all = (
            max(self._with_zero(rank, None, repeated)[0] if self.zero is not None else 0.0 for rank in self._looked_at)
            for repeated in (0.0, 1.0)
        )
        over = without - limit
        return min(1.0, max(0.0, over / (without - with_all))) if without > with_all else 0.0
