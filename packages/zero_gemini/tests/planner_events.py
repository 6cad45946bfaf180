"""A step under a plan, event by event: compute, copies each way, and the host's optimizer. The reference of a plan's seconds.

For a single rank with speculative steps, as :mod:`meshfold.zero_gemini.runtime.captured_moves` makes them: a unit's chunks are
copied while the units before it run, and gradients to the host once they are complete. The host steps the chunk whose gradient came
last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from meshfold.zero_gemini.planner import Plan
from meshfold.zero_gemini.planner.memory import gather_windows

STEPS = 6


def seconds_by_events(plan: Plan) -> float:
    """Return the seconds of a step in the steady state."""
    work, machine, regime = plan.workload, plan.machine, plan.workload.regime
    assert work.timestep_seconds is not None and work.accumulation == work.data_ranks == 1
    lasts = list(work.timestep_seconds)
    for layer, made in zip(work.layers, plan.layers, strict=True):
        if not made.kept:
            lasts[min(layer.last + 1, work.timesteps - 1)] += layer.recompute_seconds
    pairs = list(zip(work.chunks, plan.chunks, strict=True))
    host = {chunk.name: chunk for chunk, made in pairs if made.state == "host"}
    streamed = {chunk.name for chunk, made in pairs if made.parameters == "host"}
    begins = {
        (name, begin): min(first for first, _ in chunk.uses if first >= begin)
        for name, chunk in host.items()
        for begin, _ in gather_windows(chunk, work)
    }
    firsts = {name: chunk.forward[0] for name, chunk in host.items() if name not in streamed}
    on_device = sum(chunk.elems for chunk, made in pairs if made.state == "gpu")
    rate = machine.host_memory / regime.out_of_place

    def upload(name: str) -> float:
        return regime.parameter * host[name].elems / machine.h2d

    compute = copies = sent = cores = 0.0
    stepped: dict[str, float] = {}  # when the new parameters of a chunk are on the host
    starts: list[float] = []
    for _ in range(STEPS):
        starts.append(compute)
        arrives: dict[str, float] = {}
        gradients: list[tuple[float, str]] = []
        for t in range(work.timesteps):
            for name, last in _ends(host, begins):
                if last == t - 1:
                    arrives.pop(name, None)
            for (name, begin), use in sorted(begins.items(), key=lambda one: one[1]):
                if begin == t and name in streamed and stepped.get(name, 0.0) <= compute:
                    copies = max(copies, compute) + upload(name)
                    arrives[name] = copies
                    stepped.pop(name, None)
                if use == t and name in streamed and name not in arrives:  # its step ended too late
                    copies = max(copies, compute, stepped.pop(name, 0.0)) + upload(name)
                    arrives[name] = copies
                if use == t and name in streamed:
                    compute = max(compute, arrives[name])
            for name, use in sorted(firsts.items(), key=lambda one: one[1]):
                is_early = t == work.ready_from(use) and stepped.get(name, 0.0) <= compute
                if is_early or (t == use and name not in arrives):
                    copies = max(copies, compute, stepped.pop(name, 0.0)) + upload(name)
                    arrives[name] = copies
                if t == use:
                    compute = max(compute, arrives[name])
            compute += lasts[t]
            for name, chunk in host.items():
                if chunk.backward[1] == t:
                    sent = max(sent, compute) + regime.gradient * chunk.elems / machine.d2h
                    gradients.append((sent, name))
        compute += regime.step * on_device / machine.gpu_memory
        stepped = _stepped(gradients, {name: chunk.elems / rate for name, chunk in host.items()}, cores)
        cores = max([cores, *stepped.values()])
    return (compute - starts[-2]) / 2


def _ends(host: Iterable[str], begins: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return when each stay of a chunk is over: before its next one begins."""
    found = []
    for name in host:
        own = sorted(begin for other, begin in begins if other == name)
        found += [(name, begin - 1) for begin in own[1:]]
    return found


def _stepped(gradients: Sequence[tuple[float, str]], takes: dict[str, float], now: float) -> dict[str, float]:
    """Return when each chunk is stepped: of those whose gradient is there the one that came last."""
    coming, waiting, found = sorted(gradients), list[str](), dict[str, float]()
    while coming or waiting:
        while coming and coming[0][0] <= now:
            waiting.append(coming.pop(0)[1])
        if not waiting:
            now = coming[0][0]
            continue
        name = waiting.pop()
        now += takes[name]
        found[name] = now
    return found
