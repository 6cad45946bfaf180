"""The arguments of ``meshfold train``, and their conversion to settings and back."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from meshfold.cli.arguments import (
    Failure,
    add_model,
    add_parallel,
    learning_rate,
    natural,
    positive,
    rate,
    read_changes,
    read_model,
    read_parallel_or_auto,
    read_rules,
    several,
)

if TYPE_CHECKING:
    from meshfold.train.settings import TrainSettings

_OF_THE_COMMAND = ("help", "out", "ranks", "machine", "resume", "no_plan", "report", "json", "model", "hf")
FP8_NAMES = ("rowwise_hp_dw", "rowwise", "tensorwise", "block128")
OPTIMIZER_NAMES = (
    *("adamw", "adam", "sgd", "lion", "lamb", "lars", "adafactor", "adafactor_hf", "came", "muon"),
    *("galore_adamw", "galore_adafactor"),
)
"""Those of the engine."""
RECOMPUTE = (
    "activations in backward: of every block, all but the results of attention, or as the plan of zero says (the model's own "
    "business)"
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``meshfold train``."""
    parser.usage = "meshfold train --data PATH --out DIR [options]\n       meshfold train --resume --out DIR [options]"
    parser.epilog = "With --resume, options that are not given are those of the run so far."
    _add_data(parser.add_argument_group("data"))
    add_model(parser.add_argument_group("model"))
    _add_work(parser.add_argument_group("parallel work"))
    _add_steps(parser.add_argument_group("optimization"))
    _add_output(parser.add_argument_group("output"))
    # No defaults here: missing arguments come from a resumed run's settings, else from TrainSettings.
    for action in parser._actions:
        if action.dest not in _OF_THE_COMMAND:
            action.default = argparse.SUPPRESS


def _add_data(data: argparse._ArgumentGroup) -> None:
    """Add the arguments of the data: text or token ids."""
    data.add_argument(
        "--data",
        metavar="PATH",
        help="folder or file of text; records (.jsonl, .parquet, .arrow, a folder that datasets saved); token ids: .bin, .npy",
    )
    data.add_argument("--text-column", metavar="NAME", help="of records: the field with the text (text)")
    data.add_argument(
        "--tokenizer",
        metavar="byte|FOLDER",
        help="bytes, or a Hugging Face tokenizer's folder (default: --hf's own, else byte)",
    )
    data.add_argument("--extensions", nargs="+", metavar=".EXT", help="read only files that end so")
    data.add_argument("--exclude", nargs="+", metavar="NAME", help="leave out folders of these names")
    data.add_argument("--max-bytes", type=positive, metavar="N", help="read at most about N bytes of text")
    data.add_argument("--token-dtype", choices=("uint16", "uint32"), help="of a .bin file (uint16)")
    data.add_argument("--validation", type=rate, metavar="SHARE", help="set aside for validation (0.05)")


def _add_work(work: argparse._ArgumentGroup) -> None:
    """Add the arguments that say how ranks divide the work and compute it."""
    add_parallel(work)
    work.add_argument(
        "--ranks", type=positive, metavar="N", help="processes to start (default: the product of the spec)"
    )
    work.add_argument(
        "--device", choices=("cpu", "cuda"), help="(default: a GPU for each rank where there are as many)"
    )
    work.add_argument(
        "--machine",
        metavar="NAME|FILE",
        help="for which --parallel auto and overlap='auto' choose: a name as for meshfold plan, or a file of meshfold calibrate",
    )
    work.add_argument("--precision", choices=("fp32", "fp64", "bf16", "fp16"), help="(fp32)")
    work.add_argument(
        "--fp8",
        choices=FP8_NAMES,
        help="recipe of linear layers in fp8, with --precision bf16 (none)",
    )
    work.add_argument(
        "--nonfinite",
        choices=("error", "skip", "report"),
        help="a loss or gradient that is nan or infinite: stop, leave the step out, or say where it arose (report)",
    )
    work.add_argument(
        "--watchdog",
        type=rate,
        metavar="S",
        help="seconds after which a collective that hangs ends the run, 0 for never (600)",
    )
    work.add_argument("--recompute", choices=("blocks", "but-attention", "auto"), help=RECOMPUTE)
    work.add_argument(
        "--kernels",
        choices=("auto", "off"),
        help="fused kernels in the place of the model's operations (auto)",
    )
    work.add_argument("--compile", action="store_true", help="compile every block with torch.compile")
    work.add_argument(
        "--cuda-graph", action="store_true", help="replay forward and backward as one CUDA graph, for small models"
    )


