"""Train a causal language model on a folder of text, a file of text, or a file of token ids.

  meshfold train --data ~/texts --model gpt-small --steps 500 --out run1
  meshfold train --data ~/src --extensions .py .md --parallel data=2 tensor.mode=2d tensor.size=4 --out run2
  meshfold train --data tokens.bin --hf ~/models/llama --precision bf16 --parallel tensor=4 --out run3
  meshfold train --resume --out run1 --steps 1000 --parallel tensor=2

The ranks are started here; under torchrun or srun those that run are used. OUT gets the checkpoint (loadable under
any other spec), metrics.jsonl, settings.json, loss.png and the tokens of text. SIGTERM or SIGUSR1 ends the run after the
step that is made, with a checkpoint and exit code 75. So does a first Ctrl-C, with code 130; a second one ends it at once.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Any

from meshfold.cli.arguments import Failure
from meshfold.cli.auto_spec import with_chosen_spec
from meshfold.cli.train_arguments import configure, settings_of
from meshfold.cli.train_checks import (
    check_checkpoint,
    check_device,
    check_folder,
    check_fp8,
    check_unused,
    check_warmup,
)
from meshfold.mesh.processes import STOPPED_CODE

if TYPE_CHECKING:
    from meshfold.mesh import ParallelSpec
    from meshfold.mesh.processes import Environment
    from meshfold.planner import Estimate
    from meshfold.train.loop import Inputs
    from meshfold.train.progress import Progress
    from meshfold.train.settings import TrainSettings

__all__ = ["configure", "run", "start"]


_STOP_S = 3600.0  # time for the last step and its checkpoint; a second request ends it at once


def run(arguments: argparse.Namespace) -> int:
    """Run ``meshfold train``, in the process that starts the ranks, or as one of them."""
    from meshfold.mesh.processes import Environment

    here = Environment.detect()
    arguments.rank = None if here.source == "single" else here.rank
    settings = settings_of(arguments)
    if here.source == "single":
        return start(
            settings,
            arguments.argv,
            ranks=arguments.ranks,
            plan=not arguments.no_plan,
            as_json=arguments.json,
            report=arguments.report,
            machine=arguments.machine,
        )
    if arguments.ranks not in (None, here.world_size):
        raise Failure(f"--ranks {arguments.ranks}, but {here.source} started {here.world_size}: leave --ranks out")
    return _as_rank(
        settings,
        here,
        plan=not arguments.no_plan,
        as_json=arguments.json,
        report=arguments.report,
        machine=arguments.machine,
    )


def start(
    settings: TrainSettings,
    words: list[str],
    *,
    ranks: int | None = None,
    plan: bool = True,
    as_json: bool = False,
    report: bool = False,
    machine: str | None = None,
) -> int:
    """Check everything, show the plan, and train: here, if the spec has one rank, else on ranks that are started.

    Args:
        settings: what to train.
        words: the same as arguments of ``meshfold train``, for the ranks.
        ranks: their number, if given.
        plan: whether to print it.
        as_json: print each step as JSON.
        report: whether the plan lists every submodule and its layout.
        machine: name or file, for which ``auto`` chooses.

    Returns:
        The exit code.
    """
    from meshfold.mesh import ParallelSpec
    from meshfold.mesh.processes import launch
    from meshfold.train.metrics import check_trackers
    from meshfold.train.progress import make_progress

    progress = make_progress(settings.last_step, show=True, as_json=as_json)
    check_unused(settings)  # before `auto` searches for a spec
    check_fp8(settings)
    settings, more = with_chosen_spec(settings, ranks, progress, machine)
    words = [*words, *more]  # the last one counts
    settings = _settled(settings, ranks, progress)
    spec = ParallelSpec.parse(settings.parallel, ranks)
    spec = spec.with_world_size(spec.world_size)  # data defaults to 1 without --ranks
    spec.require_installed()
    check_device(settings, spec.world_size)
    check_warmup(settings)
    check_trackers(settings.track)
    check_folder(settings, progress)
    inputs = _open_inputs(settings, spec, progress)
    chosen = _planned(settings, spec, inputs, progress, show=plan, report=report, machine=machine)
    if spec.world_size == 1:
        from meshfold.train.loop import train

        with CtrlC() as ctrl_c:
            code = _code(chosen, train(chosen, inputs, progress))
        return 130 if code and ctrl_c.caught else code
    if chosen.parallel != settings.parallel:
        words = [*words, "--parallel", repr(chosen.parallel)]  # the last one counts
    program = ["-m", "meshfold.cli", "train", *words, "--no-plan"]
    return launch(program, spec.world_size, stop_s=_STOP_S, stopped_code=STOPPED_CODE)


class CtrlC:
    """Handler of Ctrl-C for a run of one process: the first stops it with a checkpoint, as SIGTERM does; a second interrupts it.

    For several ranks :func:`meshfold.mesh.processes.launcher.launch` does this.

    Attributes:
        caught: whether a stop was requested.
    """

    def __init__(self) -> None:
        self.caught = False
        self._before: Any = None

    def __enter__(self) -> CtrlC:
        if (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler  # False under nohup
        ):
            self._before = signal.signal(signal.SIGINT, self._catch)
        return self

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        # Without a SIGTERM handler training has not begun, or is over: there is nothing to save.
        if self.caught or not callable(signal.getsignal(signal.SIGTERM)):
            raise KeyboardInterrupt
        self.caught = True
        print("asked to stop; Ctrl-C again ends it at once", file=sys.stderr, flush=True)
        signal.raise_signal(signal.SIGTERM)


def _as_rank(
    settings: TrainSettings, here: Environment, *, plan: bool, as_json: bool, report: bool, machine: str | None
) -> int:
    """Run as one of the ranks that are already running."""
    from meshfold.huggingface import silence_transformers
    from meshfold.mesh import Mesh, ParallelSpec, barrier
    from meshfold.mesh.processes import DEFAULT_TIMEOUT
    from meshfold.mesh.processes import start as join
    from meshfold.mesh.watchdog import watchdog_limit
    from meshfold.train.loop import open_inputs, train
    from meshfold.train.progress import Progress, make_progress

    if settings.hf is not None and (here.rank > 0 or not plan):
        silence_transformers()
    progress = make_progress(settings.last_step, show=here.rank == 0, as_json=as_json)
    settings, _ = with_chosen_spec(settings, here.world_size, progress if plan else Progress(), machine)
    settings = _settled(settings, here.world_size, progress if plan else Progress())
    spec = ParallelSpec.parse(settings.parallel, here.world_size)
    spec.require_installed()
    check_fp8(settings)
    check_warmup(settings)
    check_folder(settings, progress if plan else Progress())
    if plan:  # on every rank: torch numbers process groups, fake ones too, and the numbers must agree
        checked = _open_inputs(settings, spec, progress)
        settings = _planned(settings, spec, checked, progress, show=True, report=report, machine=machine)
    with join(device=settings.device, meeting=watchdog_limit(settings.watchdog) or DEFAULT_TIMEOUT) as process:
        everyone = Mesh({"rank": process.world_size}).group("rank")
        if here.local_rank == 0:
            inputs = open_inputs(settings, progress)  # fills the token cache for all ranks of this machine
        barrier(everyone, process.device)
        if here.local_rank != 0:
            inputs = open_inputs(settings, progress)
        rows = train(settings, inputs, progress)
        barrier(everyone, process.device)  # rank 0 may still be drawing
    return _code(settings, rows)


def _settled(settings: TrainSettings, ranks: int | None, progress: Progress) -> TrainSettings:
    """Return the settings with ``resume`` decided by the folder, and ``data`` by the number of ranks."""
    from meshfold.engine.long_runs import resize_data_axis

    if settings.resume == "auto":  # raises if there are checkpoints and all are damaged
        settings = replace(settings, resume=settings.checkpoints.to_go_on_from() is not None)
    if settings.resume and ranks is not None:
        parallel, said = resize_data_axis(settings.parallel, ranks)
        if said:
            progress.say(said)
        settings = replace(settings, parallel=parallel)
    return settings


def _code(settings: TrainSettings, rows: list[dict[str, Any]]) -> int:
    """Return 0, or the exit code of a run that was stopped before its last step."""
    return STOPPED_CODE if rows and rows[-1]["step"] < settings.last_step else 0


def _device_memory(settings: TrainSettings) -> int:
    """Return the bytes of a GPU's memory; 0 without one."""
    import torch

    if settings.device == "cpu" or not torch.cuda.is_available():
        return 0
    return int(torch.cuda.get_device_properties(0).total_memory)


