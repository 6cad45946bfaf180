"""A workload with the seconds that steps under a plan showed, part by part.

A trace is made of steps that run unit by unit. There a small unit takes as long as the host needs to launch its kernels, which a
captured step launches at once. So a step is timed again under its plan, between the waits for parameters: each such part of it has
the compute of the timesteps in it, and of what they recompute.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from meshfold.zero_gemini.planner.workload import Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Compute of a step, from the part before it, or the beginning of the phase, to a timestep.

    Attributes:
        phase: 0 in the forward, 1 in the backward.
        until: the timestep before whose beginning it ends; None: the end of the phase.
        seconds: of compute, waits left out.
    """

    phase: int
    until: int | None
    seconds: float


def typical_parts(steps: Sequence[Sequence[Part]]) -> tuple[Part, ...]:
    """Return the median of each part, over the steps with the parts of the last one; none if there is no step."""
    alike = [step for step in steps if _cuts(step) == _cuts(steps[-1])]
    return tuple(replace(same[0], seconds=median(part.seconds for part in same)) for same in zip(*alike, strict=True))


def timed(workload: Workload, parts: Iterable[Part], *, kept: Collection[str]) -> Workload:
    """Return the same step with the compute of its parts: timesteps of a part in proportion to what they were before.

    A layer that is kept would be recomputed in as much less as its forward takes less.

    Args:
        workload: with seconds of its timesteps.
        parts: of a micro-step.
        kept: names of the layers that were not recomputed.
    """
    assert workload.timestep_seconds is not None
    half, seconds = workload.forward_timesteps, [*workload.timestep_seconds]
    at = {layer.name: min(layer.last + 1, workload.timesteps - 1) for layer in workload.layers}
    whole = [*seconds]  # with recomputation
    for layer in workload.layers:
        whole[at[layer.name]] += layer.recompute_seconds * (layer.name not in kept)
    factors = [1.0] * workload.timesteps
    starts, carried = [0, half], [0.0, 0.0]
    for part in parts:
        begin, end = starts[part.phase], (half, workload.timesteps)[part.phase]
        stop = end if part.until is None else min(max(part.until, begin), end)
        carried[part.phase] += part.seconds
        before = sum(whole[begin:stop])
        if before:
            factors[begin:stop] = [carried[part.phase] / before] * (stop - begin)
            starts[part.phase], carried[part.phase] = stop, 0.0
    now = tuple(factor * spent for factor, spent in zip(factors, seconds, strict=True))
    shares = [_share(now[a:b], seconds[a:b]) for a, b in ((0, half), (half, workload.timesteps))]
    return replace(
        workload,
        timestep_seconds=now,
        chunks=tuple(
            replace(
                chunk,
                forward_seconds=shares[0] * chunk.forward_seconds,
                backward_seconds=shares[1] * chunk.backward_seconds,
            )
            for chunk in workload.chunks
        ),
        layers=tuple(
            replace(
                layer,
                recompute_seconds=layer.recompute_seconds
                * factors[layer.first if layer.name in kept else at[layer.name]],
            )
            for layer in workload.layers
        ),
    )


def _cuts(parts: Iterable[Part]) -> list[tuple[int, int | None]]:
    return [(part.phase, part.until) for part in parts]


def _share(new: Sequence[float], old: Sequence[float]) -> float:
    return sum(new) / sum(old) if sum(old) else 1.0
