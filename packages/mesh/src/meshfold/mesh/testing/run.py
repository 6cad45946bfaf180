"""The interface for tests: run a function on ranks, have a whole test run there, or simulate a world in one process."""

from __future__ import annotations

import functools
import inspect
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from meshfold.mesh.errors import LaunchError
from meshfold.mesh.processes.process_group import Process, start_fake
from meshfold.mesh.testing import rank as ranks_side
from meshfold.mesh.testing.pool import POOLS
from meshfold.mesh.testing.rank import Call

P = ParamSpec("P")
R = TypeVar("R")

DEFAULT_TIMEOUT_S = 240.0


def close_pools() -> None:
    """End all ranks now (done automatically at exit); a later call starts new ones."""
    POOLS.end_ranks()


def copy_for_ranks() -> bool:
    """Copy this process now, and fork ranks from that copy: they have imported all that it has, and import nothing again.

    Call it when all test files are imported and no test has run, from a hook ``pytest_collection`` in ``conftest.py``:
    ``docs/testing.md`` shows it.

    Returns:
        True if ranks will be forked from the copy. False if a copy could hang (not on Linux, a GPU in use, threads of torch) or
        ranks already exist: ranks then come from a process that imports torch first.
    """
    return POOLS.copy_this_process()


def run_on_ranks(
    n: int, function: Callable[..., R], /, *args: Any, timeout_s: float = DEFAULT_TIMEOUT_S, **kwargs: Any
) -> list[R]:
    """Run a module-level function on every one of ``n`` gloo ranks on the CPU; return each rank's result, by rank.

    Arguments and results travel by value (pickle). Every call begins with ``torch.manual_seed(0)``, float32 as
    default dtype, gradients on and one thread. ``torch.distributed`` is initialised in the ranks, once per pool.

    Raises:
        LaunchError: for a function that cannot be found by name, or arguments that cannot be pickled.
        RankFailure: with the traceback of the first rank that failed, or the stacks of those that did not answer.
    """
    __tracebackhide__ = True
    if ranks_side.SERVING:
        raise LaunchError(
            "run_on_ranks was called on a rank of the pool, while it imported or ran your file: "
            "in a script, put the call under if __name__ == '__main__'"
        )
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise LaunchError(f"run_on_ranks on {n!r} ranks: give a whole number from 1 up")
    return POOLS.run(n, _describe(function, args, kwargs), function.__qualname__, timeout_s)


def ranks(n: int, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Callable[[Callable[P, object]], Callable[P, None]]:
    """Have the body of a pytest test run on every one of ``n`` gloo ranks; parametrize and picklable fixtures work.

    >>> @ranks(4)
    ... def test_sum() -> None: ...

    The test passes when the body returns on every rank; its result is dropped.
    """

    def decorate(function: Callable[P, object]) -> Callable[P, None]:
        ranks_side.BODIES[function.__module__, function.__qualname__] = function

        @functools.wraps(function)
        def test(*args: P.args, **kwargs: P.kwargs) -> None:
            __tracebackhide__ = True
            if ranks_side.SERVING:
                function(*args, **kwargs)
            else:
                run_on_ranks(n, function, *args, timeout_s=timeout_s, **kwargs)

        return test

    return decorate


def _describe(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    name = function.__qualname__
    if "<" in name:
        raise LaunchError(
            f"{name} is defined inside another function; the ranks import it by name: move it to module level"
        )
    file = inspect.getsourcefile(function)
    if file is None:
        raise LaunchError(f"{name} has no source file, so the ranks cannot import it: write it in one")
    try:
        arguments = pickle.dumps((args, kwargs))
    except Exception as error:
        raise LaunchError(
            f"{_unpicklable(function, args, kwargs)} of {name} cannot be sent to the ranks: {error}"
        ) from error
    return Call(
        file=os.path.abspath(file),
        module=function.__module__,
        qualname=name,
        arguments=arguments,
        search_path=[path or os.getcwd() for path in sys.path],
        directory=os.getcwd(),
    )


def _unpicklable(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    named = dict(enumerate(args)) | kwargs
    for name, value in named.items():
        try:
            pickle.dumps(value)
        except Exception:
            return f"the argument {name!r} ({type(value).__name__})"
    return "an argument"


@contextmanager
def fake_world(n: int, rank: int = 0) -> Iterator[Process]:
    """Context manager: be one of ``n`` simulated ranks. Collectives return at once with meaningless values.

    Raises:
        LaunchError: if a process group is already running in this process.
    """
    with start_fake(n, rank) as process:
        yield process