def _open_inputs(settings: TrainSettings, spec: ParallelSpec, progress: Progress) -> Inputs:
    """Open the inputs of the run, and describe them on the terminal."""
    from meshfold.train.loop import open_inputs

    inputs = open_inputs(settings, progress)
    corpus = inputs.corpus
    progress.say(
        f"{inputs.model.name} on {settings.data}: {corpus.train_tokens:,} tokens to train on, "
        f"{corpus.validation_tokens:,} to validate with; "
        f"{settings.steps * settings.batch_size * settings.seq_len:,} are {settings.steps} steps"
    )
    rows, shares = settings.batch_size // settings.accumulate, spec.data or 1
    idle = (
        [
            f"{rows} of {shares} data ranks get a row in a forward, the others one that does not count. Write a --batch-size of "
            f"{shares * settings.accumulate} at least"
        ]
        if rows < shares
        else []
    )
    for note in (*inputs.notes, *idle):
        progress.say(f"  {note}")
    return inputs


def _planned(
    settings: TrainSettings,
    spec: ParallelSpec,
    inputs: Inputs,
    progress: Progress,
    *,
    show: bool,
    report: bool = False,
    machine: str | None = None,
) -> TrainSettings:
    """Set up the engine on meta tensors, print the plan, and report a refusal in one sentence.

    Returns:
        The settings; with attention by tokens, where ``overlap="auto"`` leaves that open and the plan expects faster steps.
    """
    from meshfold.mesh import MeshfoldError
    from meshfold.planner import choose_attention, estimate, find_machine, unlimited_machine
    from meshfold.planner.report import memory_table, mesh_picture, traffic_table

    links = unlimited_machine() if machine is None else find_machine(machine)
    roomy = unlimited_machine()

    def estimated(spec: ParallelSpec) -> Estimate:
        return estimate(
            inputs.model.build,
            spec,
            batch_size=settings.batch_size,
            seq_len=settings.seq_len,
            precision=settings.precision,
            recompute=settings.recompute,
            optimizer=settings.optimizer,
            accumulate=settings.accumulate,
            rules=settings.rules,
            clip=settings.clip > 0,
            machine=roomy,
        )

    try:
        found = estimated(spec)
        device = replace(links, memory=_device_memory(settings) or links.memory)
        attention = choose_attention(found, device, settings.precision, estimated)
    except MeshfoldError:
        raise
    except Exception as error:  # the model's code reads values; training may still work
        reason = (str(error) or type(error).__name__).split("\n")[0]
        progress.say(f"no plan: this model's code cannot run without values ({reason})")
        return settings
    if attention is not None:
        progress.say(f"overlap='auto' chose {attention.why}")
        if attention.found is not None and attention.by_tokens:
            found, spec = attention.found, attention.found.spec
            settings = replace(settings, parallel={**settings.parallel, "tensor": attention.tensor})
    if settings.resume:
        check_checkpoint(settings, found.shapes)
    if show:
        many = [spec.describe(), mesh_picture(spec.axes)] if spec.world_size > 1 else []
        placed = found.report if report and found.report else found.summary
        parts = (*many, placed, memory_table(found), traffic_table(found))
        progress.say("\n" + "\n\n".join(part for part in parts if part) + "\n")
        if found.refusal:
            refusal = found.refusal.removesuffix(".")
            raise Failure(f"it does not fit: {refusal}. --no-plan trains anyway, until memory runs out", 1)
    return settings
