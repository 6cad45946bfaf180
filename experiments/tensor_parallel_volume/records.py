"""What was counted, as it lies in results/counts.json."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, astuple, dataclass, fields
from fractions import Fraction
from pathlib import Path
from typing import Any

from experiments.tensor_parallel_volume.config import ITEMSIZE, Config
from experiments.tensor_parallel_volume.config import ranks as ranks_of


@dataclass(frozen=True, slots=True)
class Calls:
    """Collectives that are alike.

    Attributes:
        phase: forward or backward; backward includes recomputation.
        part: ``matmul``, or ``rest``: norms and the gradients of what is replicated (norm weights, biases).
        kind: the collective.
        axes: mesh axes, joined by commas.
        group_size: ranks that take part.
        times: how many calls.
        bytes: what a rank sends in all of them.
    """

    phase: str
    part: str
    kind: str
    axes: str
    group_size: int
    times: int
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One counted run, as rank 0 and the last rank saw it (they agree).

    Attributes:
        what: ``linear`` (one layer forward and backward), ``layer`` (a transformer layer), ``tesseract`` (a matmul
            with k split over depth, forward) or ``isoefficiency`` (a transformer layer with as many tokens as
            hidden elements).
        mode, axes: where.
        role: of a linear layer: column or row.
        shape: name of its sizes in the configuration; of ``isoefficiency``, the factor on its hidden size.
        lowering: how matmuls were carried out.
        keep: gathered operands that forward kept for backward.
        recompute: whether backward computed forward again.
        calls: the collectives.
    """

    what: str
    mode: str
    axes: dict[str, int]
    role: str = ""
    shape: str = ""
    lowering: str = "gather"
    keep: str = ""
    recompute: bool = False
    calls: tuple[Calls, ...] = ()

    @property
    def ranks(self) -> int:
        """How many ranks the mesh has."""
        return ranks_of(self.axes)

    def elements(self, phase: str = "", part: str = "") -> Fraction:
        """Elements that a rank sends."""
        chosen = (c for c in self.calls if phase in ("", c.phase) and part in ("", c.part))
        return Fraction(sum(c.bytes for c in chosen), ITEMSIZE)

    @property
    def steps(self) -> int:
        """Steps of the rings, one after the other: g − 1 for a gather or a scatter, twice that for an all-reduce."""
        return sum((2 if c.kind == "all_reduce" else 1) * (c.group_size - 1) * c.times for c in self.calls)


@dataclass(frozen=True, kw_only=True)
class Results:
    """Everything of one run: machine, versions, configuration, counts."""

    machine: dict[str, Any]
    versions: dict[str, str]
    config: Config
    records: tuple[Record, ...]

    def find(self, **wanted: object) -> list[Record]:
        """The records that have these attributes, in order."""
        return [r for r in self.records if all(getattr(r, name) == value for name, value in wanted.items())]

    def one(self, **wanted: object) -> Record:
        """The only record that has these attributes.

        Raises:
            LookupError: if there is none, or there are several.
        """
        found = self.find(**wanted)
        if len(found) != 1:
            raise LookupError(f"{len(found)} records with {wanted}; expected one")
        return found[0]

    def save(self, path: Path) -> None:
        """Write JSON, a record a line."""
        head = {"machine": self.machine, "versions": self.versions, "config": asdict(self.config)}
        lines = [json.dumps(_plain(record), separators=(",", ":")) for record in self.records]
        text = json.dumps(head, indent=1)[:-2] + ',\n "records": [\n' + ",\n".join(lines) + "\n]\n}\n"
        path.write_text(text, encoding="utf-8")

    @staticmethod
    def load(path: Path) -> Results:
        """Read what :meth:`save` wrote."""
        data = json.loads(path.read_text(encoding="utf-8"))
        records = tuple(_record(item) for item in data["records"])
        return Results(
            machine=data["machine"],
            versions=data["versions"],
            config=Config(**data["config"]),
            records=records,
        )


def _plain(record: Record) -> dict[str, object]:
    """Without what has its default value; calls as lists."""
    plain = {f.name: getattr(record, f.name) for f in fields(record) if getattr(record, f.name) != f.default}
    return {**plain, "calls": [list(astuple(call)) for call in record.calls]}


def _record(item: Mapping[str, Any]) -> Record:
    calls: Iterable[list[Any]] = item["calls"]
    return Record(**{**item, "calls": tuple(Calls(*call) for call in calls)})
