"""Numba's threads beside torch's: started once, as many as torch has, and used by several threads without harm."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable

import pytest
import torch

from meshfold.kernels import AdamSettings, WholeState, adam_step
from meshfold.kernels._numba import torch_threads

numba = pytest.importorskip("numba")

STEP = """
import threading, torch
from meshfold.kernels import AdamSettings, WholeState, adam_step
settings = AdamSettings(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, adamw_mode=True)
def train(found=None):
    state = WholeState.of(torch.linspace(-1, 1, 50_000))
    for step in range(1, 41):
        adam_step(state, torch.linspace(1, -1, 50_000) * step, settings, step=step)
    if found is not None:
        found.append(state.parameter)
"""


def run(python: str, program: str, **environment: str) -> str:
    """Return what a process prints that imports Numba; it has to end well."""
    done = subprocess.run(
        [python, "-c", STEP + program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_first_kernel_leaves_torchs_threads_alone(torch_python: str) -> None:
    """Numba has more threads than torch is told to use, and starts them in the middle of a kernel's call."""
    program = """
torch.set_num_threads(1)
train()
import numba
print(torch.get_num_threads(), numba.get_num_threads(), numba.threading_layer())
"""
    found = run(torch_python, program, NUMBA_NUM_THREADS="2", OMP_NUM_THREADS="2").split()
    assert found[:2] == ["1", "2"]


def test_two_threads_run_kernels_on_numbas_own_queue(torch_python: str) -> None:
    """It aborts a process whose threads use it at once, so they take turns."""
    program = """
torch.set_num_threads(2)
alone, found = [], []
train(alone)
threads = [threading.Thread(target=train, args=(found,)) for _ in range(3)]
for thread in threads: thread.start()
for thread in threads: thread.join()
import numba
print(numba.threading_layer(), len(found), all(torch.equal(one, alone[0]) for one in found))
"""
    found = run(torch_python, program, NUMBA_THREADING_LAYER="workqueue", NUMBA_NUM_THREADS="2")
    assert found == "workqueue 3 True"


def test_kernels_take_as_many_threads_as_torch_and_give_them_back() -> None:
    numba.set_num_threads(numba.config.NUMBA_NUM_THREADS)
    before = torch.get_num_threads()
    try:
        for count in {1, before}:
            torch.set_num_threads(count)
            with torch_threads():
                assert numba.get_num_threads() == min(count, numba.config.NUMBA_NUM_THREADS)
            assert numba.get_num_threads() == numba.config.NUMBA_NUM_THREADS
        with pytest.raises(ZeroDivisionError), torch_threads():
            raise ZeroDivisionError
        assert numba.get_num_threads() == numba.config.NUMBA_NUM_THREADS
    finally:
        torch.set_num_threads(before)


def test_threads_step_side_by_side_to_the_same_bits() -> None:
    settings = AdamSettings(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, adamw_mode=True)

    def train(found: list[torch.Tensor]) -> None:
        state = WholeState.of(torch.linspace(-1, 1, 3000))
        for step in range(1, 6):
            adam_step(state, torch.linspace(1, -1, 3000), settings, step=step)
        found.append(state.parameter)

    alone: list[torch.Tensor] = []
    together: list[torch.Tensor] = []
    train(alone)
    threads = [threading.Thread(target=_calling(train, together)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(together) == 3 and all(torch.equal(one, alone[0]) for one in together)


def _calling(train: Callable[[list[torch.Tensor]], None], found: list[torch.Tensor]) -> Callable[[], None]:
    return lambda: train(found)
