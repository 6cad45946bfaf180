"""Train a causal language model on a folder of text, a file of text, or a file of token ids.

  meshfold train --data ~/texts --model gpt-small --steps 500 --out run1
  meshfold train --data ~/src --extensions .py .md --parallel data=2 tensor.mode=2d tensor.size=4 --out run2
  meshfold train --data tokens.bin --hf ~/models/llama --precision bf16 --parallel tensor=4 --out run3
  meshfold train --data ~/texts --model gpt-small --steps 1000 --out run1 --resume --parallel tensor=2

The ranks are started here; under torchrun or srun those that run are used. OUT gets the checkpoint (loadable under
any other spec), metrics.jsonl, loss.png and the tokens of text.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from meshfold.engine.cli.failure import Failure
from meshfold.engine.cli.models import add_model, natural, positive, rate, read_changes
from meshfold.engine.cli.parallel import add_parallel, read_parallel

if TYPE_CHECKING:
    from meshfold.engine.progress import Progress
    from meshfold.engine.training import Inputs, TrainSettings
    from meshfold.mesh import ParallelSpec
    from meshfold.mesh.environment import Environment


def configure(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``meshfold train``."""
    parser.usage = "meshfold train --data PATH --out DIR [options]"
    data = parser.add_argument_group("data")
    data.add_argument("--data", required=True, metavar="PATH", help="folder or file of text, or token ids: .bin, .npy")
    data.add_argument(
        "--tokenizer", metavar="byte|FOLDER", help="bytes, or a Hugging Face tokenizer's folder (default: --hf's own, else byte)"
    )
    data.add_argument("--extensions", nargs="+", default=[], metavar=".EXT", help="read only files that end so")
    data.add_argument("--exclude", nargs="+", default=[], metavar="NAME", help="leave out folders of these names")
    data.add_argument("--max-bytes", type=positive, metavar="N", help="read about so many bytes of text at most")
    data.add_argument("--token-dtype", default="uint16", choices=("uint16", "uint32"), help="of a .bin file (uint16)")
    data.add_argument("--validation", type=rate, default=0.05, metavar="SHARE", help="set aside for validation (0.05)")
    model = parser.add_argument_group("model")
    add_model(model)
    work = parser.add_argument_group("parallel work")
    add_parallel(work)
    work.add_argument("--ranks", type=positive, metavar="N", help="processes to start (default: the product of the spec)")
    work.add_argument("--device", choices=("cpu", "cuda"), help="(default: a GPU for each rank where there are as many)")
    work.add_argument("--precision", default="fp32", choices=("fp32", "fp64", "bf16", "fp16"), help="(fp32)")
    steps = parser.add_argument_group("optimization")
    steps.add_argument("--steps", type=positive, default=100, metavar="N", help="optimizer steps in all (100)")
    steps.add_argument("--stop-after", type=positive, metavar="N", help="stop at step N; the schedule is that of --steps")
    steps.add_argument("--batch-size", type=positive, default=8, metavar="N", help="sequences of a step, over all ranks (8)")
    steps.add_argument("--seq-len", type=positive, default=128, metavar="N", help="tokens of a sequence (128)")
    steps.add_argument("--accumulate", type=positive, default=1, metavar="N", help="micro-steps of a step (1)")
    steps.add_argument("--optimizer", default="adamw", choices=("adamw", "adam", "sgd"), help="(adamw)")
    steps.add_argument("--lr", type=rate, default=3e-4, help="highest learning rate (3e-4)")
    steps.add_argument("--warmup", type=natural, default=0, metavar="N", help="steps on the way up to it (0)")
    steps.add_argument("--schedule", default="cosine", choices=("cosine", "linear", "constant"), help="(cosine)")
    steps.add_argument("--weight-decay", type=rate, default=0.1, metavar="X", help="of matrices (0.1)")
    steps.add_argument("--clip", type=rate, default=1.0, metavar="NORM", help="largest gradient norm, 0 for none (1.0)")
    steps.add_argument("--seed", type=natural, default=0, help="of weights, dropout and the order of data (0)")
    out = parser.add_argument_group("output")
    out.add_argument("--out", required=True, metavar="DIR", help="folder to write to")
    out.add_argument("--resume", action="store_true", help="go on from the checkpoint in DIR")
    out.add_argument("--eval-every", type=natural, default=0, metavar="N", help="steps between evaluations (at the end only)")
    out.add_argument("--eval-batches", type=positive, default=8, metavar="N", help="batches of an evaluation (8)")
    out.add_argument("--save-every", type=natural, default=0, metavar="N", help="steps between checkpoints (at the end only)")
    out.add_argument("--prompt", metavar="TEXT", help="at the end, write how the model goes on from TEXT")
    out.add_argument("--sample-tokens", type=positive, default=200, metavar="N", help="how far (200)")
    out.add_argument("--no-plan", action="store_true", help="do not print the plan first")
    out.add_argument("--json", action="store_true", help="print a line of JSON a step, all else on standard error")


