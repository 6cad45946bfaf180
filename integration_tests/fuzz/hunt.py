"""Runs of many cases: count what came of them, and keep the findings."""

from __future__ import annotations

import json
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from integration_tests.fuzz.cases import Case, random_case
from integration_tests.fuzz.judge import Verdict, judge
from integration_tests.house import ROOT

RESULTS = ROOT / "integration_tests" / "results" / "fuzz.json"
REPLAY = "python -m integration_tests.fuzz --replay"


@dataclass
class Hunt:
    """What came of the cases so far.

    Attributes:
        kinds: how many were ``equal``, ``refused``, ``invalid`` or a ``finding``.
        refusals: how many by their first words; ``example`` has one whole message of each.
        findings: the cases and what is wrong with them.
        seconds: of the whole run.
    """

    kinds: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    entries: Counter[str] = field(default_factory=Counter)
    example: dict[str, str] = field(default_factory=dict)
    findings: list[tuple[Case, Verdict]] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, case: Case, verdict: Verdict) -> None:
        """Count one."""
        self.kinds[verdict.kind] += 1
        if verdict.kind in ("equal", "refused"):
            entries = sorted(case.spec) or ["one process"]
            self.entries.update(f"{entry}: {verdict.kind}" for entry in entries)
        if verdict.kind == "refused":
            self.refusals[verdict.sort] += 1
            self.example.setdefault(verdict.sort, verdict.why)
        if verdict.kind == "finding":
            self.findings.append((case, verdict))

    @property
    def cases(self) -> int:
        """How many were trained or refused."""
        return self.kinds["equal"] + self.kinds["refused"] + self.kinds["finding"]

    def __str__(self) -> str:
        lines = [
            f"{self.cases} cases in {self.seconds:.0f} s: {self.kinds['equal']} equal, {self.kinds['refused']} refused, "
            f"{self.kinds['finding']} findings; {self.kinds['invalid']} invalid",
            *(f"{number:6} {words}" for words, number in self.refusals.most_common()),
        ]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """What is written down."""
        return dict(
            commit=_commit(),
            torch=torch.__version__,
            cases=self.cases,
            seconds=round(self.seconds),
            kinds=dict(sorted(self.kinds.items())),
            entries=dict(sorted(self.entries.items())),
            refusals=[
                dict(count=number, words=words, example=self.example[words])
                for words, number in self.refusals.most_common()
            ],
            findings=[dict(case=case.to_json(), why=verdict.why) for case, verdict in self.findings],
        )

    def merge(self, other: dict[str, Any]) -> None:
        """Add the counts that another process wrote."""
        self.kinds.update(other["kinds"])
        self.entries.update(other["entries"])
        for refusal in other["refusals"]:
            self.refusals[refusal["words"]] += refusal["count"]
            self.example.setdefault(refusal["words"], refusal["example"])
        for finding in other["findings"]:
            verdict = Verdict(kind="finding", why=finding["why"])
            self.findings.append((Case.from_json(finding["case"]), verdict))
        self.seconds = max(self.seconds, other["seconds"])

    def write(self, path: Path = RESULTS) -> None:
        """Keep it as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_json(), indent=1) + "\n")


def _commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return found.stdout.strip()


def told(case: Case, verdict: Verdict) -> str:
    """A finding, with how to run it again."""
    return f"{verdict.why}\n    {REPLAY} '{case.to_json()}'"


def hunt(
    seed: int,
    found: Hunt,
    *,
    seconds: float,
    cases: int | None = None,
    stride: int = 1,
) -> Iterator[tuple[Case, Verdict]]:
    """Judge the cases of one seed after another, until time or cases are used up.

    Args:
        seed: the first one's.
        found: where to count.
        seconds: how long; a case that has begun is finished.
        cases: how many at most.
        stride: from one seed to the next: the number of processes that hunt side by side.
    """
    start = time.monotonic()
    while time.monotonic() - start < seconds and (cases is None or found.cases < cases):
        case = random_case(seed)
        seed += stride
        verdict = judge(case)
        found.seconds = time.monotonic() - start
        found.add(case, verdict)
        yield case, verdict
