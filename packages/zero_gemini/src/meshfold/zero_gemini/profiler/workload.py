"""The planner's workload, made from a trace and the chunks; chunks and the units that use them, computed from shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from meshfold.kernels import Fp8Weight
from meshfold.mesh import Mesh, SpecError
from meshfold.mesh.model_io import ATTENTION_OF
from meshfold.zero_gemini.chunks.layout import ChunkSpec
from meshfold.zero_gemini.chunks.parameter_table import (
    ParameterFacts,
    lay_out_members,
    members_of,
    parameter_facts,
)
from meshfold.zero_gemini.planner.options import SPLIT_STEP
from meshfold.zero_gemini.planner.regimes import Regime
from meshfold.zero_gemini.planner.workload import ChunkCost, Layer, Workload
from meshfold.zero_gemini.prefetch import light_ones
from meshfold.zero_gemini.profiler.trace import Trace, TracedLayer, TracedTimestep
from meshfold.zero_gemini.runtime.units import Unit, find_units, unit_of_each


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkUse:
    """A chunk and the units that need it."""

    name: str
    elems: int
    """elements of this rank's shard"""
    gathered_elems: int
    """elements of the whole chunk"""
    units: Mapping[str, int]
    """names of the units that use it, with the elements that each uses"""
    trainable: bool = True
    fp8: int = 0
    """operands in fp8 that forward and backward gather of it: 2, or 1 for both; 0: it is gathered as it is"""
    channel: str = ""
    """the group whose push channel carries it; empty: the process group does"""
    place: int | None = None
    """position of its first parameter in the model: gradients that ranks share are reduced from the last chunk to the first; None:
    each once it is complete"""


def workload_of(
    trace: Trace,
    chunks: Sequence[ChunkUse],
    *,
    name: str,
    regime: Regime,
    tokens: int,
    stage: int = 3,
    accumulation: int = 1,
    data_ranks: int = 1,
    ranks_per_host: int = 1,
    host_base_bytes: int = 0,
    prefetch: int = 1,
    reshards: bool = True,
    clipping: bool = True,
    whole_gradients: bool = False,
) -> Workload:
    """Return the workload of one optimizer step.

    A chunk is on the device at every timestep in which a unit that uses it runs. A unit's seconds are divided among its chunks by
    elements; seconds of units without chunks go to the unit before. A chunk that was never used has a placement and state,
    too. Activations can be chosen for layers that were recomputed in the trace; all others are as in the trace.

    Args:
        trace: of one micro-step.
        chunks: in any order; together they have every element of every unit.
        name: of the model, for display.
        regime: bytes an element; its ``gradient`` is in the dtype in which gradients are summed.
        tokens: of this rank in a step.
        stage: 1 and 2 keep parameters on the device.
        accumulation: micro-steps of a step.
        data_ranks: ranks that share each chunk.
        ranks_per_host: ranks that share a host's memory.
        host_base_bytes: of the rest of this rank's process.
        prefetch: units gathered ahead.
        reshards: chunks are released between two uses.
        clipping: gradients are held until all have arrived; else chunks are stepped in the backward.
        whole_gradients: gradients of whole chunks wait for the end of the step.

    Raises:
        SpecError: for a trace without a forward or without a chunk's unit.
    """
    timesteps, half = trace.timesteps, trace.forward_timesteps
    if not 0 < half < len(timesteps):
        raise SpecError(
            f"the trace has {half} timesteps of forward and {len(timesteps) - half} of backward: both are needed"
        )
    layers = _alike(trace.layers)
    timesteps = _without_recomputing(timesteps, layers)
    costs = _chunk_costs(chunks, timesteps, half)
    light = light_units(chunks)
    return Workload(
        name=name,
        chunks=tuple(sorted(costs, key=lambda cost: cost.forward[0])),
        layers=_layer_costs(layers, timesteps),
        non_model_bytes=tuple(timestep.non_model_bytes for timestep in timesteps),
        forward_timesteps=half,
        tokens=tokens,
        regime=regime,
        clipping=clipping,
        strategies=(SPLIT_STEP,) if clipping else None,  # chunks on disk are stepped whole before the forward
        stage=stage,
        accumulation=accumulation,
        data_ranks=data_ranks,
        ranks_per_host=ranks_per_host,
        host_base_bytes=host_base_bytes,
        whole_gradients=whole_gradients,
        timestep_seconds=tuple(timestep.seconds for timestep in timesteps),
        prefetch_timesteps=prefetch,
        light_timesteps=frozenset(i for i, timestep in enumerate(timesteps) if timestep.unit in light),
        reshards=reshards,
        units=tuple(timestep.unit for timestep in timesteps),
    )


