"""Jobs that are killed at random moments lose nothing and leave no process: ``make test`` a few kills, ``make test-all`` 200."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from integration_tests.kills import (
    FILE,
    LAUNCHERS,
    SCENARIOS,
    VICTIMS,
    Campaign,
    Job,
    Kill,
    campaigns,
    write,
)

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc tells which processes are left")


@pytest.mark.parametrize(
    ("name", "launcher", "kills"),
    [
        ("exporting", "meshfold run", 1),
        pytest.param("exporting", "meshfold run", 3, marks=pytest.mark.slow),
        pytest.param("asynchronous saving", "none", 3, marks=pytest.mark.slow),
    ],
)
def test_kills(name: str, launcher: str, kills: int, warm_python: str, tmp_path: Path) -> None:
    found = list(Campaign(name, launcher, warm_python, tmp_path.resolve(), random.Random(7)).run(kills))
    assert len(found) == kills
    wanted = VICTIMS if launcher != "none" else (*VICTIMS[:2], VICTIMS[0])
    assert tuple(kill.victim for kill in found) == wanted[:kills]


@pytest.mark.slow
def test_two_hundred_kills(warm_python: str, tmp_path: Path) -> None:
    found = list(campaigns(200, warm_python, tmp_path, seed=random.randrange(10**6)))
    assert len(found) == 200
    write(found, 0, tmp_path / "kills.json")
    assert json.loads((tmp_path / "kills.json").read_text())["kills"] == 200


def test_what_is_left_is_found(tmp_path: Path) -> None:
    left = subprocess.Popen(["sleep", "300"], cwd=tmp_path)
    job = Job(folder=tmp_path.resolve(), started=[left])
    with pytest.raises(AssertionError, match=r"processes left after 0\.3 s: \{\d+: b'sleep"):
        job.gone_after(0.3)
    assert left.wait() != 0


def test_the_result_file_is_of_200_kills_of_every_kind() -> None:
    found = json.loads(FILE.read_text())
    kills = [Kill(**one) for one in found["each"]]
    assert found["kills"] == len(kills) >= 200 and found["lost"] == 0
    assert {kill.scenario for kill in kills} == set(SCENARIOS)
    assert {kill.launcher for kill in kills} == set(LAUNCHERS)
    assert {kill.victim for kill in kills} == set(VICTIMS)
    assert found["before_the_first_step"] > 0
    for kill in kills:
        assert kill.seconds <= found["promised_seconds"][kill.launcher]
