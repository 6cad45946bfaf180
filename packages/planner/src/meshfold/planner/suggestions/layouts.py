"""All ways to split a model that a spec allows: families first (which ranks share what), then each family's settings."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from meshfold.mesh import MeshfoldError, ParallelSpec
from meshfold.mesh.spec import ExpertSpec, PipelineSpec, SequenceSpec, TensorSpec, ZeroSpec, divisors

_CHUNKS = (2, 4)
_SCHEDULES = ("1f1b", "zb-h1", "zb-h2", "zb-v", "dualpipe-v", "gpipe")


@dataclass(frozen=True, kw_only=True)
class Family:
    """Specs that split the model over the same ranks in the same way.

    Attributes:
        spec: data, pipeline (1F1B), sequence, tensor and expert; no ``zero``.
    """

    spec: ParallelSpec

    @property
    def data(self) -> int:
        """Ranks along the axis data."""
        return self.spec.axes["data"]

    @property
    def stages(self) -> int:
        """Ranks along the axis of the pipeline."""
        return 1 if self.spec.pipeline is None else self.spec.pipeline.size

    @property
    def layout(self) -> ParallelSpec:
        """The spec whose micro-step shows the costs of the whole family: without stages; without data unless experts use it."""
        data = self.data if self.spec.expert is not None else 1
        return replace(self.spec, pipeline=None, data=data, written="")

    @property
    def entries(self) -> int:
        """Number of entries that split something: a spec with fewer is simpler."""
        spec = self.spec
        given = (spec.pipeline, spec.sequence, spec.tensor, spec.expert)
        return (spec.data != 1) + sum(entry is not None for entry in given)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One spec with the settings of the train step that belong to it.

    Attributes:
        family: to which it belongs.
        spec: the whole spec.
        recompute: as for the engine.
        accumulate: micro-steps of an optimizer step.
    """

    family: Family
    spec: ParallelSpec
    recompute: str | None = None
    accumulate: int = 1

    @property
    def microbatches(self) -> int:
        """Parts in which a data rank's rows pass through the model in an optimizer step."""
        pipeline = self.spec.pipeline
        return self.accumulate if pipeline is None else pipeline.microbatches or pipeline.size

    @property
    def complexity(self) -> tuple[int, int, int]:
        """Sort key among equally fast candidates: fewer entries, no recomputation, fewer micro-steps."""
        return (
            self.family.entries + (self.spec.zero is not None),
            (None, "auto", "but-attention", "blocks").index(self.recompute),
            self.microbatches,
        )


