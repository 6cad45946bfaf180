"""A rank of the pool: it joins the process group once, then runs one function after another."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import random
import reprlib
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import FunctionType, ModuleType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from meshfold.mesh.processes import groups, process_group, rendezvous
from meshfold.mesh.processes.environment import Environment
from meshfold.mesh.testing.fork_server import worth_preloading

#: Bodies of functions decorated with ``@ranks``, by module and qualified name. The module's attribute is the wrapper that
#: asks the pool, perhaps decorated further; a rank needs the function inside.
BODIES: dict[tuple[str, str], Callable[..., Any]] = {}

#: Thresholds of the garbage collector. Tests build and drop engines all the time: with Python's own thresholds, a tenth of
#: a rank's time went into looking for garbage, and little was found.
_COLLECTIONS = (20_000, 20, 50)

#: True in ranks, where a decorated function runs directly.
SERVING = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A function to run, by its file, and its pickled arguments."""

    file: str
    module: str
    qualname: str
    arguments: bytes
    search_path: list[str]
    directory: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Result of a call on one rank.

    Attributes:
        kind: ``value``, ``error`` or ``skip``.
        payload: the pickled value, when there is one.
        summary: the error in one line, or the reason to skip.
        traceback: the error in full.
        time: ``time.monotonic()`` at the end or at the error, which is one clock for all processes of a machine.
        groups: how many process groups this rank has open.
        imported: the slow packages that the call made rank 0 import; functions often import them at their first use.
    """

    kind: str
    payload: bytes = b""
    summary: str = ""
    traceback: str = ""
    time: float = field(default_factory=time.monotonic)
    groups: int = field(default_factory=groups.group_count)
    imported: tuple[str, ...] = ()


def serve(connection: int, listener: int | None = None, *, rank: int, world_size: int, port: int, output: str) -> None:
    """Join the process group of the pool and answer calls until the connection closes.

    Args:
        connection: descriptor of the socket to the test process.
        listener: rank 0's listening socket for the store, opened beforehand so that its port is known and ours.
        rank, world_size: which rank to be.
        port: where rank 0's store listens.
        output: file that standard output and error go to.
    """
    global SERVING
    SERVING = True
    _redirect(output)
    environment = Environment(
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        master_addr="127.0.0.1",
        master_port=port,
        source="torchrun",
    )
    os.environ.update(environment.variables())
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform.startswith("linux") else "lo0"
    _share_one_device(os.environ["GLOO_SOCKET_IFNAME"])
    if listener is None:
        store = rendezvous.join_store("127.0.0.1", port)
    else:
        store = rendezvous.serve_store(listener)
    process_group.start(environment, backend="gloo", device="cpu", store=store)
    gc.set_threshold(*_COLLECTIONS)
    modules = len(sys.modules)
    with Connection(connection) as parent:
        parent.send(Answer(kind="value"))
        while True:
            try:
                call: Call = pickle.loads(parent.recv_bytes())
            except EOFError:
                return
            answer = _answer(call)
            if rank == 0 and len(sys.modules) != modules:
                new = max(0, len(sys.modules) - modules)  # a call may also drop some
                modules = len(sys.modules)
                answer = replace(answer, imported=tuple(worth_preloading(new)))
            parent.send(answer)


def _share_one_device(interface: str) -> None:
    """Have all gloo groups of this process send through one device.

    A device has a thread that wakes a hundred times a second, also when nothing is sent. torch makes one for each group: fifty
    groups on eight idle ranks took half a core.
    """
    gloo: Any = dist.ProcessGroupGloo
    device = gloo.create_device(interface=interface)
    make = gloo.__init__

    def make_on_device(self: Any, store: Any, rank: int, size: int, timeout: timedelta | None = None) -> None:
        options = gloo._Options()
        options._devices = [device]
        if timeout is not None:
            options._timeout = timeout
        make(self, store, rank, size, options)

    gloo.__init__ = make_on_device


def _answer(call: Call) -> Answer:
    try:
        with _surroundings(call):
            function = _find(call)
            arguments, keywords = pickle.loads(call.arguments)
            _reset()
            with _patches_undone((*arguments, *keywords.values())):
                value = function(*arguments, **keywords)
            sys.stdout.flush()
        return Answer(kind="value", payload=pickle.dumps(value))
    except BaseException as error:
        moment = time.monotonic()  # before it is shown, which takes a while
        sys.stdout.flush()
        summary = "".join(traceback.format_exception_only(error)).strip()
        if type(error).__name__ == "Skipped":
            return Answer(kind="skip", summary=str(error))
        return Answer(kind="error", summary=summary, traceback=_render(error, call.file), time=moment)


def _find(call: Call) -> Callable[..., Any]:
    """Return the function named by the call, its file imported under the module name that the test process uses."""
    module = sys.modules.get(call.module)
    if module is None or call.module == "__main__":
        module = _load(call)
    body = BODIES.get((module.__name__, call.qualname))
    if body is not None:
        return body
    found: Any = module
    for name in call.qualname.split("."):
        found = getattr(found, name)
    if not isinstance(found, FunctionType):
        found = getattr(found, "__func__", found)
    return found  # type: ignore[no-any-return]


def _load(call: Call) -> ModuleType:
    # Import a script under another name than __main__, so that its main part does not run, but pickles find its classes.
    name = "__meshfold_main__" if call.module == "__main__" else call.module
    if name in sys.modules:
        return sys.modules[name]
    try:
        known = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        known = None
    if known is not None and known.origin is not None and os.path.realpath(known.origin) == os.path.realpath(call.file):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, call.file)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import {call.file} to find {call.qualname}: it is not a Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    if call.module == "__main__":
        sys.modules["__main__"] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextmanager
def _surroundings(call: Call) -> Iterator[None]:
    """Context manager: use the test process's search path and directory, so that helpers next to the test can be imported."""
    sys.path[:] = [str(Path(call.file).parent), *call.search_path]
    if os.getcwd() != call.directory:
        os.chdir(call.directory)
    try:
        yield
    finally:
        sys.path[:] = call.search_path


