"""Kills at random moments of training, saving, exporting and starting: nothing is lost, and no process is left.

::

    python -m integration_tests.kills --kills 200        writes integration_tests/results/kills.json

A job is killed (one of its ranks, all of them, or what started them), started again from its last complete checkpoint, killed
again, and so on to its last step. After each kill: all its processes end within the promised seconds; the last complete
checkpoint is one of a step that was announced as saved, or of a later one, and every tensor has its checksum; what was exported
is whole and of one step; other files in the folder are what they were. The losses of all steps are those of a run that was
never killed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from integration_tests import kill_program
from integration_tests.house import ROOT
from integration_tests.kill_program import CHECKPOINT, EXPORT, LOG, WATCHDOG_S, checksum
from integration_tests.warm_python import WarmPython
from meshfold.engine import Checkpoint

FILE = ROOT / "integration_tests" / "results" / "kills.json"
STEPS = 12
LAUNCHED_S = 30.0
"""Until all processes of a job are gone whose launcher watches, on a machine that does other things too"""
ALONE_S = WATCHDOG_S + 2 * LAUNCHED_S
"""The same where nobody watches: the ranks' watchdog, which begins when a rank that is just starting has come so far"""
_START_S = 180.0
_BUSY = 4
"""A kill fails when processes are left after so many times these limits; the file of results is held to the limits themselves"""
_FOREIGN = {"notes.txt": "mine", "exported/README of mine.txt": "mine too", "data/state.json": "{}"}


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A kind of job.

    Attributes:
        parallel: the spec.
        asynchronous: checkpoints are written while training goes on.
        export: after each step, as a Hugging Face folder in several files.
        command: ``meshfold train`` in place of a loop of one's own.
    """

    parallel: dict[str, Any]
    asynchronous: bool = False
    export: bool = False
    command: bool = False

    @property
    def ranks(self) -> int:
        """Return how many processes train."""
        return int(self.parallel.get("data", 1)) * int(self.parallel.get("tensor", 1))


SCENARIOS = {
    "training": Scenario(parallel=dict(data=2)),
    "asynchronous saving": Scenario(parallel=dict(tensor=2), asynchronous=True),
    "exporting": Scenario(parallel=dict(tensor=2), export=True),
    "state on disk": Scenario(parallel=dict(data=2, zero=dict(stage=3, placement="cpu", offload_path="scratch"))),
    "meshfold train": Scenario(parallel=dict(data=2), command=True),
}
VICTIMS = ("one rank", "all ranks", "launcher")
LAUNCHERS = ("meshfold run", "none")


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One kill and what it left.

    Attributes:
        scenario, launcher, victim: what was killed.
        step: that the job had announced last, in any of its starts; 0 before the first.
        seconds: until the last of its processes was gone.
        kept: the step of the checkpoint that was left; None if none was saved before.
    """

    scenario: str
    launcher: str
    victim: str
    step: int
    seconds: float
    kept: int | None


