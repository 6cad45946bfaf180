"""Ranks that are about to connect wait for each other only as long as the missing ones can still come."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from meshfold.mesh import CollectiveError, Mesh, barrier
from meshfold.mesh.errors import LaunchError
from meshfold.mesh.processes import create_group
from meshfold.mesh.processes.rendezvous import Address, meet
from meshfold.mesh.testing import close_pools, run_on_ranks
from meshfold.mesh.watchdog import diagnosis, monitor
from meshfold.mesh.watchdog.rank_errors import report_errors

LONG = timedelta(seconds=300)
SECONDS = 120.0


def gone() -> Address:
    """The address of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return replace(Address.own(), pid=process.pid)


def test_all_that_come_know_each_other() -> None:
    store, known = HashStore(), [{} for _ in range(3)]  # type: ignore[var-annotated]
    comers = [threading.Thread(target=meet, args=(store, "a", rank, range(3), LONG, known[rank])) for rank in range(3)]
    for comer in comers:
        comer.start()
    for comer in comers:
        comer.join()
    assert known == [dict.fromkeys(range(3), Address.own())] * 3


def test_ranks_that_do_not_come_are_named_when_the_time_is_over() -> None:
    store = HashStore()
    store.set("meshfold meeting/a/2", '{"host": "h", "space": "", "pid": 1}')
    with pytest.raises(RuntimeError, match=r"^timed out after 0\.2 s: ranks 1, 3 of 4 did not arrive$"):
        meet(store, "a", 0, range(4), timedelta(seconds=0.2), {})


def test_a_rank_whose_process_is_gone_is_not_waited_for() -> None:
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"^rank 1 ended before all ranks had joined$"):
        meet(HashStore(), "a", 0, range(2), LONG, {1: gone()})
    assert time.monotonic() - began < SECONDS


def test_nor_one_that_came_and_ended() -> None:
    store, away = HashStore(), gone()
    store.set("meshfold meeting/a/1", f'{{"host": "{away.host}", "space": "{away.space}", "pid": {away.pid}}}')
    with pytest.raises(RuntimeError, match=r"^rank 1 ended before all ranks had joined$"):
        meet(store, "a", 0, range(2), LONG, {})


@pytest.mark.parametrize("other", [dict(host="elsewhere"), dict(space="pid:[1]")])
def test_what_cannot_be_seen_from_here_is_not_gone(other: dict[str, Any]) -> None:
    assert gone().is_gone(Address.own())
    assert not replace(gone(), **other).is_gone(Address.own())


def test_a_wait_can_be_broken_off() -> None:
    with pytest.raises(RuntimeError, match="was cancelled"):
        meet(HashStore(), "a", 0, range(2), LONG, {}, lambda: True)


class Trouble(Exception):
    """Of the tests."""


@report_errors
def fail() -> None:
    raise Trouble("the labels are wrong")


def one_fails_while_others_make_a_group(watched: bool) -> tuple[str, float]:
    diagnosis._BEAT_S = 0.1  # of this pool's ranks, which end with the test
    if watched:
        monitor.watch(300.0)
    mesh = Mesh(dict(pipe=4))
    barrier(mesh.group("pipe"))
    began = time.monotonic()
    try:
        if mesh.rank == 3 and watched:
            fail()
        if mesh.rank != 3:
            create_group((0, 1, 2, 3), "of the test")
    except (CollectiveError, Trouble) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "no error", time.monotonic() - began


def test_those_who_make_a_group_end_with_the_cause() -> None:
    close_pools()
    try:
        found = run_on_ranks(4, one_fails_while_others_make_a_group, True)
    finally:
        close_pools()  # its connections are broken now
    assert found[3][0] == "Trouble: the labels are wrong"
    for rank, (text, seconds) in enumerate(found[:3]):
        assert text.startswith("CollectiveError: rank 3 failed, so the others end: Trouble: the labels are")
        assert text.endswith(f"(Rank {rank} was in creating a process group of ranks 0, 1, 2, 3.)")
        assert seconds < SECONDS


