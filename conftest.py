"""What every test of the workspace stands on: one thread a process, no network, one Hypothesis profile."""

from __future__ import annotations

import contextlib
import gc
import importlib
import ipaddress
import os
import signal
import socket
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

from integration_tests.left_behind import Before

if TYPE_CHECKING:
    from integration_tests.warm_python import WarmPython

# What the machine says of a job, of commands and of terminals does not reach the tests.
_JOBS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SETTINGS = ("MESHFOLD_DEBUG", "MESHFOLD_KERNELS", "MESHFOLD_WATCHDOG", "COLUMNS", "NO_COLOR", "FORCE_COLOR")
for name in [*os.environ]:
    if name.startswith(("SLURM_", "TORCHELASTIC_")) or name in (*_JOBS, *_SETTINGS):
        del os.environ[name]
# Before torch is imported anywhere: ranks share the machine, and threads of theirs would fight over its cores.
os.environ["OMP_NUM_THREADS"] = "1"
# Torch then asks the driver's library whether there is a GPU, and not CUDA: a process that has asked CUDA cannot fork ranks that
# use it, and some optimizers of torch ask it in every step, for tensors on the CPU too.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
# Hugging Face libraries then fail at once where a test forgot to give a local path.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"

# Examples may be slow on a busy machine. The same ones every time, so that a change is judged by what it changes;
# `make test-all` looks for new and more ones, and a failure there prints how to get its example again.
settings.register_profile("meshfold", deadline=None, derandomize=True, max_examples=25)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile("meshfold")


# A shell has jobs in the background ignore Ctrl-C, and so would the commands that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _stays_here(address: object) -> bool:
    """Whether a socket address is this machine's own: a path, a loopback address or its own name."""
    if not isinstance(address, tuple):
        return True
    host = str(address[0])
    if host in {"", "localhost", socket.gethostname()}:
        return True
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return False
    return found.is_loopback or found.is_unspecified


# What is imported here, and thousands of collected tests, live to the end: no collection of garbage looks at them again.
# That was a quarter of what this process did.
gc.disable()


_PLACES: dict[str, int] = {}
"""Folders whose tests this process collects last to first, and their place among the tests"""


def pytest_configure(config: pytest.Config) -> None:
    """Leave out what Hypothesis would read of our source, and have every second worker of pytest-xdist collect from the end.

    Collecting a file for the first time compiles it, with its assertions rewritten, for all processes after. Workers that
    collected in one order would compile every file at the same time, each for itself.
    """
    if config.getoption("--hypothesis-profile", None) is None and hasattr(providers, "_get_local_constants"):
        # Constants that stand anywhere in our source would be drawn too: examples changed with every module, and each process
        # that collects tests read a thousand files for them.
        providers._get_local_constants = lambda: providers._local_constants  # none
    worker = getattr(config, "workerinput", {}).get("workerid", "gw0")
    if int(worker.removeprefix("gw")) % 2 == 0 or any("::" in one for one in config.args):
        return
    folders = [Path(config.invocation_params.dir, one) for one in config.args]
    parts = [part for one in folders for part in (sorted(one.iterdir()) if one.name == "packages" else [one])]
    parts = [part for part in parts if part.is_file() or (part / "tests").is_dir() or part in folders]
    _PLACES.update({str(part): place for place, part in enumerate(parts)})
    config.args[:] = [str(part) for part in reversed(parts)]


def _place(item: pytest.Item) -> int:
    return next(_PLACES[str(one)] for one in (item.path, *item.path.parents) if str(one) in _PLACES)


@pytest.hookimpl(tryfirst=True)  # before -m takes its choice
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests in the order that all workers have. Mark cases slow, of a test that is marked ``few(count)``: all
    but so many, evenly chosen among those not slow."""
    if _PLACES:
        items.sort(key=_place)
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("few") and not item.get_closest_marker("slow"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for members in cases.values():
        marker = members[0].get_closest_marker("few")
        assert marker is not None
        count = min(marker.args[0], len(members))
        kept = {(2 * number + 1) * len(members) // (2 * count) for number in range(count)}
        for number, item in enumerate(members):
            if number not in kept:
                item.add_marker("slow")


def pytest_collection_finish() -> None:
    """Leave what there is by now out of collections of garbage."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)  # as ranks of the pool: tests make much and leave little
    gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around pytest's own, which hold warnings and log records back
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Have ranks forked from a copy of this process, which has imported all tests by now."""
    result = yield
    if hasattr(session.config, "workerinput"):
        # A worker runs a third of all tests: some compile, and the first graph of torch.compile imports this, which takes each
        # process a second. Ranks that lack what this process has imported since are forked anew, too.
        with contextlib.suppress(ImportError):
            importlib.import_module("torch._inductor.pattern_matcher")
    if "meshfold.mesh.testing" in sys.modules and not session.config.option.collectonly:
        sys.modules["meshfold.mesh.testing"].copy_for_ranks()
    return result


@pytest.fixture(autouse=True, scope="session")
def no_network() -> Iterator[None]:
    """A test that opens a connection to another machine fails, and says where it wanted to go."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        if not _stays_here(address):
            raise RuntimeError(f"a test wanted to connect to {address!r}: tests use no network")
        connect(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", guarded)
        yield


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """A test that leaves a process group, threads of ours or processes behind fails, and not a later one that hangs."""
    before = Before()
    yield
    if left := before.left():
        pytest.fail(left, pytrace=False)


def _run_of_workers(config: pytest.Config) -> str | None:
    """Return the name that all workers of a run of pytest-xdist know; None in a process that runs the tests alone."""
    return getattr(config, "workerinput", {}).get("testrunuid")


@pytest.fixture(scope="session")
def warm(pytestconfig: pytest.Config) -> Iterator[WarmPython]:
    """Python that has torch imported when it starts, and the folder of its commands."""
    from integration_tests.warm_python import WarmPython

    with WarmPython(run=_run_of_workers(pytestconfig)) as server:
        yield server


@pytest.fixture(scope="session")
def warm_python(warm: WarmPython) -> str:
    """A stand-in for ``sys.executable`` that starts with torch imported: ``integration_tests/warm_python.py``."""
    return warm.python


@pytest.fixture(scope="session")
def torch_python(pytestconfig: pytest.Config) -> Iterator[str]:
    """A stand-in for ``sys.executable`` that starts with torch imported and nothing else, to see what an import brings along."""
    from integration_tests.warm_python import WarmPython

    with WarmPython(["torch"], run=_run_of_workers(pytestconfig)) as server:
        yield server.python


@pytest.fixture
def warm_commands(warm_python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ``sys.executable`` be that, for tests of what commands and ranks do and not of how they start."""
    monkeypatch.setattr(sys, "executable", warm_python)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where the matrix of specs writes what it found."""
    parser.addoption(
        "--matrix-results", default=None, metavar="FILE", help="a file for integration_tests/test_matrix.py"
    )
