"""Trainers of ``meshfold align`` from its arguments: data, tokenizer, model, rewards."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshfold import align
from meshfold.checkpoint import CheckpointError
from meshfold.data.tokenizers import load_tokenizer, tokenizer_of_model
from meshfold.mesh import SpecError
from meshfold.mesh.processes import only_ranks, running_world
from meshfold.train.metrics import read_metrics
from meshfold.train.model_choice import ModelChoice, choose_model
from meshfold.train.optimizers import optimizer_settings
from meshfold.train.plots import can_plot, plot_loss
from meshfold.train.schedule import lr_schedule
from meshfold.train.start import checkpoint_of, model_of

_LENGTH = 512
_READERS: Mapping[str, Callable[..., Any]] = {
    "sft": align.completion_of,
    "kto": align.completion_of,
    "reward": align.preference_of,
    "dpo": align.preference_of,
    "grpo": align.prompt_of,
    "ppo": align.prompt_of,
}


_OPTIONS: Mapping[str, Sequence[str]] = {
    "dpo": ("beta", "gamma", "label_smoothing"),
    "kto": ("beta",),
    "reward": ("centering",),
    "grpo": ("beta",),
    "ppo": ("beta",),
}
"""Options of the losses."""


@dataclass(frozen=True, kw_only=True)
class AlignmentRun:
    """A checked run, before its engines are made.

    Attributes:
        name: of the model.
        summary: a line for people.
        make: makes the trainer of a spec and rules.
        plan: returns the phases of memory of a spec, as a table, before anything is made.
    """

    name: str
    summary: str
    make: Callable[[Any, Mapping[str, str]], Any]
    plan: Callable[[Any], str]


def open_run(arguments: argparse.Namespace, changes: Mapping[str, Any]) -> AlignmentRun:
    """Read data and rewards, and check that they fit the model.

    Args:
        arguments: of the command.
        changes: to a model of our own.

    Raises:
        SpecError: if one of them cannot be used.
    """
    tokenizer = _tokenizer(arguments)
    examples = align.tokenized(align.read_records(arguments.data), tokenizer, _READERS[arguments.trainer])
    rewards = [_function(word) for word in arguments.reward]
    longest = _longest(arguments, examples)
    choice = _model(arguments, changes, vocab_size=getattr(tokenizer, "vocab_size", None), seq_len=longest)

    def make(parallel: Any, rules: Mapping[str, str]) -> Any:
        try:
            return _trainer(arguments, parallel, rules, choice, tokenizer, examples, rewards)
        except CheckpointError as error:
            if arguments.model is None and arguments.hf is None:
                raise
            raise SpecError(
                f"{error}. Without --model, --set and --hf a run has the model that it starts from"
            ) from error

    summary = (
        f"{arguments.trainer} of {choice.name} on {arguments.data}: {len(examples)} records, {longest} tokens at most"
    )
    return AlignmentRun(
        name=choice.name,
        summary=summary,
        make=make,
        plan=lambda parallel: str(_phases(arguments, parallel, choice, examples)),
    )


def _model(arguments: argparse.Namespace, changes: Mapping[str, Any], **sizes: Any) -> ModelChoice:
    """Return the model of the arguments, or else of the checkpoint that the run starts from.

    Raises:
        SpecError: if it cannot take the tokens, or the checkpoint does not say how to build it.
    """
    a = arguments
    if a.start is None or a.model is not None or a.hf is not None:
        return choose_model(a.model, a.hf, changes, **sizes)
    if changes:
        raise SpecError(
            f"--set {' '.join(changes)} with --start {a.start}, which has its sizes: leave --set out, or name its --model too"
        )
    found = model_of("--start", a.start, **sizes)
    if found is None:
        raise SpecError(f"--start {a.start!r} does not say which model it has: give --hf FOLDER, or --model NAME")
    return found


def _scorer_of(option: str, path: str | None, arguments: argparse.Namespace, choice: ModelChoice, longest: int) -> Any:
    """Return a model of scores: that of a checkpoint, whose sizes may be others, else one like the policy."""
    found = None
    if path is not None and arguments.hf is None:
        name = "critic" if option == "--critic-start" else "policy"
        found = model_of(option, path, vocab_size=choice.vocab_size, seq_len=longest, name=name)
        if found is None:
            raise SpecError(
                f"{option} {path!r} is not a model of ours, as the policy is: train it by meshfold align reward --start, from the "
                "policy's run"
            )
    return _scorer(arguments.hf, found or choice)


def _memory(arguments: argparse.Namespace) -> dict[str, str] | None:
    """Return the limits of a plan of phases; None without a plan."""
    if arguments.gpu_memory is None:
        return None
    return {"gpu": arguments.gpu_memory, **({"host": arguments.host_memory} if arguments.host_memory else {})}


def _phases(arguments: argparse.Namespace, parallel: Any, choice: ModelChoice, examples: Sequence[Any]) -> align.Phases:
    """Return the phases that a trainer would have."""
    a, policy = arguments, choice.source if arguments.lora is None else _with_adapters(arguments.hf, arguments.lora)
    models: dict[str, Any] = dict(policy=policy)
    longest = _longest(a, examples)
    if a.trainer == "ppo":
        models["critic"] = _scorer_of("--critic-start", a.critic_start, a, choice, longest)
    without = a.lora is not None or a.loss in ("simpo", "orpo") or (a.trainer == "grpo" and not a.beta)
    if not without:
        models["reference"] = choice.source
    if a.reward_model is not None:
        models["reward"] = _scorer_of("--reward-model", a.reward_model, a, choice, longest)
    if a.trainer == "dpo":
        work = align.WorkSize.of_pairs(examples, a.length, batch_size=a.batch_size, micro_steps=a.micro_steps)
    else:
        work = align.WorkSize.of_samples(
            examples,
            completions=a.batch_size * (a.group if a.trainer == "grpo" else 1),
            max_new_tokens=a.max_new_tokens,
            updates=a.updates,
            micro_steps=a.micro_steps,
        )
    return align.Phases(
        _memory(a),
        parallel,
        models=models,
        trained=[name for name in models if name in ("policy", "critic")],
        work=work,
        settings=dict(
            precision=a.precision,
            optimizer=optimizer_settings(a.optimizer, lr=a.lr, weight_decay=a.weight_decay),
            recompute=_recompute(a),
        ),
        micro_steps=a.micro_steps,
    )


def _recompute(arguments: argparse.Namespace) -> str | None:
    return None if arguments.recompute == "none" else str(arguments.recompute)


def _trainer(
    arguments: argparse.Namespace,
    parallel: Any,
    rules: Mapping[str, str],
    choice: ModelChoice,
    tokenizer: Any,
    examples: Sequence[Any],
    rewards: list[Any],
) -> Any:
    name, a = arguments.trainer, arguments
    updates = a.updates if name == "grpo" else a.updates * a.epochs if name == "ppo" else 1
    common: dict[str, Any] = dict(
        parallel=parallel,
        rules=rules,
        batch_size=a.batch_size,
        micro_steps=a.micro_steps,
        optimizer=optimizer_settings(a.optimizer, lr=a.lr, weight_decay=a.weight_decay),
        lr_scheduler=lr_schedule(a.schedule, warmup=a.warmup, steps=a.steps * updates),
        clip_grad_norm=a.clip or None,
        precision=a.precision,
        device=a.device,
        seed=a.seed,
        start=checkpoint_of(a.start),
        recompute=_recompute(a),
    )
    if (memory := _memory(a)) is not None:
        common["memory"] = memory
    given = {"beta": a.beta, "gamma": a.gamma, "label_smoothing": a.label_smoothing, "centering": a.centering}
    for option, value in given.items():
        if value is None:
            continue
        if option not in _OPTIONS.get(name, ()):
            raise SpecError(f"--{option.replace('_', '-')} with {name}, whose loss has none: leave it out")
        common[option] = value
    if name in ("dpo", "reward", "grpo"):
        common["shared_prompt"] = {"auto": "auto", "yes": True, "no": False}[a.shared_prompt]
    elif a.shared_prompt == "yes":
        raise SpecError(f"--shared-prompt yes with {name}, whose rows share no prompt: leave it out")
    model = choice.source if a.lora is None else _with_adapters(a.hf, a.lora)
    longest = _longest(a, examples)
    if a.lora is not None and name != "sft":
        common["reference"] = "adapter"
    if name == "sft":
        return align.SFT(model, examples, length=a.length or _LENGTH, **common)
    if name == "reward":
        return align.RewardModel(_scorer(a.hf, choice), examples, length=a.length, **common)
    if name == "dpo":
        return align.DPO(model, examples, loss=a.loss or "sigmoid", length=a.length, **common)
    if name == "kto":
        return align.KTO(model, examples, length=a.length, **common)
    from meshfold.inference import Sampling

    if a.reward_model is not None:
        settings = dict(parallel=parallel, rules=rules, precision=a.precision, device=a.device, seed=a.seed)
        with _ranks_that_train(a.rollout_ranks) as trains:
            if trains:
                judge = _scorer_of("--reward-model", a.reward_model, a, choice, longest)
                scores = align.RewardModel(judge, [], start=checkpoint_of(a.reward_model), **settings)
                rewards = [*rewards, scores]
    common["sampling"] = Sampling(max_new_tokens=a.max_new_tokens, temperature=a.temperature)
    common["updates"] = a.updates
    common.update(rollout=_rollout(a), importance=dict(high=a.importance_high), max_staleness=a.max_staleness)
    if name == "grpo":
        return align.GRPO(model, examples, rewards, tokenizer, kind=a.loss or "grpo", group=a.group, **common)
    critic = _scorer_of("--critic-start", a.critic_start, a, choice, longest)
    return align.PPO(
        model,
        critic,
        examples,
        rewards,
        tokenizer,
        epochs=a.epochs,
        critic_start=checkpoint_of(a.critic_start, "critic"),
        **common,
    )


@contextmanager
def _ranks_that_train(sampling: int) -> Iterator[bool]:
    """Make engines on the ranks that train alone; False on one of those, the last ``sampling`` ones, that only sample."""
    world = running_world()
    train = None if world is None or not sampling else range(world.size - sampling)
    if world is None or train is None or world.rank not in train:
        yield train is None
        return
    with only_ranks(train):
        yield True


def _rollout(arguments: argparse.Namespace) -> Callable[[Any], Any] | dict[str, Any]:
    """Return what makes the generator of a policy's engine, or the ranks that generate."""
    name = arguments.rollout
    if isinstance(name, dict):
        return name
    if name == "engine":
        return align.EngineRollouts
    if name == "transformers":
        return align.TransformersRollouts
    return lambda engine: align.ServerRollouts(
        engine, name, weights=arguments.rollout_weights, sleep=arguments.rollout_sleep
    )


