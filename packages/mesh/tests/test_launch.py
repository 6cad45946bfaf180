"""The local launcher: whatever happens to a rank or to the launcher, the job ends soon and leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import make_dataclass
from pathlib import Path

import pytest

from meshfold.mesh.errors import LaunchError
from meshfold.mesh.processes import launch, rank_processes
from meshfold.mesh.processes.launcher import _stops_after, check_room

SECONDS = 120.0  # far below what the ranks would sleep, with room for a busy machine

# Every rank notes its process, and rank 0 one that it started itself, so that the test can look for what is left.
NOTE = """
import os, subprocess, sys, time
rank = int(os.environ["RANK"])
folder = os.path.dirname(os.path.abspath(__file__))
def note(pid, name):
    with open(os.path.join(folder, name + ".part"), "w") as file:
        file.write(str(pid))
    os.rename(os.path.join(folder, name + ".part"), os.path.join(folder, name))
note(os.getpid(), f"rank{rank}.pid")
if rank == 0:
    note(subprocess.Popen(["sleep", "300"]).pid, "started.pid")
def wait_for(*names):
    while not all(os.path.exists(os.path.join(folder, name)) for name in names):
        time.sleep(0.01)
all_ranks = [f"rank{i}.pid" for i in range(int(os.environ["WORLD_SIZE"]))] + ["started.pid"]
"""


def script(folder: Path, body: str) -> str:
    """A program whose ranks note themselves, wait for each other, and run the body."""
    file = folder / "program.py"
    file.write_text(NOTE + "wait_for(*all_ranks)\n" + body)
    return str(file)


def noted(folder: Path) -> list[int]:
    return [int(file.read_text()) for file in sorted(folder.glob("*.pid"))]


def alive(pid: int) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def await_end(pids: list[int]) -> list[int]:
    """Those still alive after a moment."""
    deadline = time.monotonic() + SECONDS
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


@pytest.fixture
def launcher(tmp_path: Path, request: pytest.FixtureRequest, warm_python: str) -> Iterator[subprocess.Popen[str]]:
    """A launcher in a process of its own, once its four ranks sleep; or run another body with other options.

    It has torch imported when it starts, unless it is to be cold; its ranks start from nothing.
    """
    body, options, *cold = getattr(request, "param", ("", ""))
    program = script(tmp_path, body + "note(0, f'asleep{rank}')\ntime.sleep(300)\n")
    code = (
        f"import sys; from meshfold.mesh.processes import launch; sys.executable = {sys.executable!r}; "
        f"sys.exit(launch([{program!r}], 4{options}))"
    )
    process = subprocess.Popen(
        [sys.executable if cold else warm_python, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # What was started in the background ignores Ctrl-C, and so would what it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + SECONDS
    while len(list(tmp_path.glob("asleep?"))) < 4:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.02)
    yield process
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def test_all_ranks_run_and_rank_0_is_heard(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "say.py"
    file.write_text(
        "import os, sys\n"
        "print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], sys.argv[1:])\n"
        "print('a word', file=sys.stderr)\n"
    )
    assert launch([str(file), "--steps", "3"], 2, log_dir=tmp_path / "logs") == 0
    out, err = capfd.readouterr()
    assert out == "rank 0 of 2 ['--steps', '3']\n"
    assert sorted(err.splitlines()) == ["[rank 0] a word", "[rank 1] a word"]
    assert (tmp_path / "logs" / "rank1.out").read_text() == "rank 1 of 2 ['--steps', '3']\n"
    assert (tmp_path / "logs" / "rank1.err").read_text() == "a word\n"


def test_a_module_and_a_function_can_be_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tool.py").write_text(
        "import sys\n"
        "import neighbour\n"
        "def main():\n"
        "    print(neighbour.WORD, __name__, sys.argv[1:])\n"
        "if __name__ == '__main__':\n"
        "    main()\n"
    )
    (tmp_path / "neighbour.py").write_text("WORD = 'hello'\n")
    monkeypatch.chdir(tmp_path)
    assert launch(["-m", "tool", "x"], 1) == 0
    assert launch(["tool.py::main", "y"], 1) == 0
    assert capfd.readouterr().out == "hello __main__ ['x']\nhello tool ['y']\n"


def test_a_program_that_has_ended_does_not_fail_when_it_is_taken_down(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Threads, atexit and output come to their end; what C++ libraries do behind that is no matter."""
    file = tmp_path / "late.py"
    file.write_text(
        f"""
import atexit, ctypes, sys, threading, time
import torch
library = ctypes.CDLL(None)
getattr(library, "__cxa_atexit")(library.abort, None, None)
folder = {str(tmp_path)!r}
def leave(name):
    with open(folder + "/" + name, "w") as found:
        found.write("x")
def slowly():
    time.sleep(0.3)
    leave("thread")
threading.Thread(target=slowly).start()
atexit.register(leave, "exit")
sys.stdout.write("no end of line")
sys.exit(0)
"""
    )
    assert launch([str(file)], 1) == 0
    assert (tmp_path / "thread").exists() and (tmp_path / "exit").exists()
    assert "no end of line" in capfd.readouterr().out