def run(arguments: argparse.Namespace) -> int:
    """Run ``meshfold train``: in a process that the ranks are started from, or as one of them."""
    settings = settings_of(arguments)
    from meshfold.mesh.environment import Environment

    here = Environment.detect()
    if here.source == "single":
        return start(settings, arguments.argv, ranks=arguments.ranks, plan=not arguments.no_plan, as_json=arguments.json)
    if arguments.ranks not in (None, here.world_size):
        raise Failure(f"--ranks {arguments.ranks}, but {here.source} started {here.world_size}: leave --ranks out")
    return _as_rank(settings, here, plan=not arguments.no_plan, as_json=arguments.json)


def start(
    settings: TrainSettings, words: list[str], *, ranks: int | None = None, plan: bool = True, as_json: bool = False
) -> int:
    """Check everything, show the plan, and train: here, if the spec has one rank, else on ranks that are started.

    Args:
        settings: what to train.
        words: the same as arguments of ``meshfold train``, for the ranks.
        ranks: how many, if it was said.
        plan: whether to print it.
        as_json: what is printed of each step.

    Returns:
        The exit code.
    """
    from meshfold.engine.progress import make_progress
    from meshfold.mesh import ParallelSpec
    from meshfold.mesh.launch import launch

    spec = ParallelSpec.parse(settings.parallel, ranks)
    spec = spec.with_world_size(spec.world_size)  # data is 1 where neither it nor --ranks was given
    spec.require_installed()
    progress = make_progress(settings.last_step, show=True, as_json=as_json)
    inputs = _checked_inputs(settings, progress)
    _show_plan(settings, spec, inputs, progress, show=plan)
    if spec.world_size == 1:
        from meshfold.engine.training import train

        train(settings, inputs, progress)
        return 0
    return launch(["-m", "meshfold.engine.cli", "train", *words, "--no-plan"], spec.world_size)


def settings_of(arguments: argparse.Namespace) -> TrainSettings:
    """The arguments as settings."""
    words = vars(arguments)
    parallel = read_parallel(arguments.parallel)
    changes = read_changes(arguments.changes)
    from dataclasses import fields

    from meshfold.engine.training import TrainSettings

    given: dict[str, Any] = {field.name: words[field.name] for field in fields(TrainSettings)}
    given.update(parallel=parallel, changes=changes)
    given.update({name: tuple(words[name]) for name in ("extensions", "exclude")})
    return TrainSettings(**given)


def words_of(settings: TrainSettings) -> list[str]:
    """The arguments that :func:`settings_of` makes these settings of (objects in the spec cannot be written so)."""
    from dataclasses import fields

    words: list[str] = []
    for field in fields(settings):
        value = getattr(settings, field.name)
        option = "--set" if field.name == "changes" else "--" + field.name.replace("_", "-")
        if value == field.default or value in ((), {}):
            continue
        if field.name == "parallel":
            words += [option, repr(value)]
        elif field.name == "changes":
            words += [option, *(f"{key}={item}" for key, item in value.items())]
        elif isinstance(value, tuple):
            words += [option, *value]
        else:
            words += [option] if value is True else [f"{option}={value}"]
    return words


