"""Start a script on local ranks, or on this node's part of the ranks of several.

  meshfold run --ranks 4 train.py --lr 1e-3
  meshfold run --ranks 4 -m my.module --lr 1e-3
  meshfold run --ranks 8 --nodes 2 --rendezvous node1:29500 --restarts 3 train.py     # on each of the two

The ranks meet on a port of this machine that is free. What rank 0 prints is shown, and every rank's standard error
with the rank before each line. When one fails the others are ended, and its traceback comes last; Ctrl-C ends all.
With --grace SIGTERM, SIGUSR1 and a first Ctrl-C go to the ranks, for scripts that stop by themselves
(meshfold.engine.long_runs.stopping).
Under torchrun or srun, which start the ranks themselves, the script is just run.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import socket
import sys
import traceback
from contextlib import suppress
from pathlib import Path

from meshfold.cli.arguments import Failure, natural, whole


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``meshfold run``."""
    parser.usage = "meshfold run [--ranks N] [options] (script.py | -m MODULE) ..."
    parser.add_argument("--ranks", type=whole, metavar="N", help="how many processes (default: one for each GPU)")
    parser.add_argument("--nodes", metavar="N|MIN:MAX", help="how many machines; run the same command on each")
    parser.add_argument("--rendezvous", metavar="HOST:PORT", help="of one of them, where they meet")
    parser.add_argument("--job", default="meshfold", metavar="NAME", help="if several jobs meet at one place")
    parser.add_argument(
        "--restarts",
        type=natural,
        default=0,
        metavar="N",
        help="restart all ranks after a failure, up to N times",
    )
    parser.add_argument("--address", metavar="HOST", help="of this machine, as the others see it")
    parser.add_argument(
        "--grace",
        type=natural,
        default=0,
        metavar="S",
        help="seconds that ranks get to end by themselves after a first SIGTERM, SIGUSR1 or Ctrl-C",
    )
    parser.add_argument("--port", type=whole, help="where the ranks meet (default: any free one)")
    parser.add_argument("--log-dir", type=Path, metavar="DIR", help="write each rank's output to a file in DIR")
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE ...", help="run a module")
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="script.py ...", help="run a file")


def run(arguments: argparse.Namespace) -> int:
    """Run ``meshfold run``."""
    if arguments.script[:1] == ["--"]:
        del arguments.script[0]
    if not arguments.module and not arguments.script:
        raise Failure("nothing to run: give a script, meshfold run --ranks 2 train.py, or a module, -m my.module")
    program = ["-m", *arguments.module] if arguments.module is not None else arguments.script
    import torch

    from meshfold.mesh.processes import STOPPED_CODE, Environment, launch, refusal_sentence
    from meshfold.mesh.processes import run_program as run_program

    here = Environment.detect()
    if here.source != "single":
        if arguments.ranks not in (None, here.world_size):
            raise Failure(f"--ranks {arguments.ranks}, but {here.source} started {here.world_size}: leave --ranks out")
        _check_file(program)
        try:
            run_program(program)
        except Exception as error:
            sentence = refusal_sentence(error)
            if sentence:
                print(f"meshfold run: rank {here.rank}: {sentence}", file=sys.stderr)
            else:
                traceback.print_exc()  # the script's author wants to see the line
            sys.last_value = error  # as Python does: exit handlers can see that the program failed
            return 1
        return 0
    _check_file(program)
    ranks = torch.cuda.device_count() if arguments.ranks is None else arguments.ranks
    if arguments.ranks is None and ranks == 0:
        raise Failure("this machine has no GPU to tell how many ranks to start: write --ranks 2 or another number")
    if arguments.nodes is not None or arguments.rendezvous is not None or arguments.restarts:
        return _with_others(arguments, program, ranks)
    return launch(
        program,
        ranks,
        port=arguments.port,
        log_dir=arguments.log_dir,
        stop_s=arguments.grace,
        stopped_code=STOPPED_CODE if arguments.grace else 0,
    )


def _with_others(arguments: argparse.Namespace, program: list[str], ranks: int) -> int:
    """Run through torch's agent, which connects several nodes and restarts ranks."""
    from meshfold.mesh.processes import launch_node

    for option in ("port", "log_dir"):
        if getattr(arguments, option) is not None:
            raise Failure(
                f"--{option.replace('_', '-')} goes with local ranks alone: leave it out with --nodes and --restarts"
            )
    match = re.fullmatch(r"([1-9]\d*)(?::([1-9]\d*))?", arguments.nodes or "1")
    if match is None:
        raise Failure(f"--nodes {arguments.nodes!r}: write a number, such as 2, or the least and the most, 2:4")
    nodes = int(match[1]), int(match[2] or match[1])
    if nodes[1] > 1 and arguments.rendezvous is None:
        raise Failure(
            f"--nodes {arguments.nodes} without --rendezvous: say where they meet, --rendezvous {socket.gethostname()}:29500"
        )
    return launch_node(
        program,
        ranks,
        nodes=nodes,
        rendezvous=arguments.rendezvous or "localhost:0",
        job=arguments.job,
        restarts=arguments.restarts,
        address=arguments.address,
        stop_s=arguments.grace or 30,
    )


def _check_file(program: list[str]) -> None:
    """Check that a file or module exists.

    Raises:
        Failure: if not.
    """
    file = program[0].partition("::")[0]
    if file == "-m":
        _check_module(program[1])
    elif not Path(file).exists():
        if file in ("python", "python3"):
            raise Failure(
                f"{file} is started for you: leave it out, as in meshfold run --ranks 2 train.py, or -m my.module"
            )
        raise Failure(f"there is no file {file!r} to run (in {Path.cwd()})")
    elif Path(file).is_dir() and not Path(file, "__main__.py").exists():
        raise Failure(f"{file!r} is a folder without a __main__.py: give a script, such as {file}/train.py")


def _check_module(name: str) -> None:
    """Check that the outermost package of a module exists, without importing it."""
    top = name.partition(".")[0]
    with suppress(ImportError, ValueError):
        if top in sys.modules or importlib.util.find_spec(top) is not None:
            return
    here = Path.cwd()  # first on the ranks' search path
    if not (here / top).is_dir() and not (here / f"{top}.py").exists():
        raise Failure(f"there is no module {name!r} to run: no {top!r} is installed, nor in {here}")