def _add_steps(steps: argparse._ArgumentGroup) -> None:
    """Add the arguments of steps, batches and the optimizer."""
    steps.add_argument("--steps", type=positive, metavar="N", help="optimizer steps in all (100)")
    steps.add_argument(
        "--stop-after", type=positive, metavar="N", help="stop at step N; the schedule is that of --steps"
    )
    steps.add_argument("--batch-size", type=positive, metavar="N", help="sequences of a step, over all ranks (8)")
    steps.add_argument("--seq-len", type=several, metavar="N", help="tokens of a sequence (128)")
    steps.add_argument("--accumulate", type=positive, metavar="N", help="micro-steps of a step (1)")
    steps.add_argument("--optimizer", choices=OPTIMIZER_NAMES, help="(adamw)")
    steps.add_argument("--lr", type=learning_rate, help="highest learning rate (3e-4)")
    steps.add_argument("--warmup", type=natural, metavar="N", help="steps on the way up to it (0)")
    steps.add_argument("--schedule", choices=("cosine", "linear", "constant"), help="(cosine)")
    steps.add_argument("--weight-decay", type=rate, metavar="X", help="of matrices (0.1)")
    steps.add_argument(
        "--bias-rate", type=rate, metavar="X", help="of the biases that balance sigmoid routers, 0 for none (0.001)"
    )
    steps.add_argument("--clip", type=rate, metavar="NORM", help="largest gradient norm, 0 for none (1.0)")
    steps.add_argument("--seed", type=natural, help="of weights, dropout and the order of data (0)")


def _add_output(out: argparse._ArgumentGroup) -> None:
    """Add the arguments of the folder, checkpoints, metrics and what is printed."""
    out.add_argument("--out", required=True, metavar="DIR", help="folder to write to")
    out.add_argument(
        "--resume",
        nargs="?",
        const=True,
        default=False,
        choices=("auto",),
        help="resume from the newest complete checkpoint in DIR; 'auto': only if there is one (for jobs that are "
        "restarted)",
    )
    out.add_argument(
        "--eval-every",
        type=natural,
        metavar="N",
        help="steps between evaluations (at the end only)",
    )
    out.add_argument("--eval-batches", type=positive, metavar="N", help="batches of an evaluation (8)")
    out.add_argument(
        "--save-every",
        type=natural,
        metavar="N",
        help="steps between checkpoints (at the end only)",
    )
    out.add_argument(
        "--keep",
        type=positive,
        metavar="N",
        help="keep the newest N checkpoints, each in DIR/checkpoints/step-... (1, in DIR/checkpoint)",
    )
    out.add_argument("--save-asynchronously", action="store_true", help="write checkpoints in the background")
    out.add_argument(
        "--metrics",
        nargs="+",
        dest="track",
        metavar="NAME",
        help="tensorboard, wandb: beside metrics.jsonl",
    )
    out.add_argument(
        "--peak-tflops",
        type=rate,
        metavar="T",
        help="of a device, for MFU (the data sheet's, where the GPU is known)",
    )
    out.add_argument("--prompt", metavar="TEXT", help="at the end, generate text after TEXT")
    out.add_argument("--sample-tokens", type=positive, metavar="N", help="how far (200)")
    out.add_argument("--no-plan", action="store_true", help="do not print the plan first")
    out.add_argument("--report", action="store_true", help="with the plan, how each submodule is split")
    out.add_argument("--json", action="store_true", help="print a line of JSON a step, all else on standard error")


def settings_of(arguments: argparse.Namespace) -> TrainSettings:
    """Return the arguments as settings; defaults come from a resumed run, otherwise from TrainSettings.

    Raises:
        Failure: for an argument that cannot be parsed, and if there is no data to train on.
        SpecError: for a folder whose kept settings cannot be read.
    """
    read_model(arguments)
    words = vars(arguments)
    from dataclasses import fields

    from meshfold.train.run_folder import read_settings
    from meshfold.train.settings import TrainSettings

    names = (field.name for field in fields(TrainSettings))
    typed = {name: words[name] for name in names if words.get(name) is not None}
    readers = {"parallel": read_parallel_or_auto, "changes": read_changes, "rules": read_rules}
    typed.update({name: read(typed[name]) for name, read in readers.items() if name in typed})
    typed.update({name: tuple(typed[name]) for name in ("extensions", "exclude", "track") if name in typed})
    given = read_settings(words["out"]) if words["resume"] else {}
    if typed.keys() & {"model", "hf"}:  # a new model inherits nothing from the old one
        given = {name: value for name, value in given.items() if name not in ("model", "hf", "changes")}
    given.update(typed)
    if "data" not in given:
        missing = "the following arguments are required: --data. See meshfold train --help"
        if words["resume"] is True:
            from meshfold.cli.train_checks import must_go_on

            must_go_on(words["out"])
            missing = f"--resume: no settings.json in {words['out']!r} says what the run reads: type --data and the rest again"
        raise Failure(missing)
    return TrainSettings(**given)


def words_of(settings: TrainSettings) -> list[str]:
    """Return the arguments that :func:`settings_of` makes these settings from (objects in the spec cannot be written)."""
    from dataclasses import fields

    from meshfold.train.run_folder import option_of

    words: list[str] = []
    for field in fields(settings):
        value = getattr(settings, field.name)
        option = option_of(field.name)
        if value == field.default or value in ((), {}):
            continue
        if field.name == "parallel":
            words += [option, repr(value)]
        elif field.name == "rules":
            words += [f"--rule={pattern}={role}" for pattern, role in value.items()]
        elif field.name == "changes":
            words += [option, *(f"{key}={item}" for key, item in value.items())]
        elif isinstance(value, tuple):
            words += [option, *value]
        else:
            words += [option] if value is True else [f"{option}={value}"]
    return words