def free_port() -> int:
    """A port that nobody listens on, and that the system gives to nobody who asks for any."""
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def without_a_launcher(python: str, folder: Path, program: str, ranks: int, absent: int = -1) -> list[tuple[int, str]]:
    """Start ranks as srun and mpirun do: nobody looks after them. Their exit codes and what they wrote to standard error."""
    file = folder / "program.py"
    file.write_text(program)
    places = dict(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1")
    places |= dict(MASTER_PORT=str(free_port()), GLOO_SOCKET_IFNAME="lo")
    started = [
        subprocess.Popen(
            [python, str(file)],
            env=os.environ | places | dict(RANK=str(rank), LOCAL_RANK=str(rank)),
            cwd=folder,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
        if rank != absent
    ]
    try:
        return [(rank.wait(SECONDS), rank.communicate()[1]) for rank in started]
    finally:
        for rank in started:
            rank.kill()


@pytest.mark.usefixtures("warm_commands")
def test_a_rank_that_comes_later_is_waited_for_in_silence(tmp_path: Path) -> None:
    program = (
        "import os, time\n"
        "from meshfold.mesh.processes.process_group import start\n"
        "if os.environ['RANK'] == '0':\n"
        "    open('comes', 'w').close()\n"
        "else:\n"
        "    while not os.path.exists('comes'):\n"
        "        time.sleep(0.05)\n"
        "    time.sleep(2.5)\n"
        "start(device='cpu', timeout=300).close()\n"
    )
    assert without_a_launcher(sys.executable, tmp_path, program, 2) == [(0, ""), (0, "")]


@pytest.mark.usefixtures("warm_commands")
def test_a_rank_that_is_never_started_is_named_within_the_limit(tmp_path: Path) -> None:
    program = (
        "import glob, os, time\n"
        "from meshfold.mesh.processes.process_group import start\n"
        "open('comes ' + os.environ['RANK'], 'w').close()\n"
        "while len(glob.glob('comes *')) < 2:\n"  # one that starts much later would be missing too
        "    time.sleep(0.01)\n"
        "start(device='cpu', timeout=2)\n"
    )
    found = without_a_launcher(sys.executable, tmp_path, program, 3, absent=2)
    for code, text in found:
        assert code == 1
        assert "could not start gloo at 127.0.0.1:" in text
    assert any("timed out after 2 s: rank 2 of 3 did not arrive" in text for _, text in found)


@pytest.mark.usefixtures("warm_commands")
def test_without_a_watchdog_a_group_with_a_rank_that_is_gone_is_an_error(tmp_path: Path) -> None:
    program = (
        "import glob, os, time\n"
        "from meshfold.mesh import Mesh\n"
        "from meshfold.mesh.processes.process_group import start\n"
        "start(device='cpu', timeout=300)\n"
        "mesh = Mesh(dict(data=2, tensor=2))\n"
        "open(f'started {mesh.rank}', 'w').close()\n"
        "if mesh.rank == 3:\n"
        "    while len(glob.glob('started *')) < 4:\n"  # those who start still would find it gone
        "        time.sleep(0.05)\n"
        "    os._exit(5)\n"
        "if mesh.rank == 1:\n"
        "    try:\n"
        "        mesh.group('data')\n"
        "    finally:\n"
        "        open('over', 'w').close()\n"
        "while not os.path.exists('over'):\n"  # rank 0 serves the store
        "    time.sleep(0.05)\n"
        "os._exit(0)\n"
    )
    found = without_a_launcher(sys.executable, tmp_path, program, 4)
    assert [code for code, _ in found] == [0, 1, 0, 5]
    assert f"{LaunchError.__name__}: creating a process group of ranks 1, 3 failed: rank 3 ended" in found[1][1]
