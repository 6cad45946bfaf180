"""A lock on a folder: it refuses a second writer, and nothing is left of it when its process ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from meshfold.checkpoint.folder.lock import hold_lock, is_locked
from meshfold.engine import CheckpointError
from meshfold.mesh import MeshfoldError

HOLDER = """
import sys, time
from pathlib import Path
from meshfold.checkpoint.folder.lock import hold_lock
with hold_lock(Path(sys.argv[1]), doing="training into it"):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_process_is_told_who_holds_it_and_a_kill_releases_it(tmp_path: Path) -> None:
    lock = tmp_path / ".run.lock"
    with subprocess.Popen([sys.executable, "-c", HOLDER, lock], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert is_locked(lock)
        told = (
            rf"{tmp_path} is in use: process {holder.pid} on {socket.gethostname()} has been training into it since 20"
        )
        with pytest.raises(CheckpointError, match=told), hold_lock(lock, doing="saving"):
            raise AssertionError("both hold it")
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert lock.exists()  # left by the kill
    assert not is_locked(lock)
    with hold_lock(lock, doing="saving"):
        assert is_locked(lock)
    assert [*tmp_path.iterdir()] == []


def test_two_in_one_process_are_two(tmp_path: Path) -> None:
    lock = tmp_path / ".run.lock"
    refused = pytest.raises(MeshfoldError, match=f"process {os.getpid()} on ")
    with hold_lock(lock, doing="saving"), refused, hold_lock(lock, doing="exporting"):
        raise AssertionError("both hold it")
    with hold_lock(lock, doing="exporting"):
        pass


def test_a_forked_child_that_outlives_its_parent_does_not_hold_it(tmp_path: Path) -> None:
    lock = tmp_path / ".run.lock"
    ready, wake = os.pipe(), os.pipe()
    with hold_lock(lock, doing="saving"):
        child = os.fork()
        if child == 0:
            os.write(ready[1], b"x")
            os.read(wake[0], 1)
            os._exit(0)
        os.read(ready[0], 1)
    assert not is_locked(lock)
    with hold_lock(lock, doing="saving"):
        os.write(wake[1], b"x")
        os.waitpid(child, 0)
        assert is_locked(lock)  # the child's end changes nothing


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    (tmp_path / ".run.lock").symlink_to(tmp_path / "notes")
    with pytest.raises(OSError, match="symbolic links"), hold_lock(tmp_path / ".run.lock", doing="saving"):
        raise AssertionError("it was followed")
    assert (tmp_path / "notes").read_text() == "mine"


def test_what_a_killed_process_was_about_to_write_is_no_error(tmp_path: Path) -> None:
    lock = tmp_path / ".run.lock"
    lock.write_text('{"pid": 1')
    with hold_lock(lock, doing="saving"):
        lock.write_text("[" * 100_000)
        refused = pytest.raises(MeshfoldError, match="another process is writing there")
        with refused, hold_lock(lock, doing="saving"):
            raise AssertionError("both hold it")
