"""What is slow to import is imported once for all ranks, not by each of them."""

from __future__ import annotations

import os
import sys

import pytest

from meshfold.mesh.testing import nursery, pool, run_on_ranks


def who() -> tuple[int, bool]:
    return os.getpid(), "torch._dynamo" in sys.modules


def test_ranks_have_what_optimizers_import() -> None:
    assert all(there for _, there in run_on_ranks(2, who))


@pytest.mark.parametrize(("seconds", "anew"), [(0.1, False), (2.0, True)])
def test_ranks_that_lack_slow_modules_are_forked_anew(
    seconds: float, anew: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = pool.Pools()
    monkeypatch.setattr("meshfold.mesh.testing.run.POOLS", pools)
    try:
        before = {size: run_on_ranks(size, who) for size in (1, 2)}
        with monkeypatch.context() as patch:
            patch.setattr(nursery.Nursery, "preload", lambda self: seconds)
            second = run_on_ranks(2, who)
        after = {1: run_on_ranks(1, who), 2: run_on_ranks(2, who)}
    finally:
        pools.close()
    assert (second != before[2]) == anew
    assert (after[1] != before[1]) == anew  # each size when it is asked for next
    assert after[2] == second  # once


def test_a_second_look_finds_nothing_new() -> None:
    run_on_ranks(1, who)
    found = pool.POOLS._nursery
    assert found is not None
    found.preload()
    assert found.preload() == 0.0
