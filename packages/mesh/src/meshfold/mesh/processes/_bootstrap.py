"""The file that every rank of the launcher runs first: no torch, nothing of Meshfold.

It ends the rank with its launcher, runs the user's program, and records how that failed.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import importlib.util
import json
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from typing import Any

_PR_SET_PDEATHSIG = 1
STOPPED_CODE = 75
"""Exit code of a program that has stopped on request and can be resumed: EX_TEMPFAIL of sysexits.h"""


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends in any way (on Linux; elsewhere do nothing).

    Args:
        parent: the process id that the parent has; if it is gone already, this process ends here.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent died before the call above
        os._exit(128 + signal.SIGKILL)


def run_program(argv: list[str]) -> None:
    """Run a program as Python itself would: ``script.py ...``, ``-m module ...``, or ``file.py::function ...``."""
    target, *rest = argv
    if target == "-m":
        sys.argv = rest
        sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    file, _, function = target.partition("::")
    sys.argv = [file, *rest]
    sys.path.insert(0, os.path.dirname(os.path.abspath(file)))
    if not function:
        runpy.run_path(file, run_name="__main__")
        return
    name = os.path.splitext(os.path.basename(file))[0]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    called: Any = module
    for part in function.split("."):
        called = getattr(called, part)
    called()


def main() -> None:
    """``python _bootstrap.py LAUNCHER_PID RECORD PROGRAM ...``: see :func:`run_program` for the program.

    RECORD is a file; or a folder in which each rank has its own, where an agent of torch.distributed.elastic starts it. That
    agent takes every exit code but 0 for a failure and restarts all ranks. A requested stop must not count as a failure.
    """
    parent, record, *argv = sys.argv[1:]
    die_with_parent(int(parent))
    under_agent = os.path.isdir(record)
    if under_agent:
        with open(os.path.join(record, "started"), "w"):
            pass
        record = os.path.join(record, f"rank{os.environ.get('RANK', '0')}.json")
        with contextlib.suppress(FileNotFoundError):
            os.remove(record)  # left by an earlier attempt
    faulthandler.enable()
    try:
        run_program(argv)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if code:
            _leave(record, time.monotonic(), code & 255, "")
            if code != STOPPED_CODE or not under_agent:
                raise
    except BaseException as error:
        moment = time.monotonic()  # shared by all processes of a machine: shows which rank failed first
        code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        # The launcher prints the first failing rank's traceback once; printed here, it would be lost among the others.
        _leave(record, moment, code, _render(error), refusal_sentence(error))
        sys.last_value = error  # as Python does: exit handlers can see that the program failed
        sys.exit(code)
    _end()


def _end() -> None:
    """Exit after the program: run Python's exit handlers, and nothing after them.

    In about one of a few hundred runs over gloo, a C++ library is unloaded while one of its threads still runs. This aborts a
    process whose program has succeeded. With CUDA the process exits normally, because profilers write their results then.
    """
    torch = sys.modules.get("torch")
    if torch is None or torch.cuda.is_initialized():
        return
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as Python does first
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or the reader has gone
            stream.flush()
    os._exit(0)


def refusal_sentence(error: BaseException) -> str:
    """Return ``SpecError at train.py:4 in <module>: ...``, if Meshfold refused the program's request; otherwise nothing.

    Such an error says by itself what to change, and its traceback is Meshfold's. An error from a collective is not one of these:
    the program is not wrong.
    """
    errors = sys.modules.get("meshfold.mesh.errors")
    if errors is None or not isinstance(error, errors.MeshfoldError) or isinstance(error, errors.CollectiveError):
        return ""
    from meshfold.mesh.recording.program_line import raised_at

    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", []))
    return f"{type(error).__name__} at {raised_at(error)}: {error}{notes}"


def _leave(record: str, moment: float, code: int, text: str, sentence: str = "") -> None:
    """Write the record atomically, so that the launcher never reads half of it."""
    with contextlib.suppress(OSError):  # without the folder the launcher has exited, and nothing reads it
        with open(record + ".part", "w", encoding="utf-8") as file:
            json.dump({"time": moment, "code": code, "traceback": text, "sentence": sentence}, file)
        os.replace(record + ".part", record)


def _render(error: BaseException) -> str:
    """Return the traceback from the user's first line on."""
    first = error.__traceback__
    while first is not None and _ours(first.tb_frame.f_code.co_filename):
        first = first.tb_next
    error.__traceback__ = first
    return "".join(traceback.format_exception(error))


def _ours(file: str) -> bool:
    return file == __file__ or file.startswith("<frozen ") or os.path.basename(file) == "runpy.py"


if __name__ == "__main__":
    main()
