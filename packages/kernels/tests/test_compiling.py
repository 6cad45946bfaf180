"""Of processes that need a kernel at the same moment one compiles it, and the others take what it has made."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

pytest.importorskip("numba")

KERNEL = """
from numba import njit
from meshfold.kernels._numba import one_process_compiles

@one_process_compiles
@njit(cache=True)
def doubled(x):
    return x + x
"""

# Each process looks whether the kernel is there and then takes its time, in which the other one looks too, if it can.
TWO_PROCESSES = """
import glob, os, sys, time
from numba.core.caching import FunctionCache
from a_kernel import doubled

look = FunctionCache.load_overload
def look_slowly(*given):
    found = look(*given)
    open(f"looked {os.getpid()}", "w").close()
    until = time.monotonic() + PATIENCE_S
    while len(glob.glob("looked *")) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    return found
FunctionCache.load_overload = look_slowly

children = []
for _ in range(2):
    child = os.fork()
    if child == 0:
        right = doubled(3) == 6 and doubled(4) == 8
        os._exit(sum(doubled.stats.cache_misses.values()) if right else 99)
    children.append(child)
print(sorted(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
"""


def printed(python: str, folder: Path, program: str) -> str:
    """What a program prints that may import ``a_kernel``, which nobody has compiled yet."""
    (folder / "a_kernel.py").write_text(KERNEL)
    done = subprocess.run([python, "-c", program], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_of_two_processes_one_compiles(warm_python: str, tmp_path: Path) -> None:
    assert printed(warm_python, tmp_path, "PATIENCE_S = 1.0\n" + TWO_PROCESSES) == "[0, 1]"


def test_where_nothing_can_be_locked_each_compiles_for_itself(warm_python: str, tmp_path: Path) -> None:
    refuse = (
        "PATIENCE_S = 100.0\nimport fcntl\ndef refuse(*given): raise OSError('no locks here')\nfcntl.lockf = refuse\n"
    )
    assert printed(warm_python, tmp_path, refuse + TWO_PROCESSES) == "[1, 1]"


def test_what_cannot_be_compiled_says_so_and_leaves_the_lock(warm_python: str, tmp_path: Path) -> None:
    program = """
from numba.core.errors import TypingError
from a_kernel import doubled
for _ in range(2):
    try:
        doubled(None)
    except TypingError as error:
        print("NoneType" in str(error) or "none" in str(error))
print(doubled(3))
"""
    assert printed(warm_python, tmp_path, program).split() == ["True", "True", "6"]