def _chunk_costs(chunks: Sequence[ChunkUse], timesteps: Sequence[TracedTimestep], half: int) -> list[ChunkCost]:
    """Return when each chunk is used and reduced, and the seconds of its units; ``half``: timesteps of the forward."""
    visits = {chunk.name: _visits(chunk, timesteps, half) for chunk in chunks}
    backwards = {chunk.name: _backward_visits(visits[chunk.name], timesteps, half) for chunk in chunks}
    forward, backward = _seconds(chunks, timesteps[:half]), _seconds(chunks, timesteps[half:])
    reduced = _reduced_in(chunks, backwards, timesteps, half)
    costs = []
    for chunk in chunks:
        seen, second = visits[chunk.name], backwards[chunk.name]
        first = [visit for visit in seen if visit[0] < half] or [(half - 1, half - 1)]
        costs.append(
            ChunkCost(
                name=chunk.name,
                elems=chunk.elems,
                gathered_elems=chunk.gathered_elems,
                forward=(first[0][0], first[-1][1]),
                backward=(second[0][0], second[-1][1]),
                visits=tuple(seen),
                gradient_from=_gradient_from(chunk, timesteps, second),
                reduced_in=reduced.get(chunk.name),
                forward_seconds=forward[chunk.name],
                backward_seconds=backward[chunk.name],
                trainable=chunk.trainable,
                fp8=chunk.fp8,
                channel=chunk.channel,
            )
        )
    return costs


def _layer_costs(traced: Sequence[TracedLayer], timesteps: Sequence[TracedTimestep]) -> tuple[Layer, ...]:
    """Return what each layer costs, and after all layers what attention costs in those where it is worth keeping alone."""
    layers, alone = [], []
    for one in traced:
        whole, attention = _layer_cost(one, traced, timesteps), _attention_cost(one, timesteps)
        if attention is not None:
            alone.append(attention)
            rest = whole.kept_bytes - attention.kept_bytes
            whole = replace(
                whole,
                kept_bytes=rest,
                recompute_seconds=whole.recompute_seconds - attention.recompute_seconds,
                counted_bytes=min(whole.counted_bytes, rest),
                own_bytes=whole.own_bytes - attention.own_bytes,
            )
        layers.append(whole)
    return (*layers, *alone)


def _attention_cost(layer: TracedLayer, timesteps: Sequence[TracedTimestep]) -> Layer | None:
    """Return the cost of a layer's attention, None if it has none or saves fewer seconds for a byte than the rest."""
    size, seconds = layer.attention_bytes, layer.attention_seconds
    if not 0 < size < layer.kept_bytes or not seconds * layer.kept_bytes > size * layer.seconds:
        return None
    recomputed = timesteps[_after(timesteps, layer)]
    return Layer(
        name=ATTENTION_OF + layer.name,
        kept_bytes=size,
        recompute_seconds=min(seconds, layer.seconds),
        first=layer.first,
        last=layer.last,
        own_bytes=max(0, layer.before_bytes + size - recomputed.non_model_bytes),
    )


def _layer_cost(layer: TracedLayer, layers: Sequence[TracedLayer], timesteps: Sequence[TracedTimestep]) -> Layer:
    """Return the bytes that a layer takes if it keeps its activations, and the seconds if it recomputes them."""
    recomputed = timesteps[_after(timesteps, layer)]
    return Layer(
        name=layer.name,
        kept_bytes=layer.kept_bytes,
        recompute_seconds=layer.seconds,
        first=layer.first,
        last=layer.last,
        counted_bytes=_counted_bytes(layer, layers, timesteps),
        own_bytes=max(0, layer.before_bytes + layer.kept_bytes - recomputed.non_model_bytes),
    )


def light_units(chunks: Iterable[ChunkUse]) -> frozenset[str]:
    """Return the names of units with almost no compute, for the plan and its execution."""
    elems: Counter[str] = Counter()
    for chunk in chunks:
        elems.update(chunk.units)
    return light_ones(elems)