@contextmanager
def _patches_undone(arguments: Iterable[Any]) -> Iterator[None]:
    """Context manager: undo what ``monkeypatch`` has patched on this rank; pytest undoes it in the test process alone."""
    try:
        yield
    finally:
        for one in arguments:
            if type(one).__name__ == "MonkeyPatch":
                one.undo()


def _reset() -> None:
    """Reset global state at the start of every test, whatever the last one left behind."""
    torch.manual_seed(0)
    random.seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.set_num_threads(1)
    _show_stacks_on_request()


def _redirect(output: str) -> None:
    target = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(target, descriptor)
    os.close(target)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115  for the life of the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    # Only the failing thread: reading another thread's Python frames while it runs can crash.
    faulthandler.enable(file=sys.stderr, all_threads=False)
    torch._C._set_print_stack_traces_on_fatal_signal(True)  # native frames of every thread
    _show_stacks_on_request()


def _show_stacks_on_request() -> None:
    faulthandler.unregister(signal.SIGUSR1)  # else it does not reinstall itself over another handler
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)


def _render(error: BaseException, file: str) -> str:
    """Format the traceback from the test file on, with the local variables of the last frame there."""
    inside: TracebackType | None = error.__traceback__
    last: TracebackType | None = None
    first: TracebackType | None = None
    while inside is not None:
        if os.path.realpath(inside.tb_frame.f_code.co_filename) == os.path.realpath(file):
            first, last = first or inside, inside
        inside = inside.tb_next
    text = "".join(traceback.format_exception(type(error), error, first or error.__traceback__))
    if last is None:
        return text
    short = reprlib.Repr()
    short.maxstring = short.maxother = 200
    variables: list[str] = []
    for name, value in last.tb_frame.f_locals.items():
        try:
            variables.append(f"    {name} = {short.repr(value)}")
        except Exception:
            variables.append(f"    {name} = <{type(value).__name__} whose repr fails>")
    return text + (f"where, in {last.tb_frame.f_code.co_name}:\n" + "\n".join(variables) + "\n" if variables else "")
