"""Files of every kind, damaged at random: read as they were, or refused by an error of ours with nothing changed or allocated."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from integration_tests.damage.hunt import RESULTS, Damager, Hunt, hunt
from integration_tests.damage.kinds import KINDS
from integration_tests.damage.subjects import Contents, Subject, subjects
from meshfold.engine import CheckpointError

QUICK, ALL = 100, 2000


def test_a_covering_selection(tmp_path: Path) -> None:
    """``MESHFOLD_DAMAGE_SEED`` begins elsewhere."""
    seed = int(os.environ.get("MESHFOLD_DAMAGE_SEED", "100000"))
    found = hunt(tmp_path, subjects(tmp_path), range(seed, seed + QUICK))
    assert not found.findings, "\n".join(found.findings)
    assert {kind for _, kind, _ in found.counts} == {*KINDS}
    assert {outcome for *_, outcome in found.counts} == {"refused", "unchanged", "read as other data"}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_of_them(tmp_path: Path) -> None:
    found = hunt(tmp_path, subjects(tmp_path), range(ALL))
    assert found.damages == ALL
    assert not found.findings, "\n".join(found.findings)


def test_the_counts_that_are_kept_are_of_all_and_without_a_finding() -> None:
    kept = json.loads(RESULTS.read_text())
    assert kept["damages"] >= ALL and kept["findings"] == []
    assert sum(kept["outcomes"].values()) == kept["damages"]
    assert {*kept["outcomes"]} <= {"refused", "unchanged", "read as other data"}


def outcomes(tmp_path: Path, read: object, *, exact: bool = True) -> Hunt:
    """What a reader of one file is judged as."""

    def make(folder: Path, seed: int) -> None:
        folder.mkdir()
        (folder / "a.json").write_text('{"a": [1, 2, 3, 4, 5]}')

    tmp_path.mkdir()
    found = Hunt()
    damager = Damager(tmp_path, [Subject("one", make, read, exact)])  # type: ignore[arg-type]
    for seed in range(40):
        damager.once(seed, found)
    return found


def test_a_reader_that_is_wrong_is_found(tmp_path: Path) -> None:
    """Each of the ways to be wrong, or the hunt could not find one."""

    def trusting(folder: Path) -> Contents:
        return json.loads((folder / "a.json").read_text())  # type: ignore[no-any-return]

    def greedy(folder: Path) -> Contents:
        import torch

        if json.loads((folder / "a.json").read_text()) != {"a": [1, 2, 3, 4, 5]}:
            torch.empty(2**30)
        return {}

    def careless(folder: Path) -> Contents:
        try:
            return trusting(folder)
        except Exception:
            return {"a": [1, 2, 3, 4, 5]}

    def refusing(folder: Path) -> Contents:
        path = folder / "a.json"
        if path.is_symlink() or not path.is_file() or path.read_text(errors="replace") != '{"a": [1, 2, 3, 4, 5]}':
            raise CheckpointError("it is damaged")
        return {}

    raw = outcomes(tmp_path / "raw", trusting).findings
    assert any("JSONDecodeError" in one for one in raw) and any("FileNotFoundError" in one for one in raw)
    assert any("other contents were read" in one for one in raw)
    assert any("a tensor of 4,294,967,296 bytes" in one for one in outcomes(tmp_path / "greedy", greedy).findings)
    assert all("other contents" in one for one in outcomes(tmp_path / "careless", careless).findings)
    assert not outcomes(tmp_path / "refusing", refusing).findings
