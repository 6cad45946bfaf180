"""What is slow to import is imported once for all ranks, not by each of them."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from meshfold.mesh.testing import close_pools, fork_server, pool, run_on_ranks


def who() -> tuple[int, bool]:
    return os.getpid(), "torch._dynamo" in sys.modules


def test_ranks_have_what_optimizers_import() -> None:
    assert all(there for _, there in run_on_ranks(2, who))


def numba_is_registered() -> bool:
    from numba.core.imputils import builtin_registry
    from numba.core.registry import cpu_target

    return builtin_registry in cpu_target.target_context._registries


def test_ranks_have_what_the_first_kernel_of_numba_registers() -> None:
    pytest.importorskip("numba", reason="needs numba, which meshfold-kernels installs")
    close_pools()  # ranks of other tests were forked before numba was imported
    assert run_on_ranks(1, numba_is_registered) == [True]


@pytest.fixture(scope="module")
def own_pools() -> Iterator[pool.Pools]:
    """With a fork server of its own, which knows nothing of other tests."""
    pools = pool.Pools()
    yield pools
    pools.close()


@pytest.fixture
def pools(own_pools: pool.Pools, monkeypatch: pytest.MonkeyPatch) -> pool.Pools:
    monkeypatch.setattr("meshfold.mesh.testing.run.POOLS", own_pools)
    # What this process has imported for all tests takes seconds, and no test here needs it on its ranks.
    monkeypatch.setattr(fork_server.ForkServer, "preload", lambda self: 0.0)
    return own_pools


def import_late() -> tuple[int, float]:
    """When its process first needed a slow package, in whose place a small one of ours is looked at."""
    had = "numpy.doc.ufuncs" in sys.modules
    import numpy.doc.ufuncs  # noqa: F401  nobody else does

    return os.getpid(), had


def test_what_a_function_imports_new_ranks_have(pools: pool.Pools) -> None:
    (first, had), _ = run_on_ranks(2, import_late)
    close_pools()
    (second, has), _ = run_on_ranks(2, import_late)
    assert first != second and not had and has


def test_a_rank_looks_at_its_new_modules_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at an older one would copy a page of memory that ranks share."""
    looked: list[str] = []

    class Watched(dict[str, object]):
        def get(self, name: str, default: object = None) -> object:
            looked.append(name)
            return super().get(name, default)

    modules = Watched({"numpy": 1, "numba": 2, "other": 3, "einops": None, "numpy.late": 4, "torch._inductor.late": 5})
    monkeypatch.setattr(fork_server, "sys", SimpleNamespace(modules=modules))
    assert fork_server.worth_preloading(4) == ["numpy.late", "torch._inductor.late"]
    assert looked == ["einops", "numpy.late", "torch._inductor.late"]
    assert fork_server.worth_preloading(0) == []
    assert fork_server.worth_preloading() == ["numpy", "numba", "numpy.late", "torch._inductor.late"]


def test_new_ranks_come_from_the_process_that_forked_those_before(pools: pool.Pools) -> None:
    run_on_ranks(1, who)
    before = pools._fork_server
    [(old, _)] = run_on_ranks(1, who)
    close_pools()
    with pytest.raises(ProcessLookupError):
        os.kill(old, 0)
    [(new, _)] = run_on_ranks(1, who)
    assert new != old and pools._fork_server is before


@pytest.mark.parametrize(("seconds", "anew"), [(0.1, False), (2.0, True)])
def test_ranks_that_lack_slow_modules_are_forked_anew(
    seconds: float, anew: bool, pools: pool.Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {size: run_on_ranks(size, who) for size in (1, 2)}
    with monkeypatch.context() as patch:
        patch.setattr(fork_server.ForkServer, "preload", lambda self: seconds)
        second = run_on_ranks(2, who)
    after = {1: run_on_ranks(1, who), 2: run_on_ranks(2, who)}
    assert (second != before[2]) == anew
    assert (after[1] != before[1]) == anew  # each size when it is asked for next
    assert after[2] == second  # once


def test_a_second_look_finds_nothing_new() -> None:
    run_on_ranks(1, who)
    found = pool.POOLS._fork_server
    assert found is not None
    found.preload()
    assert found.preload() == 0.0


COPIED = """
import os, sys, threading, time

import beside
from meshfold.mesh.testing import copy_for_ranks, run_on_ranks

def seen(value):
    return beside.changed, value, os.getpid(), sys.stdin.read(), threading.excepthook is threading.__excepthook__

if __name__ == "__main__":
    beside.changed, threading.excepthook = "as it was then", print
    print("once, ", end="")
    assert copy_for_ranks()
    beside.changed = "later"
    assert not copy_for_ranks()  # there is one
    print(run_on_ranks(2, seen, 7), flush=True)
    time.sleep(300)
"""


def test_ranks_of_a_copy_have_what_it_had_and_end_with_the_test_process(tmp_path: Path, warm_python: str) -> None:
    (tmp_path / "beside.py").write_text("changed = 'no'\n")
    (tmp_path / "script.py").write_text(COPIED)
    process = subprocess.Popen(
        [warm_python, "script.py"], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        once, printed = process.stdout.readline().split(", ", 1)
        found = ast.literal_eval(printed)
    finally:
        process.kill()
        process.communicate()
    assert once == "once"
    assert [(changed, *rest) for changed, value, pid, *rest in found] == [("as it was then", "", True)] * 2
    deadline = time.monotonic() + 100
    while left := [pid for _, _, pid, *_ in found if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are copied on Linux only")
def test_a_process_with_a_gpu_or_threads_of_torch_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fork_server.can_be_copied()  # False if earlier tests have used a GPU
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        assert not fork_server.can_be_copied()
    named, end = threading.Event(), threading.Event()

    def autograd() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("pt_autograd_0")
        named.set()
        end.wait()

    thread = threading.Thread(target=autograd)
    thread.start()
    named.wait()
    assert not fork_server.can_be_copied()
    end.set()
    thread.join()
    while Path(f"/proc/self/task/{thread.native_id}").exists():  # the kernel ends it a moment later
        time.sleep(0.001)
    assert fork_server.can_be_copied() == before
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not fork_server.can_be_copied()