def draw(out: Path, title: str) -> None:
    """Draw the curve of the loss, or of the reward where there is one, if matplotlib is installed."""
    rows = read_metrics(out / "metrics.jsonl")
    if not can_plot() or not rows:
        return
    name = "reward" if "reward" in rows[0] else "loss"
    plot_loss(out / f"{name}.png", {name: [(row["step"], row[name]) for row in rows]}, title)


def _tokenizer(arguments: argparse.Namespace) -> Any:
    """Return bytes, or a tokenizer of transformers with its chat template."""
    name = arguments.tokenizer
    if name is None and arguments.hf is not None:
        _, note = tokenizer_of_model(arguments.hf)
        name = "byte" if note else arguments.hf
    if name in (None, "byte"):
        return load_tokenizer("byte")
    load_tokenizer(name)  # says what is wrong with a folder
    from transformers import AutoTokenizer

    from meshfold.huggingface import NO_REMOTE_CODE

    return align.ChatTokenizer(AutoTokenizer.from_pretrained(name, **NO_REMOTE_CODE))


def _longest(arguments: argparse.Namespace, examples: Sequence[Any]) -> int:
    """Return the tokens of the longest sequence that the model sees at once."""
    if arguments.trainer == "sft":
        found = max(len(one.ids) for one in examples)
        return min(found, int(arguments.length or _LENGTH))
    if arguments.trainer in ("grpo", "ppo"):
        return max(len(one.ids) for one in examples) + int(arguments.max_new_tokens)
    if arguments.trainer == "kto":
        found = max(len(one.ids) for one in examples)
    else:
        found = max(len(one.ids) for pair in examples for one in (pair.chosen, pair.rejected))
    return found if arguments.length is None else min(found, int(arguments.length))


