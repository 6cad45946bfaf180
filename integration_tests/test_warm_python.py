"""The stand-in for Python does what Python does, and what it starts ends with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from integration_tests.warm_python import WarmPython

SHOW = """
import os, sys
print(__name__, sys.argv[1:], os.getcwd(), os.environ["MINE"], sys.stdin.read(), "torch" in sys.modules)
print(os.getppid() == int(os.environ["CALLER"]), sys.executable, file=sys.stderr)
os.write(int(sys.argv[1]), b"through a pipe")
raise SystemExit(7)
"""


@pytest.mark.parametrize("form", ["script", "-m", "-c", "-P script"])
def test_a_program_sees_what_its_caller_gave(form: str, warm: WarmPython, tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    words = {"script": ["show.py"], "-m": ["-m", "show"], "-c": ["-c", SHOW], "-P script": ["-P", "show.py"]}[form]
    reading, writing = os.pipe()
    done = subprocess.run(
        [warm.python, *words, str(writing)],
        cwd=tmp_path,
        env={**os.environ, "MINE": "here", "CALLER": str(os.getpid())},
        input="typed",
        capture_output=True,
        text=True,
        pass_fds=[writing],
    )
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        assert pipe.read() == b"through a pipe"
    assert done.returncode == 7
    assert done.stdout == f"__main__ {[str(writing)]} {tmp_path} here typed True\n"
    assert done.stderr == f"True {warm.python}\n"


def test_programs_know_nothing_of_each_other(warm: WarmPython) -> None:
    found = [
        subprocess.run([warm.python, "-c", code], capture_output=True, text=True, env=os.environ | own).stdout
        for code, own in (
            (
                "import os, sys, random; sys.left = 1; print('LEFT' in os.environ, random.random())",
                {"LEFT": "1"},
            ),
            (
                "import os, sys, random; print(hasattr(sys, 'left'), 'LEFT' in os.environ, random.random())",
                {},
            ),
        )
    ]
    first, second = (text.split() for text in found)
    assert (first[0], second[:2]) == ("True", ["False", "False"])
    assert first[-1] != second[-1]


def test_what_a_program_leaves_to_its_end_is_done_and_nothing_of_what_it_was_forked_from(warm: WarmPython) -> None:
    code = (
        "import os, weakref; print(sum(one.atexit for one in [*weakref.finalize._registry])); "
        "weakref.finalize(os, print, 'its own')"
    )
    done = subprocess.run([warm.python, "-c", code], capture_output=True, text=True)
    assert done.stdout == "0\nits own\n"


def test_an_error_is_shown_and_is_a_failure(warm: WarmPython, tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text("x = 1\nraise ValueError('no such thing')\n")
    done = subprocess.run([warm.python, str(tmp_path / "wrong.py")], capture_output=True, text=True)
    assert done.returncode == 1
    assert 'wrong.py", line 2' in done.stderr and done.stderr.endswith("ValueError: no such thing\n")


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("last", "code", "said"),
    [
        ("sys.exit('not so')", 1, "not so\n"),
        ("sys.exit()", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt\n"),
        ("", 0, ""),
    ],
    ids=["words", "nothing", "number", "Ctrl-C", "the end"],
)
def test_a_program_ends_as_it_does_in_python(last: str, code: int, said: str, warm: WarmPython) -> None:
    """Threads come to their end, then what is to run at exit; what was printed is not lost."""
    program = (
        "import atexit, sys, threading, time\natexit.register(print, 'at exit', end='')\n"
        "threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()\n" + last
    )
    for python in (sys.executable, warm.python):
        done = subprocess.run([python, "-c", program], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (code, "thread\nat exit"), python
        assert done.stderr.endswith(said) and bool(done.stderr) == bool(said), python


def test_the_command_is_there(warm: WarmPython) -> None:
    code = "import subprocess; subprocess.run(['meshfold', 'run', '--help'], check=True)"
    done = subprocess.run([warm.python, "-c", code], capture_output=True, text=True, env=warm.environment(), check=True)
    assert done.stdout.startswith("usage: meshfold run")


def test_signals_go_through_and_the_end_is_the_same(warm: WarmPython) -> None:
    caught = (
        "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
        "print('up', flush=True)\ntime.sleep(60)"
    )
    process = subprocess.Popen([warm.python, "-c", caught], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    process.terminate()
    assert process.wait(120) == 5
    process.stdout.close()
    died = subprocess.run([warm.python, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"])
    assert died.returncode == -signal.SIGKILL


def test_what_a_program_started_ends_with_its_stand_in(warm: WarmPython) -> None:
    code = (
        "import subprocess, sys\n"
        "other = subprocess.Popen([sys.executable, '-c', 'import os, time; print(os.getpid(), flush=True); time.sleep(60)'])\n"
        "other.wait()"
    )
    process = subprocess.Popen([warm.python, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    inner = int(process.stdout.readline())
    process.kill()
    process.wait()
    deadline = time.monotonic() + 100
    while Path(f"/proc/{inner}").exists() if sys.platform == "linux" else _runs(inner):
        assert time.monotonic() < deadline, "it goes on"
        time.sleep(0.02)
    process.stdout.close()


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_one_that_has_torch_alone_brings_nothing_that_an_import_could_be_blamed_for(torch_python: str) -> None:
    code = (
        "import sys; print(*sorted({name.partition('.')[0] for name in sys.modules}), 'torch._dynamo' in sys.modules)"
    )
    *names, compiler = subprocess.run([torch_python, "-c", code], capture_output=True, text=True).stdout.split()
    assert "torch" in names and compiler == "False"
    assert not {*names} & {"meshfold", "numba", "triton", "transformers", "lightning", "matplotlib", "scipy"}
