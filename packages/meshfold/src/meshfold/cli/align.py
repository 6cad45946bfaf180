"""Align a causal language model: fine-tune it on completions, on preferences, or with rewards for its own samples.

  meshfold align sft    --data chats.jsonl --hf ~/models/llama --out sft
  meshfold align reward --data pairs.jsonl --hf ~/models/llama --out reward
  meshfold align dpo    --data pairs.jsonl --hf ~/models/llama --start sft --parallel data=2 --out dpo
  meshfold align grpo   --data prompts.jsonl --model gpt-tiny --reward rewards.py:short --out grpo

FILE has one JSON object per line, with the keys of TRL's datasets:

  sft          prompt and completion, or messages
  kto          the same, and label (true or false)
  reward, dpo  prompt, chosen and rejected
  grpo, ppo    prompt; all other keys are passed to the reward functions

DIR receives metrics.jsonl, settings.json, a plot of the run and its last checkpoint.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from meshfold.cli.align_arguments import add_arguments
from meshfold.cli.arguments import (
    Failure,
    read_changes,
    read_model,
    read_parallel,
    read_rules,
)
from meshfold.cli.train_checks import check_out

SETTINGS = {
    **{name: f"--{name}" for name in ("beta", "centering", "epochs", "gamma", "group", "length", "loss", "updates")},
    **{
        name: f"--{name.replace('_', '-')}"
        for name in ("batch_size", "label_smoothing", "max_new_tokens", "micro_steps")
    },
    "kind": "--loss",
}
"""Settings of trainers, which errors name, by the options that give them."""
TRAINERS = ("sft", "reward", "dpo", "kto", "grpo", "ppo")
_SETTINGS = "settings.json"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``meshfold align``."""
    parser.usage = (
        "meshfold align TRAINER --data FILE --out DIR [options]\n       meshfold align TRAINER --resume --out DIR"
    )
    parser.set_defaults(parse_again=parser.parse_args)
    parser.add_argument("trainer", choices=TRAINERS, metavar="TRAINER", help="the method: " + ", ".join(TRAINERS))
    add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run ``meshfold align``, in the process that starts the ranks, or as one of them."""
    from meshfold.mesh import ParallelSpec
    from meshfold.mesh.processes import Environment, launch
    from meshfold.mesh.processes import start as join

    here = Environment.detect()
    arguments.rank = None if here.source == "single" else here.rank
    arguments = _with_options_of_the_run(arguments)
    read_model(arguments)
    _take_options_of_the_start(arguments)
    ranks, sampling = arguments.ranks if here.source == "single" else here.world_size, arguments.rollout_ranks
    if ranks is not None and ranks <= sampling:
        raise Failure(
            f"--rollout-ranks {sampling} of {ranks} processes leaves none to train: start more, or let fewer sample"
        )
    spec = ParallelSpec.parse(read_parallel(arguments.parallel), None if ranks is None else ranks - sampling)
    spec = spec.with_world_size(spec.world_size)
    _check(arguments)
    if sampling:
        arguments.rollout = _rollout_ranks(arguments)
    if arguments.plan:
        from meshfold.train.alignment import open_run

        made = open_run(arguments, read_changes(arguments.changes))
        if here.source == "single" or here.rank == 0:
            print(made.plan(read_parallel(arguments.parallel)))
        return 0
    if here.source != "single":
        with join(device=arguments.device):
            return _train(arguments, say=here.rank == 0)
    if spec.world_size + sampling == 1:
        return _train(arguments, say=True)
    from meshfold.train.alignment import open_run

    open_run(arguments, read_changes(arguments.changes))  # report errors in data and settings once
    return launch(["-m", "meshfold.cli", "align", *arguments.argv], spec.world_size + sampling)


def _rollout_ranks(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the trainer's argument ``rollout`` for ranks that only sample.

    Raises:
        Failure: for text that is no spec, or one of another number of ranks.
    """
    from meshfold.mesh import ParallelSpec, SpecError

    try:
        found = read_parallel(arguments.rollout_parallel or ["dict()"])
        ParallelSpec.parse(found, arguments.rollout_ranks).with_world_size(arguments.rollout_ranks)
    except (Failure, SpecError) as error:
        raise Failure(f"--rollout-parallel: {str(error).removeprefix('--parallel ')}") from None
    return dict(ranks=arguments.rollout_ranks, parallel=found, every=arguments.rollout_every)


