"""Trace of a micro-step: timesteps in the order in which they happened."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from meshfold.mesh import with_old_names


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedTimestep:
    """Interval from entering one unit to entering the next.

    What happened before the first entry counts to the first timestep, the loss to the last of the forward.
    """

    unit: str
    """the unit that was entered"""
    backward: bool
    """whether the backward had begun; forwards that checkpointing repeats there count to it"""
    until: int
    """the last timestep in which the unit was still inside: units may lie in one another"""
    non_model_bytes: int
    """the most alive at once that are neither parameters, gradients nor optimizer state"""
    left_bytes: int
    """of those, alive at its end"""
    seconds: float
    """of compute"""
    waited_seconds: float
    """before it, between arriving at the unit and entering it: for its parameters"""
    stalled_seconds: float = 0.0
    """in it, while the host waited for the optimizer or for memory; not in ``seconds``"""


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedLayer:
    """A layer whose activations were recomputed in the backward, and may be kept instead."""

    name: str
    kept_bytes: int
    """storages that autograd would keep of it, each once, without parameters, buffers and the layer's inputs"""
    seconds: float
    """of compute that went into recomputing"""
    first: int
    """the timestep in which its forward began"""
    last: int
    """the last before the one in which it was recomputed"""
    before_bytes: int
    """the most alive at once in that one, before it was"""
    entered_bytes: int = 0
    """alive when its forward began"""
    forward_bytes: int | None = None
    """the most alive at once that a forward adds whose activations are kept; None: not measured"""
    attention_bytes: int = 0
    """of the kept bytes, the results of attention, which may be kept alone"""
    attention_seconds: float = 0.0
    """of the seconds, those of attention"""


@with_old_names({"moments": "timesteps", "forward_moments": "forward_timesteps"}, arguments={"moments": "timesteps"})
@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """One micro-step."""

    timesteps: tuple[TracedTimestep, ...]
    layers: tuple[TracedLayer, ...] = ()

    @property
    def forward_timesteps(self) -> int:
        """Number of timesteps in the forward."""
        return sum(not timestep.backward for timestep in self.timesteps)

    @property
    def seconds(self) -> float:
        """Seconds of compute, in total."""
        return sum(timestep.seconds for timestep in self.timesteps)

    @property
    def peak_bytes(self) -> int:
        """The most of any timestep."""
        return max((timestep.non_model_bytes for timestep in self.timesteps), default=0)

    @property
    def order(self) -> tuple[str, ...]:
        """Names of the units, as they were entered."""
        return tuple(timestep.unit for timestep in self.timesteps)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        return {"timesteps": [asdict(one) for one in self.timesteps], "layers": [asdict(one) for one in self.layers]}

    @classmethod
    def from_json(cls, words: dict[str, Any]) -> Trace:
        """Read the result of :meth:`to_json`."""
        return cls(
            timesteps=tuple(TracedTimestep(**one) for one in words["timesteps"]),
            layers=tuple(TracedLayer(**layer) for layer in words["layers"]),
        )


def worst_trace(traces: Sequence[Trace], *, seconds: Callable[[list[float]], float] = max) -> Trace:
    """Return the worst case of several traces of one step: at every timestep the most bytes, and the most or the least seconds.

    Of a trace with other timesteps than the first one's only the peak counts. Layers are those that all other traces saw
    recomputed.
    """
    first = traces[0]
    alike = [trace for trace in traces if trace.order == first.order]
    peak = max((trace.peak_bytes for trace in traces if trace.order != first.order), default=0)
    timesteps = []
    for i, timestep in enumerate(first.timesteps):
        same = [trace.timesteps[i] for trace in alike]
        timesteps.append(
            replace(
                timestep,
                non_model_bytes=max([peak, *(m.non_model_bytes for m in same)]),
                left_bytes=max(m.left_bytes for m in same),
                seconds=seconds([m.seconds for m in same]),
            )
        )
    layers = []
    for layer in first.layers:
        found = [x for trace in alike for x in trace.layers if x.name == layer.name]
        if len(found) == len(alike):
            layers.append(
                replace(
                    layer,
                    kept_bytes=max(x.kept_bytes for x in found),
                    seconds=seconds([x.seconds for x in found]),
                    first=min(x.first for x in found),
                    last=max(x.last for x in found),
                    before_bytes=max(x.before_bytes for x in found),
                    entered_bytes=max(x.entered_bytes for x in found),
                    forward_bytes=_most(x.forward_bytes for x in found),
                    attention_bytes=max(x.attention_bytes for x in found),
                    attention_seconds=seconds([x.attention_seconds for x in found]),
                )
            )
    return Trace(timesteps=tuple(timesteps), layers=tuple(layers))


def _most(found: Iterable[int | None]) -> int | None:
    """Return the largest; None if one is not known."""
    known = [*found]
    return None if None in known else max(each for each in known if each is not None)
