"""The warm pool: functions on several ranks, what their failures look like, and that a failure costs one pool only."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist  # what runs in the ranks below talks to it directly: the pool is what is tested

from meshfold.mesh.errors import LaunchError
from meshfold.mesh.processes import groups
from meshfold.mesh.testing import RankFailure, fake_world, ranks, run_on_ranks
from meshfold.mesh.testing import rank as ranks_side
from meshfold.mesh.testing.fork_server import ForkServer
from meshfold.mesh.testing.run import _describe


@dataclass(frozen=True)
class Shape:
    """A type of this file, to travel as an argument and as a result."""

    rows: int


def total(value: float) -> torch.Tensor:
    x = torch.full((3,), value + dist.get_rank())
    dist.all_reduce(x)
    return x


def who() -> tuple[int, int, int, str]:
    return dist.get_rank(), dist.get_world_size(), os.getpid(), os.environ["LOCAL_RANK"]


def grow(shape: Shape, *, by: int) -> Shape:
    return Shape(rows=shape.rows + by * dist.get_rank())


def draw() -> list[float]:
    assert torch.get_default_dtype() == torch.float32 and torch.is_grad_enabled() and torch.get_num_threads() == 1
    numbers = torch.rand(2).tolist()
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    return numbers  # type: ignore[no-any-return]


def backward() -> float:
    x = torch.ones(64, 64, requires_grad=True)
    (x @ x).sum().backward()
    assert x.grad is not None
    return float(x.grad.sum())


def raise_on(rank: int) -> None:
    treasure = torch.arange(3)
    print("dug", len(treasure))
    if dist.get_rank() == rank:
        raise ValueError("nothing there")
    dist.barrier()


def die_on(rank: int, code: int) -> None:
    if dist.get_rank() == rank:
        print("last words")
        os._exit(code)
    dist.barrier()


def close_connections_to_ranks() -> None:
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # no socket
            one = socket.socket(fileno=int(name))
            if one.family == socket.AF_UNIX:  # to the test process
                one.detach()
            else:
                one.close()


def die_unseen(rank: int) -> None:
    """A process that the rank has forked keeps its connection to the test process open; those to the others break."""
    if dist.get_rank() == rank:
        child = os.fork()
        if child == 0:
            close_connections_to_ranks()
            time.sleep(300)
        os._exit(7)
    dist.barrier()


def crash_on(rank: int) -> None:
    if dist.get_rank() == rank:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core file in the user's folder
        ctypes.string_at(0)
    dist.barrier()


def leave_out(rank: int) -> None:
    if dist.get_rank() != rank:
        dist.barrier()


def skip_below(rank: int) -> None:
    if dist.get_rank() < rank:
        pytest.skip(f"rank 0 to {rank - 1} skip")


def return_function() -> Callable[[], int]:
    return lambda: 1


def open_groups(times: int) -> int:
    for number in range(times):
        groups.new_group([0, 1], f"piled up {number}")
    return os.getpid()


def reopen(times: int) -> float:
    """Groups that ranks open unevenly, close and open again, all over the same ranks."""
    rank, x = dist.get_rank(), torch.ones(1)
    for number in range(times):
        if rank == 0 and number % 2:
            groups.new_group([0], f"reopen alone {number}")
        pair = [rank & ~1, rank | 1]
        group = groups.new_group(pair, f"reopen {pair} {number}")
        assert dist.get_process_group_ranks(group) == pair
        dist.all_reduce(x, group=group)
        functional = torch.ops._c10d_functional
        y = functional.wait_tensor(functional.all_reduce(torch.ones(1), "sum", group.group_name))
        assert y.item() == 2
        dist.destroy_process_group(group)
    return float(x.item())


def test_every_rank_runs_and_returns() -> None:
    for x in run_on_ranks(4, total, 1.0):
        assert torch.equal(x, torch.full((3,), 10.0))
    found = run_on_ranks(4, who)
    assert [(rank, size, local) for rank, size, _, local in found] == [(rank, 4, str(rank)) for rank in range(4)]


def test_the_pool_stays_warm() -> None:
    pids = [pid for *_, pid, _ in run_on_ranks(2, who)]
    run_on_ranks(4, who)
    assert [pid for *_, pid, _ in run_on_ranks(2, who)] == pids


def test_types_of_the_test_file_travel() -> None:
    assert run_on_ranks(2, grow, Shape(rows=3), by=2) == [Shape(rows=3), Shape(rows=5)]


def test_every_call_begins_alike() -> None:
    first, second = run_on_ranks(2, draw), run_on_ranks(2, draw)
    assert first == second and first[0] == first[1]


def read_switch(monkeypatch: pytest.MonkeyPatch | None = None, *, fails: bool = False) -> str | None:
    if monkeypatch is not None:
        monkeypatch.setenv("MESHFOLD_TEST_SWITCH", "on")
    if fails:
        raise ValueError("after the patch")
    return os.environ.get("MESHFOLD_TEST_SWITCH")


def test_what_a_test_patches_on_ranks_is_undone() -> None:
    """It stayed for all tests that came after on the same ranks: chunks of 2,048 elements made a plan's bytes look wrong."""
    patch = pytest.MonkeyPatch()
    assert run_on_ranks(2, read_switch, patch) == ["on", "on"]
    assert run_on_ranks(2, read_switch) == [None, None]
    with pytest.raises(RankFailure, match="after the patch"):
        run_on_ranks(2, read_switch, patch, fails=True)
    assert run_on_ranks(2, read_switch) == [None, None]


