"""Work of one training step: chunks in order of use, layers whose activations may be kept, memory at every timestep.

A *timestep* is a place in the recorded order of operations: ``0 … forward_timesteps-1`` in the forward, the rest in the
backward. A trace on the device or on meta writes a Workload.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from meshfold.mesh import SpecError, with_old_names
from meshfold.mesh.model_io import ATTENTION_OF
from meshfold.zero_gemini.planner.options import NONE, STRATEGIES
from meshfold.zero_gemini.planner.rates import Machine
from meshfold.zero_gemini.planner.regimes import Regime
from meshfold.zero_gemini.prefetch import reach, ready_from


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkCost:
    """A chunk: its size and when it is used.

    Raises:
        SpecError: for invalid sizes or timesteps.
    """

    name: str
    elems: int
    """elements of this rank's shard."""
    gathered_elems: int
    """elements of the whole chunk: ``elems`` times the data ranks."""
    forward: tuple[int, int]
    """first and last timestep of use in the forward, inclusive."""
    backward: tuple[int, int]
    """first and last timestep of use in the backward, inclusive; its gradient is complete after the last."""
    forward_seconds: float
    """seconds of GPU compute in the forward with this chunk."""
    backward_seconds: float
    """the same in the backward, without any recompute."""
    trainable: bool = True
    """False: no gradient and no optimizer state."""
    fp8: int = 0
    """different operands in fp8 that forward and backward read of it, each gathered in a byte an element from a shard on the GPU;
    0: it is gathered as it is."""
    channel: str = ""
    """the group whose push channel carries its gathers and reductions; empty: the process group does."""
    visits: tuple[tuple[int, int], ...] | None = None
    """runs of timesteps, first and last, in which it is used, in order; None: ``forward`` and ``backward``. They say when it is
    gathered; ``forward`` and ``backward`` span them, and have a place for a chunk that is not used there at all."""
    gradient_from: int | None = None
    """timestep of the backward in which its gradient is begun; None: the first of ``backward``."""
    reduced_in: int | None = None
    """timestep of the backward in which its gradient is complete and those of all chunks that are reduced before it; None: the
    last of ``backward``."""

    def __post_init__(self) -> None:
        if not 0 < self.elems <= self.gathered_elems:
            raise SpecError(
                f"chunk {self.name!r}: elems={self.elems}, gathered_elems={self.gathered_elems}: "
                "a shard has at least one element and no more than the chunk"
            )
        (first, last), (start, end) = self.forward, self.backward
        if not 0 <= first <= last < start <= end:
            raise SpecError(f"chunk {self.name!r}: forward={self.forward}, backward={self.backward} must be in order")
        if self.gradient_from is not None and not start <= self.gradient_from <= end:
            raise SpecError(
                f"chunk {self.name!r}: gradient_from={self.gradient_from} must be in backward={self.backward}"
            )
        if self.reduced_in is not None and self.reduced_in < end:
            raise SpecError(f"chunk {self.name!r}: reduced_in={self.reduced_in} is before the end of {self.backward}")
        if min(self.forward_seconds, self.backward_seconds) < 0:
            raise SpecError(f"chunk {self.name!r}: seconds below zero")
        last = -1
        for begin, stop in self.uses:
            if not last < begin <= stop:
                raise SpecError(f"chunk {self.name!r}: visits={self.visits} must be in order and apart")
            last = stop

    @property
    def uses(self) -> tuple[tuple[int, int], ...]:
        """Runs of timesteps, first and last, in which it is used."""
        return (self.forward, self.backward) if self.visits is None else self.visits


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """A layer whose activations are either kept or recomputed in the backward.

    A layer with attention may be two: the results of attention, called ``ATTENTION_OF`` and its name, are kept alone or with the
    rest of it, and the rest is not kept without them.
    """

    name: str
    kept_bytes: int
    """bytes that keeping adds to the non-model memory at all timesteps of ``first … last``; at ``first`` less ``counted_bytes``."""
    recompute_seconds: float
    """seconds of compute that keeping saves."""
    first: int
    """the timestep of its forward."""
    last: int
    """the last timestep before its backward: recomputed activations are in the non-model memory from there on."""
    counted_bytes: int = 0
    """of the kept bytes, those that are among the most alive at once at ``first`` without keeping."""
    own_bytes: int = 0
    """bytes that keeping adds at the timestep after that, on top of the bytes alive there before anything is recomputed."""


