"""The entry ``pipeline``: the number of stages and their schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from meshfold.mesh.spec.entry import Entry

# Model chunks per rank under each schedule; None if the user may choose (``interleaved``: 2 by default).
_CHUNKS: dict[str, int | None] = {
    "gpipe": 1,
    "1f1b": 1,
    "interleaved": None,
    "zb-h1": 1,
    "zb-h2": 1,
    "zb-v": 2,
    "hanayo": None,  # two per wave
    "dualpipe-v": 2,
    "auto": None,
}
SCHEDULES = tuple(_CHUNKS)
KEYS = ("size", "schedule", "microbatches", "chunks", "waves")


@dataclass(frozen=True, kw_only=True)
class PipelineSpec:
    """The checked entry ``pipeline``.

    ``microbatches`` None: the smallest multiple of ``size`` that divides the batch. ``chunks`` is the
    number of model chunks a rank holds, None where the schedule chooses (``auto``, a callable). ``waves``
    is set for hanayo only.
    """

    size: int
    schedule: str | Callable[..., object] = "1f1b"
    microbatches: int | None = None
    chunks: int | None = 1
    waves: int | None = None

    @property
    def axes(self) -> dict[str, int]:
        """Axis name to size: the axis ``pipe``."""
        return {"pipe": self.size}

    @property
    def schedule_name(self) -> str:
        """The schedule's name, or the callable's."""
        if isinstance(self.schedule, str):
            return self.schedule
        return str(getattr(self.schedule, "__name__", type(self.schedule).__name__))

    @classmethod
    def parse(cls, value: object) -> PipelineSpec:
        """Check ``2`` or a dict (size, schedule, microbatches, chunks, waves). Raises SpecError."""
        entry = Entry(name="pipeline", value=value)
        if isinstance(value, int):
            return cls(size=entry.count("pipeline", value, 2))
        fields = entry.fields(KEYS, "pipeline=2 or pipeline=dict(size=2, schedule='1f1b')")
        if "size" not in fields:
            raise entry.error("size is missing.", "Write size=2 for two stages in a row.")
        size = entry.count("size", fields["size"], 2)
        schedule = _schedule(entry, fields.get("schedule", "1f1b"))
        microbatches = None
        if "microbatches" in fields:
            microbatches = entry.count("microbatches", fields["microbatches"], 2 * size)
        waves = _waves(entry, schedule, fields)
        chunks = _chunks(entry, schedule, waves, fields)
        return cls(size=size, schedule=schedule, microbatches=microbatches, chunks=chunks, waves=waves)

    def to_dict(self) -> dict[str, object]:
        """Return the entry that parses to this."""
        return {key: getattr(self, key) for key in KEYS if getattr(self, key) is not None}


def _schedule(entry: Entry, value: object) -> str | Callable[..., object]:
    if callable(value):
        return value
    return entry.choice("schedule", value, SCHEDULES, ", or a callable")


def _waves(entry: Entry, schedule: str | Callable[..., object], fields: Mapping[str, object]) -> int | None:
    if "waves" not in fields:
        return 1 if schedule == "hanayo" else None
    waves = entry.count("waves", fields["waves"], 1)
    if schedule != "hanayo":
        raise entry.error(
            f"waves belongs to schedule 'hanayo', and the schedule is {_named(schedule)}.",
            "Leave waves out, or write schedule='hanayo'.",
        )
    return waves


def _chunks(
    entry: Entry, schedule: str | Callable[..., object], waves: int | None, fields: Mapping[str, object]
) -> int | None:
    fixed = _CHUNKS[schedule] if isinstance(schedule, str) else None
    if waves is not None:
        fixed = 2 * waves
    if "chunks" not in fields:
        return 2 if schedule == "interleaved" else fixed
    chunks = entry.count("chunks", fields["chunks"], 2)
    if fixed is None or chunks == fixed:
        return chunks
    if waves is not None:
        change = f"Leave chunks out, or write waves={max(chunks // 2, 1)}."
        problem = f"schedule 'hanayo' holds 2 chunks a wave: {fixed} for waves={waves}, not {chunks}."
        raise entry.error(problem, change)
    raise entry.error(
        f"schedule {_named(schedule)} takes no chunks: a rank always holds {fixed}, not {chunks}.",
        "Leave chunks out, or write schedule='interleaved'.",
    )


def _named(schedule: str | Callable[..., object]) -> str:
    return repr(schedule) if isinstance(schedule, str) else "a callable"
