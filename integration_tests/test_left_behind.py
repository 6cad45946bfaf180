"""A test that leaves something behind fails, with a sentence that names it, and the next one finds nothing of it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from integration_tests.house import ROOT

TESTS = """
import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist

from integration_tests import left_behind

END = threading.Event()


def test_leaves_nothing():
    with subprocess.Popen(["true"]):
        pass
    threading.Thread(target=time.sleep, args=(0.05,), name="meshfold short").start()


def test_leaves_a_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def test_finds_no_group():
    assert not dist.is_initialized()


def test_leaves_a_thread():
    left_behind.GRACE_S = 0.3
    threading.Thread(target=END.wait, daemon=True, name="meshfold watchdog").start()


@pytest.fixture(autouse=True)
def long():
    left_behind.GRACE_S = 30.0


@pytest.fixture(scope="module")
def waiting():
    with subprocess.Popen(["sleep", "100"]) as process:
        yield process
        process.kill()


def test_uses_a_process_of_all_tests(waiting):
    assert waiting.poll() is None


def test_leaves_a_process():
    left_behind.GRACE_S = 0.3
    subprocess.Popen(["sleep", "99"])


def test_the_process_of_all_tests_runs(waiting):
    assert waiting.poll() is None
    END.set()
"""


def test_what_a_test_leaves_behind_is_named_and_ended(warm_python: str, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    words = ["-p", "conftest", "-p", "no:cacheprovider", "-q", "--rootdir", str(tmp_path), "-c", os.devnull]
    ended = subprocess.run(
        [warm_python, "-m", "pytest", *words, str(tmp_path / "test_it.py")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        env=dict(os.environ, PYTHONPATH=str(ROOT)),
    )
    said = ended.stdout
    assert "7 passed" in said and "3 errors" in said, said + ended.stderr
    for name, left in (
        ("group", "an open process group of 1 ranks over gloo: use `with` for what starts it"),
        ("thread", "threads (meshfold watchdog): close the engine, the store or the save that started them"),
        ("process", "child processes ("),
    ):
        part = said.partition(f"ERROR at teardown of test_leaves_a_{name} ")[2]
        assert part.split("\n")[1].startswith(f"the test left behind {left}"), said
    assert " sleep 99): wait for them, or end them" in said