def _scorer(folder: str | None, choice: ModelChoice) -> Any:
    if folder is None:
        return align.scorer(choice.build)
    from meshfold.huggingface import pretrained

    return pretrained(folder, model_class="AutoModelForTokenClassification", num_labels=1)


def _with_adapters(folder: str, rank: int) -> Any:
    try:
        from peft import LoraConfig
    except ImportError:
        raise SpecError("--lora needs peft: pip install meshfold[peft]") from None
    from meshfold.huggingface import pretrained

    return pretrained(folder, adapter=LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))


def _function(word: str) -> Callable[..., Any]:
    """Return the function of ``FILE.py:NAME``.

    Raises:
        SpecError: if there is none.
    """
    path, colon, name = word.rpartition(":")
    if not colon or not path.endswith(".py"):
        raise SpecError(f"--reward {word!r}: write FILE.py:NAME, a file of Python and a function in it")
    if not Path(path).is_file():
        raise SpecError(f"--reward {word!r}: there is no file {path!r}")
    spec = importlib.util.spec_from_file_location(f"meshfold_rewards_{Path(path).stem}", path)
    assert spec is not None and spec.loader is not None  # a file that ends with .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    found = getattr(module, name, None)
    if not callable(found):
        raise SpecError(f"--reward {word!r}: {path!r} has no function {name!r}")
    function: Callable[..., Any] = found
    return function