@pytest.mark.usefixtures("warm_commands")
def test_ranks_meet_in_the_store_of_the_launcher_even_on_a_port_in_use(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "meet.py"
    file.write_text(
        "import torch\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"  # as any script does, through env://
        "x = torch.tensor(dist.get_rank() + 1.0)\n"
        "dist.all_reduce(x)\n"
        "print(x.item())\n"
        "dist.destroy_process_group()\n"
    )
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert launch([str(file)], 2, port=port) == 0
    out, err = capfd.readouterr()
    assert out == "3.0\n"
    assert f"warning: port {port} cannot be used" in err


@pytest.mark.usefixtures("warm_commands")
def test_a_process_group_can_be_started_again_in_the_same_job(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "again.py"
    file.write_text(
        "import torch\n"
        "import torch.distributed as dist\n"
        "from meshfold.mesh.processes.process_group import start\n"
        "for _ in range(2):\n"
        "    with start(device='cpu', timeout=200) as process:\n"
        "        x = torch.ones(1)\n"
        "        dist.all_reduce(x)\n"
        "        if process.rank == 0:\n"
        "            print(x.item())\n"
    )
    assert launch([str(file)], 2) == 0
    assert capfd.readouterr().out == "2.0\n2.0\n"


def test_a_rank_that_raises_in_the_middle_ends_the_job_and_its_traceback_comes_last(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = script(
        tmp_path,
        "import torch\n"
        "from meshfold.mesh.processes.process_group import start\n"
        "import torch.distributed as dist\n"
        "start(timeout=300)\n"
        "dist.barrier()\n"
        "note(0, f'ready{rank}')\n"
        "if rank == 2:\n"
        "    wait_for(*[f'ready{i}' for i in range(4)])\n"
        "    begin = time.monotonic()\n"
        "    note(str(begin), 'begin')\n"
        "    raise ValueError('a hole in the data')\n"
        "dist.barrier()\n",  # fails on the others, once rank 2 is gone
    )
    assert launch([program], 4) == 1
    assert time.monotonic() - float((tmp_path / "begin").read_text()) < SECONDS
    last = capfd.readouterr().err.partition("\nrank 2 of 4 raised")[2]
    assert last.rstrip().endswith("ValueError: a hole in the data")
    assert f'File "{program}"' in last
    assert "_bootstrap" not in last and "runpy" not in last
    assert await_end(noted(tmp_path)) == []


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("os._exit(3)", 3, "rank 1 of 4 exited with code 3"),
        ("os.kill(os.getpid(), 9)", 137, "rank 1 of 4 was ended by SIGKILL"),
        ("sys.exit('no such data')", 1, "no such data"),
        ("import faulthandler; faulthandler._sigsegv()", 139, "rank 1 of 4 was ended by SIGSEGV"),
        (
            "import threading; threading.Thread(target=time.sleep, args=(300,)).start(); 1 / 0",
            1,
            "ZeroDivisionError",
        ),
    ],
)
def test_a_rank_that_dies_ends_the_job(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], how: str, code: int, said: str
) -> None:
    program = script(tmp_path, f"if rank == 1:\n    time.sleep(0.1)\n    {how}\ntime.sleep(300)\n")
    begin = time.monotonic()
    assert launch([program], 4, log_dir=tmp_path / "logs") == code
    assert time.monotonic() - begin < SECONDS
    assert said in capfd.readouterr().err
    if "Error" in said:
        assert said in (tmp_path / "logs" / "rank1.err").read_text()
    assert await_end(noted(tmp_path)) == []