def _alike(layers: Sequence[TracedLayer]) -> list[TracedLayer]:
    """Give layers with equal bytes equal seconds: differences are noise and would make their order random."""
    alike: dict[tuple[int, int], list[TracedLayer]] = {}
    for layer in layers:
        alike.setdefault((layer.kept_bytes, layer.attention_bytes), []).append(layer)
    means = {
        key: (mean(x.seconds for x in found), mean(x.attention_seconds for x in found)) for key, found in alike.items()
    }
    found = [(layer, *means[layer.kept_bytes, layer.attention_bytes]) for layer in layers]
    return [replace(layer, seconds=spent, attention_seconds=attention) for layer, spent, attention in found]


def _without_recomputing(
    timesteps: Sequence[TracedTimestep], layers: Sequence[TracedLayer]
) -> tuple[TracedTimestep, ...]:
    """Return the timesteps without recomputation, whose seconds plans add per layer."""
    found = list(timesteps)
    for layer in layers:
        i = _after(found, layer)
        found[i] = replace(found[i], seconds=max(0.0, found[i].seconds - layer.seconds))
    return tuple(found)


def _after(timesteps: Sequence[TracedTimestep], layer: TracedLayer) -> int:
    """Return the timestep of a layer's recomputation."""
    return min(layer.last + 1, len(timesteps) - 1)


def _backward_visits(
    visits: Sequence[tuple[int, int]], timesteps: Sequence[TracedTimestep], half: int
) -> list[tuple[int, int]]:
    """Return a chunk's visits in the backward; chunks that no backward reached are reduced, as zeros, at the end."""
    return [visit for visit in visits if visit[0] >= half] or [(len(timesteps) - 1, len(timesteps) - 1)]


def _reduced_in(
    chunks: Sequence[ChunkUse],
    backwards: Mapping[str, Sequence[tuple[int, int]]],
    timesteps: Sequence[TracedTimestep],
    half: int,
) -> dict[str, int]:
    """Return the timestep in which each chunk's reduction can begin: once its gradient is complete, and if ranks share it, all
    before it in the order.

    The gradient of a chunk with a unit that no backward reached is complete at the end.
    """
    reached = {timestep.unit for timestep in timesteps[half:]}
    ordered = [(chunk.place, chunk) for chunk in chunks if chunk.trainable and chunk.place is not None]
    found, latest = {}, 0
    for _, chunk in sorted(ordered, key=lambda pair: -pair[0]):
        own = backwards[chunk.name][-1][1] if reached.issuperset(chunk.units) else len(timesteps) - 1
        if chunk.elems < chunk.gathered_elems:
            own = latest = max(latest, own)
        found[chunk.name] = own
    return found


def _gradient_from(chunk: ChunkUse, timesteps: Sequence[TracedTimestep], backward: Sequence[tuple[int, int]]) -> int:
    """Return the timestep from which on gradients of parameters arrive.

    A parameter that several units use, such as a tied embedding, gets its gradient once, after the last: until then autograd
    keeps what it has, which is in the bytes of the timesteps.
    """

    def used_again(i: int) -> int:
        later = {timesteps[t].unit for first, last in backward[i + 1 :] for t in range(first, last + 1)}
        return sum(elems for unit, elems in chunk.units.items() if unit in later)

    return next(first for i, (first, _) in enumerate(backward) if used_again(i) < chunk.gathered_elems)


def _counted_bytes(layer: TracedLayer, layers: Sequence[TracedLayer], timesteps: Sequence[TracedTimestep]) -> int:
    """Return how many of a layer's kept bytes the peak of its forward's timestep counts already.

    These are temporary tensors of a forward that keeps nothing: most of them are among those kept, and would count
    twice. A recomputation stops before the operators whose results nothing saves: a residual sum, say, whose output
    then lies beside what it adds. Of several layers in one timestep the later ones run beside what the earlier ones keep.
    """
    if layer.forward_bytes is None or any(x.first == layer.first for x in layers if x is not layer):
        return 0
    timestep = timesteps[layer.first]
    output = max(0, timestep.left_bytes - layer.entered_bytes)
    most = max(layer.entered_bytes + layer.forward_bytes, timestep.left_bytes + layer.kept_bytes + output)
    return max(0, layer.kept_bytes - max(0, most - timestep.non_model_bytes))


def _visits(chunk: ChunkUse, timesteps: Sequence[TracedTimestep], half: int) -> list[tuple[int, int]]:
    """Return runs of timesteps (first, last) in which a unit of the chunk runs; no run spans forward and backward."""
    runs: list[tuple[int, int]] = []
    for i, timestep in enumerate(timesteps):
        if timestep.unit not in chunk.units:
            continue
        until = timestep.until if i >= half else min(timestep.until, half - 1)
        if runs and i <= runs[-1][1] + 1 and i != half:
            runs[-1] = (runs[-1][0], max(runs[-1][1], until))
        else:
            runs.append((i, until))
    return runs