def test_a_backward_in_the_test_process_does_not_matter() -> None:
    expected = backward()  # starts threads here; a fork of this process would hang
    run_on_ranks(2, who)
    assert run_on_ranks(2, backward) == [expected] * 2


@ranks(2)
def test_the_body_of_a_decorated_test_runs_on_the_ranks() -> None:
    assert dist.get_world_size() == 2
    assert float(total(0.0)[0]) == 1.0


@pytest.mark.parametrize("value", [1.0, 2.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@ranks(2)
def test_parameters_and_fixtures_reach_the_ranks(value: float, dtype: torch.dtype, tmp_path: Path) -> None:
    assert tmp_path.is_dir()
    x = torch.tensor([value], dtype=dtype)
    dist.all_reduce(x)
    assert x.dtype == dtype and x.item() == 2 * value


class TestInAClass:
    @ranks(2)
    def test_methods_run_too(self) -> None:
        assert dist.get_world_size() == 2


@ranks(4)
def fail_on_three(value: int) -> None:
    assert dist.get_rank() != 3 or value < 0


def test_a_skip_on_all_ranks_skips_the_test() -> None:
    with pytest.raises(pytest.skip.Exception, match="rank 0 to 3 skip"):
        run_on_ranks(4, skip_below, 4)
    with pytest.raises(RankFailure, match="some ranks skipped"):
        run_on_ranks(4, skip_below, 2)


def test_the_traceback_of_the_failing_rank_is_shown() -> None:
    with pytest.raises(RankFailure) as caught:
        run_on_ranks(4, raise_on, 2)
    assert caught.value.rank == 2
    text = str(caught.value)
    assert text.startswith("rank 2 of 4 failed in raise_on: ValueError: nothing there")
    assert f'File "{__file__}"' in text and 'raise ValueError("nothing there")' in text
    assert "treasure = tensor([0, 1, 2])" in text and "dug 3" in text
    assert "serve" not in text  # nothing of the pool's own machinery
    run_on_ranks(4, total, 0.0)  # a new pool


def moments_of_an_error() -> tuple[float, float]:
    """When a call answers that it has failed, and when its error is shown."""
    shown: list[float] = []

    def show(*_: object) -> str:
        shown.append(time.monotonic())
        return ""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks_side, "_render", show)
        answer = ranks_side._answer(_describe(raise_on, (dist.get_rank(),), {}))
    return answer.time, *shown


def test_an_error_is_of_the_moment_when_it_was_raised() -> None:
    """An error that takes long to be shown must not seem to come after those that it has caused."""
    [(answered, shown)] = run_on_ranks(1, moments_of_an_error)
    assert answered < shown


def test_a_decorated_test_fails_like_any_other() -> None:
    with pytest.raises(RankFailure, match=r"rank 3 of 4 failed in fail_on_three: AssertionError") as caught:
        fail_on_three(7)
    assert "value = 7" in str(caught.value)


@pytest.mark.parametrize(("code", "said"), [(7, "exited with code 7"), (0, "exited with code 0")])
def test_a_rank_that_dies_is_named_not_those_it_left_alone(code: int, said: str) -> None:
    begin = time.monotonic()
    with pytest.raises(RankFailure, match=f"rank 1 of 4 failed in die_on: the process {said}") as caught:
        run_on_ranks(4, die_on, 1, code)
    assert "last words" in str(caught.value)
    assert time.monotonic() - begin < 100
    run_on_ranks(4, total, 0.0)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells that a process has begun to end")
def test_a_rank_whose_death_comes_late_is_named_too() -> None:
    """A busy machine: the others have long said that their connection broke."""
    with pytest.raises(RankFailure, match="rank 1 of 2 failed in die_unseen: the process exited with code 7"):
        run_on_ranks(2, die_unseen, 1)


def test_a_rank_that_crashes_shows_its_python_and_native_frames() -> None:
    with pytest.raises(
        RankFailure, match="rank 1 of 2 failed in crash_on: the process was killed by SIGSEGV"
    ) as caught:
        run_on_ranks(2, crash_on, 1)
    assert "in crash_on" in str(caught.value) and "frame #0" in str(caught.value)
    run_on_ranks(2, total, 0.0)


def take_signals() -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


@pytest.mark.parametrize("late_s", [0.0, 1.0])
def test_ranks_that_do_not_answer_show_their_stacks(late_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the machine is busy, and they write them later."""
    run_on_ranks(2, take_signals)  # a test before it may have left its own
    run_on_ranks(2, leave_out, -1)  # takes less from now on
    ask = ForkServer.signal

    def ask_later(*arguments: Any) -> None:
        threading.Timer(late_s, ask, arguments).start()

    monkeypatch.setattr(ForkServer, "signal", ask_later)
    begin = time.monotonic()
    with pytest.raises(RankFailure, match=r"rank 1 of 2 did not end leave_out within 2 s") as caught:
        run_on_ranks(2, leave_out, 0, timeout_s=2.0)
    assert time.monotonic() - begin < 100
    assert "in leave_out" in str(caught.value) and "in barrier" in str(caught.value)
    run_on_ranks(2, total, 0.0)


def test_groups_can_be_opened_unevenly_closed_and_opened_again() -> None:
    assert run_on_ranks(4, reopen, 6, timeout_s=60) == [2.0**6] * 4


def test_a_pool_that_piles_up_process_groups_is_renewed() -> None:
    before = run_on_ranks(2, open_groups, 70)
    after = run_on_ranks(2, who)
    assert not set(before) & {pid for *_, pid, _ in after}


def test_what_cannot_travel_is_refused() -> None:
    def inner() -> None: ...

    with pytest.raises(LaunchError, match="move it to module level"):
        run_on_ranks(2, inner)
    with pytest.raises(LaunchError, match=r"argument 'by' \(function\) of grow cannot be sent"):
        run_on_ranks(2, grow, Shape(rows=1), by=lambda: 1)
    with pytest.raises(LaunchError, match="0 ranks"):
        run_on_ranks(0, who)
    with pytest.raises(RankFailure, match="return_function"):
        run_on_ranks(2, return_function)


@pytest.mark.usefixtures("warm_commands")
def test_a_helper_beside_the_test_can_be_imported(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("WORD = 'beside'\n")
    (tmp_path / "test_it.py").write_text(
        "from meshfold.mesh.testing import ranks\n"
        "@ranks(2)\n"
        "def test_it():\n"
        "    import beside\n"
        "    assert beside.WORD == 'beside'\n"
    )
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--import-mode=importlib",
            "-p",
            "no:cacheprovider",
            "test_it.py",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr


SCRIPT = """
import os, sys, time
from meshfold.mesh.testing import run_on_ranks

def pid():
    return os.getpid()

def sleep():
    time.sleep(300)

if __name__ == "__main__":
    print(*run_on_ranks(2, pid), flush=True)
    if sys.argv[1] == "busy":
        run_on_ranks(2, sleep)
"""


@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["idle", "busy"])
def test_no_rank_outlives_the_test_process(tmp_path: Path, how: str) -> None:
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    process = subprocess.Popen([sys.executable, str(file), how], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 2
    if how == "busy":
        time.sleep(0.2)
        process.kill()
    process.communicate(timeout=100)
    deadline = time.monotonic() + 60
    while (left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert left == []


@pytest.mark.usefixtures("warm_commands")
def test_a_script_without_a_main_guard_is_told_so(tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text("from meshfold.mesh.testing import run_on_ranks\ndef f(): ...\nrun_on_ranks(2, f)\n")
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "if __name__ == '__main__'" in done.stderr


def test_many_fake_worlds_leave_the_hook_for_exceptions_as_it_was() -> None:
    before = sys.excepthook
    for _ in range(3):
        with fake_world(2):
            assert sys.excepthook is not before
        assert sys.excepthook is before
    with pytest.raises(ZeroDivisionError), fake_world(2):
        1 / 0  # noqa: B018
    assert sys.excepthook is before


def test_a_fake_world_of_512_ranks_with_many_groups() -> None:
    begin = time.monotonic()
    with fake_world(512, rank=37) as process:
        assert (process.rank, process.world_size, process.backend) == (37, 512, "fake")
        for number in range(64):
            group = groups.new_group([37, 37 + number + 1], f"fake {number}")
            assert group.size() == 2
        x = torch.ones(4)
        dist.all_reduce(x, group=dist.new_group(list(range(1, 512, 2))))
    assert not groups.is_started()
    assert time.monotonic() - begin < 100
    with pytest.raises(LaunchError, match="rank 4 is outside a fake world of 4"), fake_world(4, rank=4):
        pass
    with pytest.raises(LaunchError, match="a fake world of 0 ranks: give 1 or more"), fake_world(0):
        pass


def threads_of_four_groups() -> int:
    before = len(os.listdir("/proc/self/task"))
    for _ in range(4):
        dist.all_reduce(torch.ones(1), group=dist.new_group([0, 1]))
    return len(os.listdir("/proc/self/task")) - before


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")
def test_groups_share_one_thread_that_polls() -> None:
    # Each group has two threads that wait for work. A third would be a device of its own, which polls.
    assert run_on_ranks(2, threads_of_four_groups) == [8, 8]


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at states of processes in /proc")
def test_idle_ranks_are_stopped_and_go_on_at_the_next_call() -> None:
    pids = [pid for *_, pid, _ in run_on_ranks(2, who)]
    until = time.monotonic() + 60
    while {state_of(pid) for pid in pids} != {"T"}:
        assert time.monotonic() < until
        time.sleep(0.001)
    assert torch.equal(run_on_ranks(2, total, 1.0)[1], torch.full((3,), 3.0))
    assert [pid for *_, pid, _ in run_on_ranks(2, who)] == pids
