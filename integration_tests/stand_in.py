"""``python stand_in.py ADDRESS WORDS``: has the process at a socket run ``python WORDS``, as ``warm_python.py`` tells.

Imports little and nothing of Meshfold, since to start at once is its point.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys

_PR_SET_PDEATHSIG = 1
_PASSED_ON = {
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
}


def _open_files() -> list[int]:
    numbers = []
    for number in sorted(map(int, os.listdir("/dev/fd"))):
        try:
            os.fstat(number)
        except OSError:  # the folder itself, open while it was read
            continue
        numbers.append(number)
    return numbers


def main() -> None:
    """Hand everything over, wait, and end as the program ended."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # end with who called
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    files = _open_files()
    address, *words = sys.argv[1:]
    job = {
        "words": words,
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "files": files,
        "parent": os.getppid(),
    }
    server = socket.socket(socket.AF_UNIX)
    server.connect(address)
    socket.send_fds(server, [b"!"], files)
    server.sendall(json.dumps(job).encode() + b"\n")
    lines = server.makefile()
    program = int(lines.readline())
    for number in _PASSED_ON:
        signal.signal(number, lambda number, frame: os.kill(program, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
    code = int(lines.readline())
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
