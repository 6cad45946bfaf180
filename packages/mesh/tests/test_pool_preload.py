"""What is slow to import is imported once for all ranks, not by each of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from meshfold.mesh.testing import close_pools, fork_server, pool, run_on_ranks


def who() -> tuple[int, bool]:
    return os.getpid(), "torch._dynamo" in sys.modules


def test_ranks_have_what_optimizers_import() -> None:
    assert all(there for _, there in run_on_ranks(2, who))


@pytest.fixture(scope="module")
def own_pools() -> Iterator[pool.Pools]:
    """With a fork server of its own, which knows nothing of other tests."""
    pools = pool.Pools()
    yield pools
    pools.close()


@pytest.fixture
def pools(own_pools: pool.Pools, monkeypatch: pytest.MonkeyPatch) -> pool.Pools:
    monkeypatch.setattr("meshfold.mesh.testing.run.POOLS", own_pools)
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
