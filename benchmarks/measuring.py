"""Measuring contestants of one process, or of ranks together: memory, then time and power, written as they come."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from benchmarks.common import (
    LONG_S,
    Contestant,
    agree,
    machine,
    median,
    milliseconds,
    package_versions,
    timed_windows,
    write,
)


def measure(
    area: str,
    contestants: Iterable[Contestant],
    options: argparse.Namespace,
    settings: Sequence[str],
    packages: Sequence[str] = (),
    world: Any = None,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Measure memory, time and power of all contestants that can run, and write the result to ``--out`` as it grows.

    With one round each contestant is made, measured and written before the next one is made; else all are made first.

    Args:
        area: name of the benchmark.
        contestants: those that cannot run have a note that says why.
        options: parsed arguments, with those of :func:`add_output` and :func:`add_rounds`.
        settings: names of the options that are written with the result.
        packages: distributions whose versions are written with the machine.
        world: the group of ranks that measure together; its rank 0 writes. None: this process alone.
        say: gets a line about each phase that has ended, with its seconds.
    """
    first = world is None or world.rank == 0
    together: dict[str, Any] = {} if world is None else dict(agreed=agree(world.device))
    head: dict[str, Any] = dict(area=area, machine={**machine(), **package_versions(*packages)})
    found: dict[str, Any] = {}

    def save(group: Sequence[Contestant], **more: Mapping[str, Any]) -> None:
        head["settings"] = {name: getattr(options, name) for name in settings}  # contestants may add to them
        each: dict[str, Any] = dict(
            peak_bytes={each.name: each.peak_bytes for each in group},
            notes={each.name: each.note for each in group if each.note},
            error={each.name: each.error for each in group},
            **more,
        )
        for key, values in each.items():
            found.setdefault(key, {}).update(values)
        if first:
            write(options.out, {**head, **found})

    for group in ([each] for each in contestants) if options.rounds == 1 else [list(contestants)]:
        names, clock = ", ".join(each.name for each in group), PhaseClock(say)
        for each in group:
            measure_memory(each)
        save(group, milliseconds={}, power={})
        clock.ended(f"{names}: memory")
        known = {each.name: [each.known_ms] for each in group if each.known_ms}
        if known:
            save(group, milliseconds=known, power={name: {} for name in known})
        told: Mapping[str, Any] = {}
        for times, power in timed_windows(
            group,
            rounds=options.rounds,
            window_s=options.window_s,
            settle_s=options.settle_s,
            gpus=(1 if world is None else world.world_size) if first else 0,
            **together,
        ):
            save(group, milliseconds=times, power=power)
            if times != told:  # the last one brings only the power
                told = times
                clock.ended(f"timed: {', '.join(f'{name} {median(values):,.1f} ms' for name, values in times.items())}")
        parts: dict[str, dict[str, float]] = {}
        for each in group:
            for name, part in each.parts.items():
                once = milliseconds(part, 1)
                again = 0 if agreed_long(once, together) else 2
                parts.setdefault(each.name, {})[name] = milliseconds(part, again) if again else once
        if parts:
            save(group, parts=parts)
            clock.ended(f"{names}: {', '.join(sorted({part for each in parts.values() for part in each}))}")


def agreed_long(milliseconds: float, together: Mapping[str, Any]) -> bool:
    """Return True if a step takes long on some rank; ``together``: has ``agreed`` of :func:`timed_windows`, or nothing."""
    return float(together.get("agreed", float)(milliseconds)) > LONG_S * 1e3


class PhaseClock:
    """Tells what has ended, and the seconds since the end before it."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._begun = say, time.perf_counter()

    def ended(self, what: str) -> None:
        """A phase has ended."""
        now = time.perf_counter()
        self._say(f"{what} ({now - self._begun:.1f} s)")
        self._begun = now


def measure_memory(contestant: Contestant) -> None:
    """Note the largest memory of a call beyond what was there before it."""
    if contestant.step is None or not torch.cuda.is_available():
        return
    if not contestant.warm:
        contestant.step()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, start = torch.cuda.memory_allocated(), time.perf_counter()
    contestant.step()
    torch.cuda.synchronize()
    contestant.peak_bytes = torch.cuda.max_memory_allocated() - before
    contestant.last_ms = (time.perf_counter() - start) * 1e3
