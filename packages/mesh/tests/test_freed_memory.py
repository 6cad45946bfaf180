"""Memory that a step on the CPU frees serves the next one."""

from __future__ import annotations

import os
import subprocess

import pytest

STEPS = """
import resource, torch
from meshfold.mesh import start
from meshfold.mesh.processes.freed_memory import keep_freed_memory

def step():
    tensors = [torch.empty(size * 2**18).fill_(1.0) for size in (40, 8, 8, 8, 1)]  # MiB; glibc maps the first by default

def faults():
    for _ in range(8):  # kept memory has its order after four to six
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

alone = faults()
with start(device="cpu"):
    print(alone, faults(), keep_freed_memory())
"""


def _has_glibc() -> bool:
    try:
        return "glibc" in (os.confstr("CS_GNU_LIBC_VERSION") or "")
    except (AttributeError, ValueError):  # not Linux, or another C library
        return False


def _ran(python: str, **variables: str) -> tuple[int, int, bool]:
    """Return a step's page faults before and after :func:`meshfold.mesh.start`, and whether freed memory is kept."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    found = subprocess.run(
        [python, "-c", STEPS], env={**environment, **variables}, capture_output=True, text=True, check=True, timeout=120
    ).stdout.split()
    return int(found[-3]), int(found[-2]), found[-1] == "True"


@pytest.mark.skipif(not _has_glibc(), reason="another C library has no mallopt")
def test_a_step_on_the_cpu_gets_no_new_pages(torch_python: str) -> None:
    alone, kept, keeps = _ran(torch_python)
    assert keeps
    assert kept < 200
    assert alone > 2 * kept + 10  # 10,000 with pages of 4 KiB, a few dozen with huge ones


@pytest.mark.parametrize("variable", ["MALLOC_ARENA_MAX=2", "GLIBC_TUNABLES=glibc.malloc.arena_max=2"])
def test_what_a_user_has_set_stays(torch_python: str, variable: str) -> None:
    name, _, value = variable.partition("=")
    _, _, keeps = _ran(torch_python, **{name: value})
    assert not keeps