def _seconds(chunks: Sequence[ChunkUse], timesteps: Sequence[TracedTimestep]) -> dict[str, float]:
    """Return the compute seconds of every chunk; they add up to those of the timesteps."""
    found = {chunk.name: 0.0 for chunk in chunks}
    users: dict[str, dict[str, int]] = {}
    for chunk in chunks:
        for unit, elems in chunk.units.items():
            users.setdefault(unit, {})[chunk.name] = elems
    waiting = 0.0
    last: dict[str, int] = {}
    for timestep in timesteps:
        last = users.get(timestep.unit) or last
        waiting += timestep.seconds
        if not last:
            continue
        for name, elems in last.items():
            found[name] += waiting * elems / sum(last.values())
        waiting = 0.0
    if waiting and chunks:
        found[chunks[0].name] += waiting
    return found


class Named(NamedTuple):
    """A chunk as an input of the planner.

    Attributes:
        name: by which plans call it.
        spec: its parameters and sizes.
        trained: whether the optimizer steps it.
        channel: name of the group whose copy engines carry it; empty if collectives do.
    """

    name: str
    spec: ChunkSpec
    trained: bool
    channel: str = ""


def uses_of(chunks: Iterable[Named], units: Iterable[Unit], facts: Mapping[str, ParameterFacts]) -> list[ChunkUse]:
    """Return the chunks, with the units that need them: the input of a plan.

    Args:
        chunks: in any order.
        units: of the model.
        facts: its parameters, by name.
    """
    names: dict[Tensor, str] = {one.parameter: name for name, one in facts.items()}
    places = {name: place for place, name in enumerate(facts)}
    users: dict[str, list[str]] = {name: [] for name in facts}  # by parameter
    for unit in units:
        for used in unit.parameters:
            users[names[used]].append(unit.name)
    uses = []
    for chunk in chunks:
        needed: dict[str, int] = {}
        for name in chunk.spec.names:
            for unit_name in users[name]:
                needed[unit_name] = needed.get(unit_name, 0) + facts[name].shape.numel()
        uses.append(
            ChunkUse(
                name=chunk.name,
                elems=chunk.spec.shard_elems,
                gathered_elems=chunk.spec.size_elems,
                units=needed,
                trainable=chunk.trained,
                fp8=facts[chunk.spec.names[0]].kind.fp8,
                channel=chunk.channel,
                place=min(places[name] for name in chunk.spec.names),
            )
        )
    return uses


def chunk_uses(
    model: nn.Module,
    mesh: Mesh,
    *,
    dtype: torch.dtype | None,
    other_dtypes: Mapping[Tensor, torch.dtype] = MappingProxyType({}),
    slot_align_elems: int = 64,
    stays: bool = False,
    in_fp8: Mapping[Tensor, Fp8Weight] = MappingProxyType({}),
    pushed: Callable[[tuple[str, ...], int], bool] = lambda axes, block_bytes: False,
) -> list[ChunkUse]:
    """Return the chunks that :class:`~meshfold.zero_gemini.gemini.Gemini` would make of a model, named by their first parameter.

    Args:
        model: on any device; its parameters carry their metadata.
        mesh: of the model.
        dtype: in which it computes; None keeps each parameter's.
        other_dtypes: parameters that it has in another dtype.
        slot_align_elems: 256 under regime C.
        stays: chunks never leave the device.
        in_fp8: parameters that are gathered in fp8, with what multiplies them.
        pushed: tells whether copy engines carry a chunk from the axes that share it and the bytes of a shard.
    """
    facts = parameter_facts(model, mesh, dtype, other_dtypes, in_fp8)
    unit_of = unit_of_each(model) if stays else {}
    laid = lay_out_members(members_of(facts), mesh, slot_align_elems=slot_align_elems, unit_of=unit_of)
    chunks = []
    for axes, layout in laid:
        for chunk in layout.chunks:
            kind = facts[chunk.names[0]].kind
            pushes = mesh.size(*axes) > 1 and pushed(axes, chunk.shard_elems * kind.dtype.itemsize)
            chunks.append(Named(chunk.names[0], chunk, kind.trained, ",".join(mesh.spanned(*axes)) if pushes else ""))
    return uses_of(chunks, find_units(model), facts)