def families(
    ranks: int, batch_size: int, seq_len: int, *, blocks: int, heads: int | None, experts: int
) -> list[Family]:
    """Return all families of a number of ranks, those with fewer entries first.

    Families that cannot be fastest are left out: of the 2D, 2.5D and 3D grids of a size, all but the most even one.

    Args:
        ranks: world size.
        batch_size: sequences of a global batch.
        seq_len: tokens of a sequence.
        blocks: of the model; a stage has one at least.
        heads: of attention, if known; the engine checks the divisibility of everything else.
        experts: of a layer; 0 for a model without.
    """
    found: dict[str, Family] = {}
    for tensor, megatron in _tensors(ranks, heads):
        for sequence in _sequences(ranks // _size(tensor), seq_len, heads, tensor, megatron=megatron):
            split = _size(tensor) * _size(sequence)
            for stages in divisors(ranks // split):
                data = ranks // split // stages
                if stages > blocks or batch_size % data or (stages > 1 and batch_size // data == 1):
                    continue
                pipeline = None if stages == 1 else PipelineSpec(size=stages)
                for size in _experts(experts, ranks // stages):
                    spec = ParallelSpec(
                        data=data,
                        pipeline=pipeline,
                        sequence=sequence,
                        tensor=tensor,
                        expert=None if size == 1 else ExpertSpec(size=size),
                    )
                    if _is_valid(spec, ranks):
                        found[str(spec.to_dict())] = Family(spec=spec)
    return sorted(found.values(), key=lambda family: (family.entries, -family.data, str(family.spec.to_dict())))


def _is_valid(spec: ParallelSpec, ranks: int) -> bool:
    """Return True if the spec's own checks accept it."""
    written = spec.to_dict()
    if spec.data == 1:
        written.pop("data")
    try:
        return ParallelSpec.parse(written, ranks).world_size == ranks
    except MeshfoldError:
        return False


def _size(entry: TensorSpec | SequenceSpec | None) -> int:
    return 1 if entry is None else entry.size


def _tensors(ranks: int, heads: int | None) -> Iterator[tuple[TensorSpec | None, bool]]:
    """Yield the tensor entries, and whether the sequence is split over the same axis."""
    yield None, False
    for size in divisors(ranks)[1:]:
        if heads is None or heads % size == 0:
            yield TensorSpec(mode="1d", sizes=(size,)), False
            yield TensorSpec(mode="1d", sizes=(size,)), True
            yield TensorSpec(mode="1d", sizes=(size,), attention="tokens"), False
        root = math.isqrt(size)
        rows = max(side for side in divisors(size) if side <= root)
        if rows > 1:
            yield TensorSpec(mode="2d", sizes=(rows, size // rows)), False
        for depth in divisors(size)[1:]:
            side = math.isqrt(size // depth)
            if side > 1 and depth * side * side == size and depth <= side:
                yield TensorSpec(mode="2.5d", sizes=(depth, side, side)), False
        side = round(size ** (1 / 3))
        if side > 1 and side**3 == size:
            yield TensorSpec(mode="3d", sizes=(side, side, side)), False


def _sequences(
    ranks: int, seq_len: int, heads: int | None, tensor: TensorSpec | None, *, megatron: bool
) -> Iterator[SequenceSpec | None]:
    if megatron:
        yield SequenceSpec(mode="megatron")
        return
    yield None
    if tensor is not None and tensor.attention is not None:
        return
    for size in divisors(ranks)[1:]:
        if seq_len % (2 * size) == 0:
            yield SequenceSpec(mode="ring", size=size)
        if seq_len % size == 0 and (heads is None or heads % (size * _size(tensor)) == 0):
            yield SequenceSpec(mode="ulysses", size=size)
        for inner in divisors(size)[1:-1]:
            if seq_len % (2 * size) == 0 and (heads is None or heads % (inner * _size(tensor)) == 0):
                yield SequenceSpec(mode="ring_ulysses", size=size, ulysses=inner)


def _experts(experts: int, ranks: int) -> list[int]:
    """Return sizes of the entry expert; 1: none."""
    return [1] if experts == 0 else [size for size in divisors(ranks) if experts % size == 0]


def candidates(family: Family, batch_size: int, *, blocks: int) -> Iterator[Candidate]:
    """Yield every candidate of a family.

    Micro-steps with a pipeline are left out: its micro-batches do the same.

    Args:
        family: with a data axis that divides the batch.
        batch_size: sequences of a global batch.
        blocks: of the model.
    """
    rows, spec = batch_size // family.data, family.spec
    zeros: list[ZeroSpec | None] = [None, *(ZeroSpec(stage=stage) for stage in (1, 2, 3))]
    pipelines: list[tuple[PipelineSpec | None, int]] = (
        [(None, count) for count in divisors(rows)]
        if family.stages == 1
        else [(pipeline, 1) for pipeline in _pipelines(family.stages, rows, blocks)]
    )
    for zero in zeros:
        for recompute in (None, "blocks", *(["auto"] if zero is not None else [])):
            for pipeline, accumulate in pipelines:
                yield Candidate(
                    family=family,
                    spec=replace(spec, pipeline=pipeline, zero=zero),
                    recompute=recompute,
                    accumulate=accumulate,
                )


def _pipelines(stages: int, rows: int, blocks: int) -> Iterator[PipelineSpec]:
    for count in divisors(rows):
        if count < min(stages, rows):
            continue
        for schedule in _SCHEDULES:
            chunks = 2 if schedule in ("zb-v", "dualpipe-v") else 1
            if chunks * stages <= blocks and (schedule != "dualpipe-v" or count >= 2 * stages):
                yield PipelineSpec(size=stages, schedule=schedule, microbatches=count, chunks=chunks)
        for chunks in _CHUNKS:
            if chunks * stages <= blocks:
                yield PipelineSpec(size=stages, schedule="interleaved", microbatches=count, chunks=chunks)
        if 2 * stages <= blocks:
            yield PipelineSpec(size=stages, schedule="hanayo", microbatches=count, chunks=2, waves=1)
