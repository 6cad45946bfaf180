"""Damage folders at random, and judge what reading them comes to: refused by an error of ours, or unchanged."""

from __future__ import annotations

import json
import random
import resource
import shutil
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from integration_tests.damage.kinds import KINDS, NotApplicable
from integration_tests.damage.subjects import Contents, Subject, same
from integration_tests.house import ROOT
from meshfold.mesh import MeshfoldError

RESULTS = ROOT / "integration_tests" / "results" / "damaged_files.json"
ROOM = 3 * 2**30
"""Bytes of address space beyond what the process has: what takes more fails."""

SLACK = 4096
"""Bytes of a tensor that may be larger than the folder: of a model that is built, say."""


@dataclass
class Hunt:
    """What was found.

    Attributes:
        counts: (subject, kind of damage, what came of it) to how often.
        findings: how to do it again, and what was wrong.
    """

    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)

    @property
    def damages(self) -> int:
        """How many there were."""
        return sum(self.counts.values())

    def write(self, path: Path, seed: int) -> None:
        """Write the counts."""
        by: dict[str, dict[str, dict[str, int]]] = {}
        for (subject, kind, outcome), count in sorted(self.counts.items()):
            by.setdefault(subject, {}).setdefault(kind, {})[outcome] = count
        outcomes: Counter[str] = Counter()
        for (_, _, outcome), count in self.counts.items():
            outcomes[outcome] += count
        told = {
            "damages": self.damages,
            "seed": seed,
            "findings": self.findings,
            "outcomes": dict(sorted(outcomes.items())),
            "by subject and kind of damage": by,
            "torch": torch.__version__,
        }
        path.write_text(json.dumps(told, indent=1) + "\n")


class Damager:
    """Keeps a whole folder of each kind, and damages copies of it."""

    def __init__(self, scratch: Path, subjects: list[Subject]) -> None:
        self._scratch, self._subjects = scratch, subjects
        self._whole: dict[str, Contents] = {}

    def _folder(self, subject: Subject, seed: int) -> Path:
        folder = self._scratch / f"{subject.name}-{seed}".replace(" ", "-").replace(",", "").replace(".", "")
        if not folder.exists():
            subject.make(folder, seed)
        return folder

    def _read_whole(self, subject: Subject) -> Contents:
        if subject.name not in self._whole:
            copy = self._copy(self._folder(subject, 1))
            self._whole[subject.name] = subject.read(copy)
        return self._whole[subject.name]

    def _copy(self, folder: Path) -> Path:
        copy = self._scratch / "damaged"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder, copy, symlinks=True, copy_function=shutil.copy2)
        return copy

    def once(self, seed: int, found: Hunt) -> None:
        """Make one damage, and judge it."""
        dice = random.Random(seed)
        subject = dice.choice(self._subjects)
        whole, other = self._read_whole(subject), self._folder(subject, 2)
        folder = self._copy(self._folder(subject, 1))
        files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != subject.spared]
        while True:
            kind, path = dice.choice([*KINDS]), dice.choice(files)
            twins = other / path.parent.relative_to(folder) if subject.named else folder / "nowhere"
            try:
                what = KINDS[kind](path, dice, twins)
                break
            except NotApplicable:
                continue
        if subject.after is not None:
            subject.after(folder)
        outcome = self._outcome(subject, folder, whole)
        found.counts[subject.name, kind, outcome.partition(":")[0]] += 1
        if outcome not in ("refused", "unchanged", "read as other data"):
            found.findings.append(f"seed {seed}: {subject.name}, {path.relative_to(folder)}, {kind}, {what}: {outcome}")

    def _outcome(self, subject: Subject, folder: Path, whole: Contents) -> str:
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
        try:
            with limited(size), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                read = subject.read(folder)
        except MeshfoldError:
            return "refused"
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            last = traceback.extract_tb(error.__traceback__)[-1]
            return f"error: {type(error).__name__}: {str(error)[:200]} at {last.filename}:{last.lineno}"
        if same(read, whole):
            return "unchanged"
        return "wrong: other contents were read" if subject.exact else "read as other data"


@contextmanager
def limited(size: int) -> Iterator[None]:
    """Fail what allocates a tensor larger than the files that are read, or takes gigabytes of memory in any way."""
    real = torch.empty

    def checked(*shape: Any, **options: Any) -> Any:
        made = real(*shape, **{**options, "device": "meta"}) if options.get("device", "cpu") in ("cpu", None) else None
        if made is not None and made.numel() * made.element_size() > size + SLACK:
            raise AssertionError(f"a tensor of {made.numel() * made.element_size():,} bytes for files of {size:,}")
        return real(*shape, **options)

    before = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    torch.empty = checked
    resource.setrlimit(resource.RLIMIT_AS, (now + ROOM, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        torch.empty = real


def hunt(scratch: Path, subjects: list[Subject], seeds: range) -> Hunt:
    """Make a damage of each seed."""
    found, damager = Hunt(), Damager(scratch, subjects)
    for seed in seeds:
        damager.once(seed, found)
    return found