def test_the_first_failure_is_shown_not_its_echo(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long its error takes to be told."""
    monkeypatch.setattr(rank_processes, "_SETTLE_S", SECONDS)  # it is over when all have failed
    program = script(
        tmp_path,
        "class Cause(KeyError):\n"
        "    def __str__(self):\n"
        "        note(0, 'failing')\n"
        "        wait_for('echo0', 'echo1', 'echo2')\n"
        "        return super().__str__()\n"
        "if rank == 3:\n"
        "    raise Cause('the cause')\n"
        "wait_for('failing')\n"
        "note(0, f'echo{rank}')\n"
        "raise ConnectionError('an echo')\n",
    )
    assert launch([program], 4) == 1
    assert "rank 3 of 4 raised" in (err := capfd.readouterr().err)
    assert err.rstrip().endswith("Cause: 'the cause'") and "an echo" not in err


def test_a_rank_that_ignores_the_request_to_end_is_killed(tmp_path: Path) -> None:
    program = script(
        tmp_path,
        "import signal\n"
        "if rank == 1:\n"
        "    wait_for('deaf')\n"
        "    sys.exit(5)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "note(0, 'deaf')\n"
        "while True:\n"
        "    time.sleep(1)\n",
    )
    begin = time.monotonic()
    assert launch([program], 2, grace_s=0.3) == 5
    assert time.monotonic() - begin < SECONDS
    assert await_end(noted(tmp_path)) == []


@pytest.mark.few(1)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_the_launcher_leaves_no_process_behind(
    launcher: subprocess.Popen[str], tmp_path: Path, number: int, code: int
) -> None:
    pids = noted(tmp_path)
    assert len(pids) == 5 and all(map(alive, pids))
    launcher.send_signal(number)
    assert launcher.wait(timeout=SECONDS) == code
    assert await_end(pids) == []
    assert launcher.communicate()[1] == f"{signal.Signals(number).name}: the 4 ranks were ended\n"


# Longer than ranks get that are ended.
HEEDS = """
import signal
def stop(number, frame):
    time.sleep(2.5)
    note(0, f"kept{rank}")
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
"""


@pytest.mark.parametrize("launcher", [(HEEDS, ", stop_s=300, stopped_code=75")], indirect=True)
def test_ctrl_c_lets_ranks_stop_by_themselves_where_they_may(launcher: subprocess.Popen[str], tmp_path: Path) -> None:
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(timeout=SECONDS) == 130
    assert len(list(tmp_path.glob("kept?"))) == 4
    asked = "the 4 ranks were asked to stop; Ctrl-C again ends them at once\n"
    assert launcher.communicate()[1] == asked


@pytest.mark.parametrize("launcher", [("", ", stop_s=300, stopped_code=75")], indirect=True)
def test_ctrl_c_before_ranks_heed_it_is_no_failure_of_theirs(launcher: subprocess.Popen[str], tmp_path: Path) -> None:
    pids = noted(tmp_path)
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(timeout=SECONDS) == 130
    assert await_end(pids) == []
    said = launcher.communicate()[1]
    assert said.endswith("at once\nSIGINT: the 4 ranks were ended\n")
    assert "was ended by" not in said


@pytest.mark.parametrize(
    "launcher",
    [("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n", ", stop_s=300")],
    indirect=True,
)
def test_a_second_ctrl_c_ends_ranks_that_do_not_stop(launcher: subprocess.Popen[str], tmp_path: Path) -> None:
    pids = noted(tmp_path)
    launcher.send_signal(signal.SIGINT)
    assert launcher.stderr is not None and launcher.stderr.readline().endswith("ends them at once\n")
    assert launcher.poll() is None
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(timeout=SECONDS) == 130
    assert await_end(pids) == []
    assert launcher.communicate()[1] == "SIGINT: the 4 ranks were ended\n"


GOES_ON = "import signal\nsignal.signal(signal.SIGTERM, lambda number, frame: note(0, f'told{rank}'))\n"


@pytest.mark.parametrize("launcher", [(GOES_ON, ", stop_s=300, stopped_code=75")], indirect=True)
def test_a_second_sigterm_ends_ranks_that_do_not_stop(launcher: subprocess.Popen[str], tmp_path: Path) -> None:
    pids = noted(tmp_path)
    launcher.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + SECONDS
    while len(list(tmp_path.glob("told?"))) < 4:
        assert launcher.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(timeout=SECONDS) == 143
    assert await_end(pids) == []


# Slurm sends the signal of --signal=USR1@120 first, and SIGTERM when the time is over.
HEEDS_BOTH = """
import signal
signal.signal(signal.SIGUSR1, lambda number, frame: note(0, f"first{rank}"))
def stop(number, frame):
    note(0, f"kept{rank}")
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
"""


@pytest.mark.parametrize("launcher", [(HEEDS_BOTH, ", stop_s=300, stopped_code=75")], indirect=True)
def test_another_request_is_passed_on_too(launcher: subprocess.Popen[str], tmp_path: Path) -> None:
    launcher.send_signal(signal.SIGUSR1)
    deadline = time.monotonic() + SECONDS
    while len(list(tmp_path.glob("first?"))) < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(timeout=SECONDS) == 75
    assert len(list(tmp_path.glob("kept?"))) == 4


@pytest.mark.usefixtures("warm_commands")
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_meshfold_refuses_is_a_sentence_with_the_programs_line(
    ranks: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "refused.py"
    file.write_text(
        "from meshfold.mesh import ParallelSpec\n\n\n"
        "def spec():\n"
        "    return ParallelSpec.parse(dict(tensr=2))\n\n\n"
        "spec()\n"
    )
    assert launch([str(file)], ranks, log_dir=tmp_path / "logs") == 1
    said = capfd.readouterr().err
    # A rank that was ended before it came so far did not raise.
    who = "rank 0 of 1" if ranks == 1 else r"(each of 2 ranks|rank \d of 2; the other ranks were ended)"
    assert re.match(rf"\n{who}: SpecError at refused\.py:5 in spec: tensr=2: ", said)
    assert said.count("\n") == 2 and "Did you mean 'tensor'?" in said
    assert "Traceback" in (tmp_path / "logs" / "rank0.err").read_text()  # for whoever looks for more


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux can tie a process's life to its parent's")
@pytest.mark.parametrize("launcher", [("", "", "cold")], indirect=True)  # the warm Python would end its ranks too
def test_a_launcher_that_is_killed_takes_its_ranks_along(launcher: subprocess.Popen[str], tmp_path: Path) -> None:
    ranks = [int((tmp_path / f"rank{i}.pid").read_text()) for i in range(4)]
    launcher.kill()
    launcher.wait(timeout=SECONDS)
    left = await_end(ranks)
    os.kill(
        int((tmp_path / "started.pid").read_text()), signal.SIGKILL
    )  # what a rank started is not the kernel's concern
    assert left == []


def test_more_ranks_than_memory_holds_are_refused() -> None:
    check_room(100, 25_000 * 2**20)
    check_room(100, None)
    with pytest.raises(LaunchError, match=r"all of them 24\.41 GiB, .* has 16\.00 GiB left\. Start 65 at most"):
        check_room(100, 16 * 2**30)
    with pytest.raises(LaunchError, match=r"cannot start 1000000 ranks: .* meshfold plan --ranks 1000000"):
        launch([__file__], 1_000_000)


def test_what_cannot_start_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"no file 'nowhere\.py'"):
        launch(["nowhere.py"], 2)
    with pytest.raises(LaunchError, match="cannot start 0 ranks"):
        launch([__file__], 0)
    with pytest.raises(LaunchError, match="cannot start True ranks"):
        launch([__file__], True)
    with pytest.raises(LaunchError, match="nothing to run"):
        launch([], 2)
    with pytest.raises(LaunchError, match=r"nothing to run in <built-in function print>: give \['script"):
        launch(print, 2)  # type: ignore[arg-type]
    with pytest.raises(LaunchError, match="nothing to run"):
        launch(["-m"], 2)
    with pytest.raises(LaunchError, match="port 70000 is not a port"):
        launch([__file__], 2, port=70000)


def test_torch_gets_the_time_to_stop_only_where_it_takes_one() -> None:
    torch_2_11 = make_dataclass("LaunchConfig", [("signals_to_handle", str)])
    torch_2_13 = make_dataclass("LaunchConfig", [("signals_to_handle", str), ("shutdown_timeout", int)])
    assert _stops_after(torch_2_11, 7) == {}
    assert _stops_after(torch_2_13, 7) == {"shutdown_timeout": 7}
