"""Start a script on local ranks.

  meshfold run --ranks 4 train.py --lr 1e-3
  meshfold run --ranks 4 -m my.module --lr 1e-3

The ranks meet on a port of this machine that is free. What rank 0 prints is shown, and every rank's standard error
with the rank before each line. When one fails the others are ended, and its traceback comes last; Ctrl-C ends all.
Under torchrun or srun, which start the ranks themselves, the script is just run.
"""

from __future__ import annotations

import argparse
import traceback
from pathlib import Path

from meshfold.engine.cli.failure import Failure
from meshfold.engine.cli.models import whole


def configure(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``meshfold run``."""
    parser.usage = "meshfold run [--ranks N] [--port PORT] [--log-dir DIR] (script.py | -m MODULE) ..."
    parser.add_argument(
        "--ranks", type=whole, metavar="N", help="how many processes (default: one for each GPU)"
    )
    parser.add_argument("--port", type=whole, help="where the ranks meet (default: any free one)")
    parser.add_argument(
        "--log-dir", type=Path, metavar="DIR", help="keep what each rank prints, a file a rank"
    )
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE ...", help="run a module"
    )
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="script.py ...", help="run a file")


def run(arguments: argparse.Namespace) -> int:
    """Run ``meshfold run``."""
    if arguments.script[:1] == ["--"]:
        del arguments.script[0]
    if arguments.module is None and not arguments.script:
        raise Failure(
            "nothing to run: give a script, meshfold run --ranks 2 train.py, or a module, -m my.module"
        )
    program = ["-m", *arguments.module] if arguments.module is not None else arguments.script
    import torch

    from meshfold.mesh import _bootstrap
    from meshfold.mesh.environment import Environment
    from meshfold.mesh.launch import launch

    here = Environment.detect()
    if here.source != "single":
        if arguments.ranks not in (None, here.world_size):
            raise Failure(
                f"--ranks {arguments.ranks}, but {here.source} started {here.world_size}: leave --ranks out"
            )
        _check_file(program)
        try:
            _bootstrap.run(program)
        except Exception:
            traceback.print_exc()  # whatever it is, the person who wrote the script wants to see where
            return 1
        return 0
    _check_file(program)
    ranks = torch.cuda.device_count() if arguments.ranks is None else arguments.ranks
    if arguments.ranks is None and ranks == 0:
        raise Failure("this machine has no GPU to tell how many ranks to start: say it with --ranks N")
    return launch(program, ranks, port=arguments.port, log_dir=arguments.log_dir)


def _check_file(program: list[str]) -> None:
    file = program[0].partition("::")[0]
    if file != "-m" and not Path(file).exists():
        if file in ("python", "python3"):
            raise Failure(
                f"{file} is started for you: leave it out, as in meshfold run --ranks 2 train.py, or -m my.module"
            )
        raise Failure(f"there is no file {file!r} to run (in {Path.cwd()})")