def _train(arguments: argparse.Namespace, *, say: bool) -> int:
    from meshfold.align import fit
    from meshfold.train.alignment import draw, open_run

    made = open_run(arguments, read_changes(arguments.changes))
    trainer = made.make(read_parallel(arguments.parallel), read_rules(arguments.rules))
    out = Path(arguments.out)
    if say:
        out.mkdir(parents=True, exist_ok=True)
        words = [arguments.trainer, *_without_trainer(arguments)]  # first, for what starts from this run
        (out / _SETTINGS).write_text(json.dumps(words), encoding="utf-8")
        print(made.summary, flush=True)
        if arguments.gpu_memory is not None:
            print(trainer.phases, flush=True)
    every = max(1, arguments.steps // 10)

    def show(step: int, metrics: Any) -> None:
        if arguments.json:
            print(json.dumps(dict(step=step, **metrics)), flush=True)
        elif step % every == 0 or step in (1, arguments.steps):
            print(f"step {step:>5}  " + "  ".join(f"{name} {value:.4g}" for name, value in metrics.items()), flush=True)

    try:
        fit(
            trainer,
            arguments.steps,
            arguments.out,
            save_every=arguments.save_every,
            resume=arguments.resume,
            show=show if say else None,
        )
    finally:
        trainer.close()
    if say:
        draw(out, f"{arguments.trainer}, {made.name}")
        shared = getattr(trainer, "shared_prompt", None)
        if shared is not None and not arguments.json:
            print(shared)
        print(f"checkpoint: {out}", flush=True)
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """Check what needs no data and no model.

    Raises:
        Failure: for options that do not belong together.
    """
    name = arguments.trainer
    sampled = name in ("grpo", "ppo")
    check_out(arguments.out)
    if arguments.data is None and arguments.resume:
        raise Failure(
            f"--resume: there is no run in {arguments.out!r} to resume: give its folder, or start a new one with --data FILE"
        )
    if arguments.data is None:
        raise Failure("the following arguments are required: --data. See meshfold align --help")
    if not arguments.resume and (made := _steps_of(arguments.out)) is not None:
        raise Failure(
            f"--out {arguments.out!r} has a run of {made} steps: continue it with --resume, or give another folder"
        )
    if arguments.length == 1:
        raise Failure("--length 1 leaves no token to predict: write --length 512, say")
    if name in ("reward", "dpo", "kto") and arguments.micro_steps > arguments.batch_size:
        raise Failure(
            f"--micro-steps {arguments.micro_steps} with --batch-size {arguments.batch_size}: each micro-step has a row at "
            f"least; write --micro-steps {arguments.batch_size} at most"
        )
    if sampled and not arguments.reward and arguments.reward_model is None:
        raise Failure(f"{name} needs --reward FILE.py:NAME, a function of completions, or --reward-model DIR")
    if not sampled and (arguments.reward or arguments.reward_model is not None):
        raise Failure(f"--reward with {name}, which scores nothing: it belongs to grpo and ppo")
    if arguments.lora is not None and arguments.hf is None:
        raise Failure("--lora needs --hf FOLDER: adapters are put on a model of transformers")
    if arguments.lora is not None and name in ("reward", "ppo"):
        raise Failure(f"--lora with {name}: adapters of models of scores cannot be trained; leave --lora out")
    if arguments.gpu_memory is None and (arguments.plan or arguments.host_memory is not None):
        raise Failure(
            "--plan and --host-memory need --gpu-memory SIZE: without it models stay where --parallel puts them"
        )
    if arguments.gpu_memory is not None and name not in ("dpo", "grpo", "ppo"):
        raise Failure(f"--gpu-memory with {name}, which has one model: write --parallel zero.gpu_memory_limit=SIZE")
    from meshfold.train.start import check_start

    for option, folder, wants in (
        ("--start", arguments.start, "" if name == "reward" else "policy"),
        ("--critic-start", arguments.critic_start, ""),
        ("--reward-model", arguments.reward_model, "reward"),
    ):
        check_start(option, folder, wants)
    if not arguments.importance_high:
        raise Failure("--importance-high 0 leaves no token a weight: write a number above 0")
    rollout, addressed = arguments.rollout, arguments.rollout.startswith(("http://", "https://"))
    if rollout not in ("engine", "transformers") and not addressed:
        raise Failure(
            f"--rollout {rollout!r}: write engine, transformers, or the address of a server, http://HOST:PORT"
        )
    of_server = arguments.rollout_weights is not None or arguments.rollout_sleep
    if of_server and not addressed:
        raise Failure("--rollout-weights and --rollout-sleep are a server's: give --rollout http://HOST:PORT")
    if not sampled and rollout != "engine":
        raise Failure(f"--rollout with {name}, which samples nothing: it belongs to grpo and ppo")
    if arguments.rollout_ranks and not (sampled and rollout == "engine"):
        raise Failure(
            f"--rollout-ranks with {name if not sampled else f'--rollout {rollout}'}: ranks that only sample belong to grpo and "
            "ppo, and sample with --rollout engine"
        )
    behind = (arguments.rollout_every - 1) * arguments.updates * (arguments.epochs if name == "ppo" else 1)
    if behind > arguments.max_staleness:
        raise Failure(
            f"--rollout-every {arguments.rollout_every}: weights get {behind} optimizer steps old; allow it with "
            f"--max-staleness {behind}"
        )
    if not arguments.rollout_ranks and (arguments.rollout_parallel is not None or arguments.rollout_every > 1):
        raise Failure("--rollout-parallel and --rollout-every are of ranks that only sample: give --rollout-ranks N")
    if name in ("sft", "reward", "kto", "ppo") and arguments.loss is not None:
        raise Failure(f"--loss with {name}, which has one loss: it belongs to dpo and grpo")


def _steps_of(out: str) -> int | None:
    from meshfold.align import latest_step

    return latest_step(out)


def _without_trainer(arguments: argparse.Namespace) -> list[str]:
    """Return the typed words without the trainer; a folder may have its name: ``sft --out sft``."""
    words, options = list(arguments.argv), arguments.parse_again.__self__._option_string_actions
    for place, word in enumerate(words):
        taker = options.get(words[place - 1]) if place else None
        if word == arguments.trainer and (taker is None or taker.nargs == 0):
            return words[:place] + words[place + 1 :]
    return words


def _take_options_of_the_start(arguments: argparse.Namespace) -> None:
    """Add the tokenizer, the Hugging Face folder and the adapters of the run that ``--start`` names, where no model is named.

    They belong to the words of the run, for other ranks and for what starts from it.

    Raises:
        Failure: for adapters where they cannot be trained.
    """
    from meshfold.train.start import options_of

    if arguments.start is None or arguments.model is not None or arguments.hf is not None:
        return
    for option, value in options_of(arguments.start).items():
        if option == "lora" and arguments.trainer in ("reward", "ppo"):
            raise Failure(
                f"--start {arguments.start!r} has adapters (--lora {value}), and {arguments.trainer} trains whole models: start "
                "from a run without --lora"
            )
        if getattr(arguments, option) is None:
            setattr(arguments, option, value)
            arguments.argv = [*arguments.argv, f"--{option}", str(value)]


def _with_options_of_the_run(arguments: argparse.Namespace) -> argparse.Namespace:
    """Return the arguments of ``--resume``: the run's, followed by the new ones."""
    file = Path(arguments.out) / _SETTINGS
    if not arguments.resume or not file.is_file():
        return arguments
    before = json.loads(file.read_text(encoding="utf-8"))
    words = [*before, *_without_trainer(arguments)]
    merged: argparse.Namespace = arguments.parse_again(words, argparse.Namespace(argv=words, rank=arguments.rank))
    if merged.trainer != arguments.trainer:
        raise Failure(f"{arguments.out!r} is a run of {merged.trainer}: type meshfold align {merged.trainer} --resume")
    return merged