_OLD = {f"{kind}_moments": f"{kind}_timesteps" for kind in ("forward", "prefetch", "light", "drain")}


@with_old_names({"moments": "timesteps", **_OLD}, arguments=_OLD)
@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """One step of one rank.

    Raises:
        SpecError: for timesteps out of range, duplicate names, or no chunk.
    """

    name: str
    chunks: tuple[ChunkCost, ...]
    """in order of first use."""
    layers: tuple[Layer, ...] = ()
    non_model_bytes: tuple[int, ...]
    """peak bytes on the GPU at every timestep that are neither parameters, gradients nor optimizer state, nothing kept."""
    forward_timesteps: int
    """how many of the timesteps are in the forward."""
    tokens: int
    """tokens of this rank in a step."""
    regime: Regime
    recomputed: bool = False
    """blocks recompute their activations already, so the plan has nothing to switch."""
    clipping: bool
    """clip by the global norm, exactly: gradients are held until it is known."""
    clip_probability: float = 1.0
    """share of the steps whose clip factor is below 1; decides whether to step before the norm is known."""
    strategies: tuple[str, ...] | None = None
    """ways of clipping that may be planned, keys of ``STRATEGIES``; None: all that ``clipping`` allows."""
    stage: int = 3
    """of ZeRO: 1 and 2 keep whole parameters on the GPU."""
    accumulation: int = 1
    """micro-steps of a step; timesteps and the chunks' seconds are of one micro-step."""
    data_ranks: int = 1
    ranks_per_host: int = 1
    """ranks that share a host's memory, its bandwidth and its disk."""
    whole_gradients: bool = False
    """until the end of the step, gradients of whole chunks are kept where the state is, as a pipeline's micro-batches leave
    them; else gradients of shards."""
    timestep_seconds: tuple[float, ...] | None = None
    """seconds of GPU compute in every timestep, without any recompute; None: only those of the chunks are known."""
    prefetch_timesteps: int = 1
    """a streamed chunk is on the GPU this many timesteps before its use,"""
    light_timesteps: frozenset[int] = frozenset()
    """not counting these, in which next to nothing is computed (:mod:`meshfold.zero_gemini.prefetch`)."""
    ready: tuple[int, ...] | None = None
    """for every timestep the one from which on data used there is on the GPU; None: ``prefetch_timesteps`` before it."""
    shadow_copies: int | None = None
    """chunks, the first ones, whose state on the host has a shadow copy in a speculative step; the others are stepped once the norm
    is known. None: all have one."""
    in_order: bool = True
    """units run in the order of the timesteps, in every micro-step: those of a pipeline do not."""
    reshards: bool = True
    """a streamed chunk leaves the GPU between two uses; else it stays from its first to its last of a micro-step."""
    drain_timesteps: int = 1
    """a gradient leaves the GPU within this many timesteps after the chunk's backward; if ranks sum it, not counting light ones."""
    host_base_bytes: int = 0
    """host bytes that the process has besides."""
    disk_buffer_bytes: int = 2**28
    """host bytes for blocks in flight, as soon as anything lives on disk."""
    units: tuple[str, ...] = ()
    """name of the unit that runs in each timestep, for display; empty if unknown."""
    largest_output: str = ""
    """description of the largest output of a layer that a micro-step holds whole, for display; empty if unknown."""
    whole_logits: bool = False
    """that output is of a head, whose loss might be computed without it."""

    def __post_init__(self) -> None:
        timesteps = len(self.non_model_bytes)
        if not self.chunks:
            raise SpecError(f"workload {self.name!r} has no chunk: there is nothing to plan")
        if not 0 < self.forward_timesteps < timesteps:
            raise SpecError(
                f"workload {self.name!r}: forward_timesteps={self.forward_timesteps} of {timesteps} timesteps: both a forward "
                "and a backward need at least one"
            )
        if self.timestep_seconds is not None and (
            len(self.timestep_seconds) != timesteps or min(self.timestep_seconds) < 0
        ):
            raise SpecError(
                f"workload {self.name!r}: timestep_seconds has {len(self.timestep_seconds)} numbers, the least "
                f"{min(self.timestep_seconds, default=0.0)}: give one for each of the {timesteps} timesteps, none below zero"
            )
        if self.ready is not None and (
            list(self.ready) != sorted(self.ready)
            or len(self.ready) != timesteps
            or any(not 0 <= first <= t for t, first in enumerate(self.ready))
        ):
            raise SpecError(
                f"workload {self.name!r}: ready={self.ready}: give a timestep for each of the {timesteps}, none later than it nor "
                "before that of an earlier one"
            )
        for chunk in self.chunks:
            if chunk.forward[1] >= self.forward_timesteps or not self.forward_timesteps <= chunk.backward[0]:
                raise SpecError(f"chunk {chunk.name!r} is used in the wrong half of the step: {chunk}")
            if max(chunk.backward[1], chunk.reduced_in or 0) >= timesteps:
                raise SpecError(f"chunk {chunk.name!r} is used after the last timestep {timesteps - 1}: {chunk}")
        for layer in self.layers:
            if not (0 <= layer.first <= layer.last < timesteps and min(layer.kept_bytes, layer.recompute_seconds) >= 0):
                raise SpecError(f"layer {layer.name!r} does not lie in the {timesteps} timesteps of the step: {layer}")
        for things in (self.chunks, self.layers):
            names = [thing.name for thing in things]
            if len(set(names)) < len(names):
                raise SpecError(f"workload {self.name!r}: names must be unique, got {names}")
        if list(self.chunks) != sorted(self.chunks, key=lambda chunk: chunk.forward[0]):
            raise SpecError(f"workload {self.name!r}: chunks must be in order of first use")
        if not 0 <= self.clip_probability <= 1:
            raise SpecError(f"clip_probability={self.clip_probability}: give a fraction of the steps, from 0 to 1")
        if min(self.data_ranks - 1, self.prefetch_timesteps, self.drain_timesteps, self.tokens - 1) < 0:
            raise SpecError(f"workload {self.name!r}: data_ranks and tokens are at least 1, timesteps at least 0")

        if self.shadow_copies is not None and (self.clip_probability or not self.clipping):
            raise SpecError(
                f"workload {self.name!r}: shadow_copies={self.shadow_copies} is only for steps with clipping=True that do not "
                f"clip: clip_probability=0.0, not {self.clip_probability}"
            )
        known = set(STRATEGIES) - {NONE} if self.clipping else {NONE}
        if self.strategies is not None and not (self.strategies and set(self.strategies) <= known):
            raise SpecError(f"strategies={self.strategies}: some of {', '.join(sorted(known))}")
        if self.stage not in (1, 2, 3) or min(self.accumulation, self.ranks_per_host) < 1:
            raise SpecError(
                f"workload {self.name!r}: stage={self.stage} is 1, 2 or 3; accumulation={self.accumulation} and "
                f"ranks_per_host={self.ranks_per_host} are at least 1"
            )

    @property
    def elems(self) -> int:
        """Elements of this rank's shards."""
        return sum(chunk.elems for chunk in self.chunks)

    @property
    def timesteps(self) -> int:
        return len(self.non_model_bytes)

    @property
    def steps_at_once(self) -> bool:
        """True if all steps are made between backward and forward: torch makes them, and needs all gradients."""
        return self.clipping and not self.regime.ours

    @property
    def adds_up_on_device(self) -> bool:
        """True if gradients of whole chunks stay on the device until the last micro-step: stage 1 sums over the ranks then."""
        return self.stage == 1 and self.accumulation > 1

    @property
    def sums_once(self) -> bool:
        """True if gradients are summed over the ranks once a step, not after every micro-step."""
        return self.whole_gradients or self.stage == 1

    def collected(self, chunk: ChunkCost) -> float:
        """Return the bytes of an element of a whole chunk's gradient, as backward collects it and the ranks send it.

        A pushed one is in the parameters' precision and summed on arrival, unless several backwards add to it before.
        """
        added_up = self.whole_gradients or self.adds_up_on_device
        return self.regime.parameter if chunk.channel and not added_up else self.regime.gradient

    @property
    def channels(self) -> int:
        """Number of groups that have a push channel for chunks."""
        return len({chunk.channel for chunk in self.chunks if chunk.channel})

    def attention_of(self) -> dict[int, int]:
        """Return, for each layer that is the rest of one with attention, the place of its attention among the layers."""
        places = {layer.name: j for j, layer in enumerate(self.layers)}
        pairs = ((j, places.get(ATTENTION_OF + layer.name)) for j, layer in enumerate(self.layers))
        return {rest: attention for rest, attention in pairs if attention is not None}

    def taking(self, *, forward: float, backward: float, kept: Collection[str]) -> Workload:
        """Return the same step with other compute times: scaled in each phase to the given sums.

        Args:
            forward: seconds of one forward.
            backward: of one backward, with its recomputation.
            kept: names of the layers that were not recomputed.
        """
        recomputed = sum(layer.recompute_seconds for layer in self.layers if layer.name not in kept)
        ahead = _share(forward, sum(chunk.forward_seconds for chunk in self.chunks))
        back = _share(backward, sum(chunk.backward_seconds for chunk in self.chunks) + recomputed)
        return replace(
            self,
            chunks=tuple(
                replace(
                    chunk, forward_seconds=ahead * chunk.forward_seconds, backward_seconds=back * chunk.backward_seconds
                )
                for chunk in self.chunks
            ),
            layers=tuple(replace(layer, recompute_seconds=back * layer.recompute_seconds) for layer in self.layers),
            timestep_seconds=None
            if self.timestep_seconds is None
            else tuple(
                seconds * (ahead if t < self.forward_timesteps else back)
                for t, seconds in enumerate(self.timestep_seconds)
            ),
        )

    def ready_from(self, timestep: int) -> int:
        """Return the timestep from which on data used at ``timestep`` is on the GPU."""
        if self.ready is not None:
            return self.ready[timestep]
        return ready_from(timestep, self.light_timesteps, self.prefetch_timesteps)

    def summed_in(self, timestep: int) -> list[int]:
        """Return the timesteps in which ranks may still sum a gradient whose reduction began at ``timestep``.

        The forward of the next micro-step follows on the backward.
        """
        later = [*range(timestep + 1, self.timesteps)]
        if self.accumulation > 1 and not self.adds_up_on_device:
            later += range(self.forward_timesteps)
        return later[: reach((each in self.light_timesteps for each in later), self.drain_timesteps)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Bytes that a plan may use at any timestep; None: all that the machine has."""

    gpu_bytes: int | None = None
    host_bytes: int | None = None
    disk_bytes: int | None = None

    def on(self, machine: Machine) -> Limits:
        """Return the limits with every number filled in; no more than the machine has."""
        return Limits(
            gpu_bytes=_least(self.gpu_bytes, machine.gpu_bytes),
            host_bytes=_least(self.host_bytes, machine.host_bytes),
            disk_bytes=_least(self.disk_bytes, machine.disk_bytes),
        )

    def as_tuple(self) -> tuple[int, int, int]:
        """Return (GPU, host, disk) bytes of complete limits."""
        if self.gpu_bytes is None or self.host_bytes is None or self.disk_bytes is None:
            raise SpecError(f"{self} is not filled in: use .on(machine)")
        return self.gpu_bytes, self.host_bytes, self.disk_bytes


def _share(new: float, old: float) -> float:
    return new / old if old else 1.0


def _least(limit: int | None, has: int) -> int:
    if limit is not None and limit < 0:
        raise SpecError(f"a limit of {limit} bytes is below zero")
    return has if limit is None else min(limit, has)
