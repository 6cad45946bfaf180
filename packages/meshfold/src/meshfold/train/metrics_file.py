"""``metrics.jsonl``: a line of JSON a step, written as the run goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from meshfold.checkpoint.files import write_atomically
from meshfold.train.trackers import Tracker


class MetricsFile:
    """Collects rows, and on the rank that writes appends each to the file at once."""

    def __init__(self, path: Path, *, keep: int = 0, write: bool = True) -> None:
        """Args:
        path: the file.
        keep: rows of later steps than this are dropped from a file that is there: that run went on elsewhere.
        write: whether to write.
        """
        self._path, self._write = path, write
        self.trackers: list[Tracker] = []
        self.rows = [row for row in read_metrics(path) if row["step"] <= keep] if keep else []
        if write:
            path.parent.mkdir(parents=True, exist_ok=True)
            # A process that dies here leaves the rows that were there.
            text = "".join(json.dumps(row) + "\n" for row in self.rows)
            write_atomically(path, lambda part: part.write_text(text, encoding="utf-8"))

    def add(self, **row: Any) -> None:
        """One more row."""
        self.rows.append(row)
        if self._write:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        for tracker in self.trackers:
            tracker.add(row["step"], {name: value for name, value in row.items() if name != "step"})

    def close(self) -> None:
        """The run is over."""
        for tracker in self.trackers:
            tracker.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; none if there is no file. A last line cut in two, by a run that was killed, is left out."""
    if not path.exists():
        return []
    rows = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(text))
        except ValueError:
            break
    return rows