@dataclass(kw_only=True)
class Job:
    """The processes of one start, in a folder of their own."""

    folder: Path
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def processes(self) -> dict[int, bytes]:
        """Return all processes that run in the folder, with their commands."""
        found: dict[int, bytes] = {}
        for place in Path("/proc").glob("[0-9]*"):
            try:
                if (place / "cwd").readlink() != self.folder:
                    continue
                if (place / "stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                    continue
                found[int(place.name)] = (place / "cmdline").read_bytes()
            except OSError:
                continue
        return found

    def ranks(self) -> list[int]:
        """Return those that a launcher has started."""
        return [pid for pid, command in self.processes().items() if b"_bootstrap.py" in command]

    def kill(self, victims: Sequence[int]) -> None:
        """Kill processes, without a word before."""
        for victim in victims:
            try:
                os.kill(victim, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def gone_after(self, limit_s: float) -> float:
        """Wait until no process is left.

        Raises:
            AssertionError: if one is left after the limit.
        """
        began = time.monotonic()
        while left := self.processes():
            for process in self.started:
                process.poll()
            if time.monotonic() - began > limit_s:
                self.kill(list(left))
                raise AssertionError(f"processes left after {limit_s:g} s: {left}")
            time.sleep(0.05)
        for process in self.started:
            process.wait()
        return time.monotonic() - began


class Campaign:
    """One job that is killed and started again until it has come to its last step."""

    def __init__(self, name: str, launcher: str, python: str, folder: Path, chance: random.Random) -> None:
        """Args:
        name: of the scenario.
        launcher: who starts the ranks: ``"meshfold run"``, or ``"none"``, as srun and mpirun do.
        python: the interpreter.
        folder: an empty one.
        chance: decides when and whom.
        """
        self.name, self.launcher, self.python, self.chance = name, launcher, python, chance
        self.scenario, self.folder = SCENARIOS[name], folder

    def run(self, kills: int) -> Iterator[Kill]:
        """Kill so often, each time with a look at what is left; then let it come to its end and compare its losses."""
        whole = self._folder("whole")
        job = self._start(whole)
        self._await_end(job, whole)
        place = self._folder("killed")
        victims = itertools.cycle(VICTIMS[: 3 if self.launcher != "none" else 2])
        done, victim = 0, next(victims)
        while done < kills:
            if (self._kept(place) or 0) >= STEPS - 2:
                self._await_end(self._start(place), place)
                self._compare(place, whole)
                shutil.rmtree(place)
                place = self._folder("killed")
            kill = self._kill_once(place, victim)  # None: the job ended before it was struck
            if kill is not None:
                done, victim = done + 1, next(victims)
                yield kill
        self._await_end(self._start(place), place)
        self._compare(place, whole)
        self._check(place)

    # -- one kill ------------------------------------------------------------------------------------------------------

    def _kill_once(self, place: Path, victim: str) -> Kill | None:
        before = self._kept(place) or 0
        job = self._start(place)
        # Before the first step of a start as often as after some.
        if self.chance.random() < 0.3:
            time.sleep(self.chance.uniform(0.0, 4.0))
        else:
            self._await_step(job, place, min(before + self.chance.randint(1, 4), STEPS))
            time.sleep(self.chance.uniform(0.0, 0.15))
        step = self._trained(place)
        if not self._strike(job, victim):
            return None  # it had come to its end
        seconds = job.gone_after(_BUSY * (ALONE_S if self.launcher == "none" else LAUNCHED_S))
        kept = self._check(place)
        return Kill(
            scenario=self.name, launcher=self.launcher, victim=victim, step=step, seconds=round(seconds, 2), kept=kept
        )

    def _strike(self, job: Job, victim: str) -> bool:
        """Kill as soon as there is somebody to kill; False if the job has ended before."""
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            if any(process.poll() is not None for process in job.started):
                job.gone_after(_BUSY * ALONE_S)
                return False
            top = [process.pid for process in job.started]
            ranks = top if self.launcher == "none" else job.ranks()
            if victim == "launcher" or len(ranks) == self.scenario.ranks:
                chosen = {"launcher": top, "all ranks": ranks}.get(victim) or [self.chance.choice(ranks)]
                job.kill(chosen)
                return True
            time.sleep(0.02)
        raise AssertionError(f"no ranks to kill: {job.processes()}")

    def _await_step(self, job: Job, place: Path, step: int) -> None:
        deadline = time.monotonic() + _START_S
        while self._trained(place) < step:
            if any(process.poll() is not None for process in job.started):
                return
            assert time.monotonic() < deadline, f"step {step} does not come: {self._output(place)}"
            time.sleep(0.01)

    def _await_end(self, job: Job, place: Path) -> None:
        for process in job.started:
            code = process.wait(_START_S)
            assert code == 0, f"ended with code {code}: {self._output(place)}"
        job.gone_after(_BUSY * LAUNCHED_S)

    @staticmethod
    def _output(place: Path) -> str:
        return (place / "output.txt").read_text(errors="replace")[-3000:]

    # -- what is left ----------------------------------------------------------------------------------------------------

    def _check(self, place: Path) -> int | None:
        """Look at what a kill has left; returns the checkpoint's step."""
        for name, text in _FOREIGN.items():
            assert (place / name).read_text() == text, f"{name} was changed"
        kept = self._kept(place)
        saved = [line.get("of", line["step"]) for line in self._log(place) if line["what"] == "saved"]
        assert kept is not None or not saved, f"the checkpoint of step {max(saved)} is gone"
        if kept is not None:
            assert kept >= max(saved, default=0), f"step {max(saved)} was saved, and {kept} is there"
        if self.scenario.export:
            self._check_exports(place)
        return kept

    def _kept(self, place: Path) -> int | None:
        path = place / ("run/checkpoint" if self.scenario.command else CHECKPOINT)
        if not path.exists() and not path.with_name(f".{path.name}.old").exists():
            return None
        found = Checkpoint(path)
        found.verify()
        return int(found.state["step"])

    def _check_exports(self, place: Path) -> None:
        """Check that what was announced as exported is there, and that every exported folder is whole and of its step."""
        right = {line["step"]: line["sum"] for line in self._log(self.folder / "whole") if line["what"] == "exported"}
        done = {line["step"] for line in self._log(place) if line["what"] == "exported"}
        there = {int(folder.name.removeprefix("step-")): folder for folder in (place / EXPORT).glob("step-*")}
        assert done <= set(there), f"steps {done - set(there)} were exported, and are gone"
        for step, folder in there.items():
            assert abs(checksum(folder) - right[step]) < 1e-6 * right[step], f"{folder} is not of its step"

    def _compare(self, place: Path, whole: Path) -> None:
        right = {line["step"]: line["loss"] for line in self._log(whole) if line["what"] == "trained"}
        assert sorted(right) == list(range(1, STEPS + 1))
        mine = [line for line in self._log(place) if line["what"] == "trained"]
        assert {line["step"] for line in mine} == set(right)
        for line in mine:
            assert abs(line["loss"] - right[line["step"]]) < 1e-6, (line, right[line["step"]])

    def _trained(self, place: Path) -> int:
        """Return the step that was announced last, by any start; 0 before the first."""
        return max((line["step"] for line in self._log(place) if line["what"] == "trained"), default=0)

    def _log(self, place: Path) -> list[dict[str, Any]]:
        """Return what the job has announced; a line that a kill has cut in two is none."""
        path = place / ("run/metrics.jsonl" if self.scenario.command else LOG)
        found: list[dict[str, Any]] = []
        for text in path.read_text().splitlines() if path.exists() else []:
            try:
                found.append(json.loads(text))
            except ValueError:
                continue
        if self.scenario.command:  # each step is saved before the next one begins
            losses = [line for line in found if "loss" in line]
            found = [dict(what="trained", step=line["step"], loss=line["loss"]) for line in losses]
            found += [dict(what="saved", step=line["step"] - 1) for line in losses if line["step"] > 1]
        return found

    # -- the job -----------------------------------------------------------------------------------------------------------

    def _folder(self, name: str) -> Path:
        place = self.folder / name
        for file, text in _FOREIGN.items():
            (place / file).parent.mkdir(parents=True, exist_ok=True)
            (place / file).write_text(text)
        (place / "scratch").mkdir()
        (place / "texts").mkdir()
        (place / "texts" / "a.txt").write_text("a document to train on. " * 60)
        return place

    def _start(self, place: Path) -> Job:
        job = Job(folder=place)
        environment = dict(os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", PYTHONPATH=str(ROOT))
        environment["MESHFOLD_WATCHDOG"] = str(WATCHDOG_S)
        orders = json.dumps(
            dict(
                parallel=self.scenario.parallel,
                steps=STEPS,
                asynchronous=self.scenario.asynchronous,
                export=self.scenario.export,
            )
        )
        program = [kill_program.__file__, orders]
        if self.scenario.command:
            program = [
                "-m",
                "meshfold.cli",
                "train",
                "--data",
                "texts",
                "--out",
                "run",
                "--resume",
                "auto",
                "--no-plan",
            ]
            program += ["--set", "hidden=16", "layers=1", "heads=2", "--seq-len", "16", "--batch-size", "4"]
            program += [
                "--steps",
                str(STEPS),
                "--save-every",
                "1",
                "--parallel",
                "data=2",
                "--watchdog",
                str(WATCHDOG_S),
            ]
        if self.launcher != "none":
            start = [] if self.scenario.command else ["-m", "meshfold.cli", "run", "--ranks", str(self.scenario.ranks)]
            self._popen(job, [*start, *program], environment, place)
            return job
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        ranks = self.scenario.ranks
        for rank in range(ranks):
            mine: dict[str, object] = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks)
            mine |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
            self._popen(job, program, environment | {name: str(value) for name, value in mine.items()}, place)
        return job

    def _popen(self, job: Job, words: list[str], environment: dict[str, str], place: Path) -> None:
        with (place / "output.txt").open("ab") as output:
            job.started.append(
                subprocess.Popen(
                    [self.python, *words],
                    cwd=place,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                )
            )


def campaigns(
    kills: int, python: str, folder: Path, seed: int, names: Sequence[str] = tuple(SCENARIOS)
) -> Iterator[Kill]:
    """Share kills out over all scenarios and launchers; ``meshfold train`` has ranks of its own alone."""
    pairs = [(name, launcher) for name in names for launcher in LAUNCHERS]
    chance = random.Random(seed)
    for number, (name, launcher) in enumerate(pairs):
        share = (number + 1) * kills // len(pairs) - number * kills // len(pairs)
        if share:
            place = folder / f"{name}, {launcher}".replace(" ", "_")
            place.mkdir()
            yield from Campaign(name, launcher, python, place.resolve(), chance).run(share)
            shutil.rmtree(place)


def write(found: Sequence[Kill], seed: int, path: Path = FILE) -> None:
    """Write what was found: how often, how long it took, and every kill."""
    counts = Counter((kill.scenario, kill.launcher, kill.victim) for kill in found)
    rows = [
        dict(
            scenario=name,
            launcher=launcher,
            victim=victim,
            kills=count,
            longest_seconds=max(
                kill.seconds
                for kill in found
                if (kill.scenario, kill.launcher, kill.victim) == (name, launcher, victim)
            ),
        )
        for (name, launcher, victim), count in sorted(counts.items())
    ]
    answer = dict(
        kills=len(found),
        before_the_first_step=sum(kill.step == 0 for kill in found),
        lost=0,
        seed=seed,
        promised_seconds={"meshfold run": LAUNCHED_S, "none": ALONE_S},
        watchdog_seconds=WATCHDOG_S,
        torch=torch.__version__,
        by_kind=rows,
    )
    lines = ",\n".join(json.dumps(asdict(kill)) for kill in found)
    text = json.dumps(answer, indent=1).removesuffix("\n}") + f',\n "each": [\n{lines}\n]\n}}\n'
    path.write_text(text)


def main(words: Sequence[str] | None = None) -> None:
    """Kill, and write the result file."""
    parser = argparse.ArgumentParser(prog="python -m integration_tests.kills")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=list(SCENARIOS), choices=list(SCENARIOS), metavar="SCENARIO")
    parser.add_argument("--out", type=Path, default=FILE)
    asked = parser.parse_args(words)
    found: list[Kill] = []
    with WarmPython() as warm, tempfile.TemporaryDirectory(prefix="meshfold-kills-") as folder:
        for kill in campaigns(asked.kills, warm.python, Path(folder), asked.seed, asked.only):
            found.append(kill)
            write(found, asked.seed, asked.out)
            print(len(found), kill, flush=True)


if __name__ == "__main__":
    main()