def _as_rank(settings: TrainSettings, here: Environment, *, plan: bool, as_json: bool) -> int:
    """Be one of the ranks that run already."""
    from meshfold.engine.hf import quiet
    from meshfold.engine.progress import make_progress
    from meshfold.engine.training import open_inputs, train
    from meshfold.mesh import Mesh, ParallelSpec, barrier
    from meshfold.mesh.process_group import start as join

    if settings.hf is not None and (here.rank > 0 or not plan):
        quiet()
    progress = make_progress(settings.last_step, show=here.rank == 0, as_json=as_json)
    spec = ParallelSpec.parse(settings.parallel, here.world_size)
    spec.require_installed()
    if here.rank == 0 and plan:
        _show_plan(settings, spec, _checked_inputs(settings, progress), progress, show=True)
    with join(device=settings.device) as process:
        everyone = Mesh({"rank": process.world_size}).group("rank")
        if here.local_rank == 0:
            inputs = open_inputs(settings, progress)  # tokenises, for all ranks of this machine
        barrier(everyone, process.device)
        if here.local_rank != 0:
            inputs = open_inputs(settings, progress)
        train(settings, inputs, progress)
    return 0


def _checked_inputs(settings: TrainSettings, progress: Progress) -> Inputs:
    """What can be wrong with the folder and the inputs, before anything starts."""
    from meshfold.engine.checkpoint import Checkpoint
    from meshfold.engine.training import open_inputs

    if settings.resume:
        Checkpoint(settings.checkpoint)
    elif settings.checkpoint.exists():
        raise Failure(f"{settings.checkpoint} is there already: go on from it with --resume, or choose another --out")
    inputs = open_inputs(settings, progress)
    corpus = inputs.corpus
    progress.say(
        f"{inputs.model.name} on {settings.data}: {corpus.train_tokens:,} tokens to train on, {corpus.validation_tokens:,} to "
        f"validate with; {settings.steps * settings.batch_size * settings.seq_len:,} are {settings.steps} steps"
    )
    for note in corpus.notes:
        progress.say(f"  {note}")
    return inputs


def _show_plan(settings: TrainSettings, spec: ParallelSpec, inputs: Inputs, progress: Progress, *, show: bool) -> None:
    """Set up the engine without values: what it refuses is refused here, in one sentence; the rest is the plan."""
    from meshfold.engine.plan_text import memory_table, picture, traffic_table
    from meshfold.engine.planner import estimate
    from meshfold.mesh import MeshfoldError

    try:
        found = estimate(
            inputs.model.build,
            spec,
            batch_size=settings.batch_size,
            seq_len=settings.seq_len,
            precision=settings.precision,
            optimizer=settings.optimizer,
            accumulate=settings.accumulate,
        )
    except MeshfoldError:
        raise
    except Exception as error:  # a model whose code looks at values; training it is another matter
        reason = (str(error) or type(error).__name__).split("\n")[0]
        progress.say(f"no plan: this model's code cannot run without values ({reason})")
        return
    if settings.resume:
        _check_checkpoint(settings, found.shapes)
    if show:
        many = [spec.describe(), picture(spec.axes)] if spec.world_size > 1 else []
        parts = (*many, found.summary, memory_table(found), traffic_table(found))
        progress.say("\n" + "\n\n".join(part for part in parts if part) + "\n")


def _check_checkpoint(settings: TrainSettings, shapes: dict[str, tuple[int, ...]]) -> None:
    """Whether the checkpoint to go on from is of this model."""
    from meshfold.engine.checkpoint import Checkpoint

    kept = {name: tuple(tensor.shape) for name, tensor in Checkpoint(settings.checkpoint).model.items()}
    for name in sorted(kept.keys() | shapes.keys()):
        here, there = shapes.get(name, "nothing of that name"), kept.get(name, "nothing of that name")
        if here != there:
            raise Failure(
                f"{settings.checkpoint} is of another model: {name!r} is {there} there and {here} here; give the --model, "
                "--set and --tokenizer that it was trained with"
            )
