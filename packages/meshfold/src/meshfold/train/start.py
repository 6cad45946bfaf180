"""Start of an alignment run: the checkpoint of an earlier one, its model, and the options that chose it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshfold import align
from meshfold.checkpoint.files import parse_json_object
from meshfold.mesh import SpecError
from meshfold.models import PRESETS
from meshfold.train.model_choice import ModelChoice, check_sizes

_STATE, _SETTINGS = "state.json", "settings.json"
TRAINERS = ("sft", "reward", "dpo", "kto", "grpo", "ppo")
"""Trainers of ``meshfold align``."""


def checkpoint_of(path: str | None, name: str = "policy") -> str | None:
    """Return the checkpoint of a run of ``meshfold align`` or ``train``, or the folder if it is one itself.

    Args:
        path: the folder.
        name: of an engine, "critic" of PPO; of a run without it the policy's is taken.
    """
    if path is None:
        return None
    found = align.run_checkpoint(path, name)
    if found is not None:
        return found
    for inside in ("checkpoint", name, "policy"):  # of meshfold train; of a step of meshfold align
        if (Path(path) / inside / _STATE).is_file():
            return str(Path(path) / inside)
    return path


def check_start(option: str, path: str | None, wants: str = "") -> None:
    """Check that a folder of an option is a run with a checkpoint, or a checkpoint.

    Args:
        option: for errors.
        path: its folder.
        wants: "policy" or "reward", if the other one is of no use there.

    Raises:
        SpecError: if it is not.
    """
    if path is None:
        return
    if not Path(path).is_dir():
        raise SpecError(f"{option} {path!r}: there is no such folder; give --out of an earlier run, or a checkpoint")
    found = Path(str(checkpoint_of(path)))
    if not (found / _STATE).is_file() and (found / "config.json").is_file():
        raise SpecError(f"{option} {path!r} is a Hugging Face folder, not a checkpoint: give it as --hf {path}")
    if not (found / _STATE).is_file():
        raise SpecError(
            f"{option} {path!r} has no checkpoint: a run writes its first one at its end, or after --save-every steps"
        )
    trainer = settings_of(path).get("trainer", "")
    scores = trainer == "reward" or found.name == "critic"
    if wants == "policy" and scores:
        raise SpecError(
            f"{option} {path!r} is a reward model, which generates nothing: give a run of sft or another policy"
        )
    if wants == "reward" and trainer and not scores:
        raise SpecError(
            f"{option} {path!r} is a run of {trainer}, which scores nothing: give a run of meshfold align reward"
        )


def settings_of(path: str) -> dict[str, Any]:
    """Return ``trainer``, ``model``, ``hf``, ``tokenizer`` and ``lora`` of a run; empty for a checkpoint without its run."""
    for folder in (Path(path), *Path(path).absolute().parents[:2]):  # a step of a run, and its policy
        file = folder / _SETTINGS
        if not file.is_file():
            continue
        found = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return {**found, "trainer": "train"}
        # Of meshfold align: the words that were typed.
        words = {name: _after(found, f"--{name}") for name in ("model", "hf", "tokenizer", "lora")}
        trainer = next((word for word in found if word in TRAINERS), "")
        return {**words, "trainer": trainer, "lora": words["lora"] and int(words["lora"])}
    return {}


def options_of(path: str) -> dict[str, Any]:
    """Return the options that a run takes from the one that it starts from, unless it has others: those that had a value."""
    found = settings_of(path)
    name = found.get("model")
    if name and found.get("hf") is None and (Path(name) / "config.json").is_file():
        found["hf"] = name
    return {option: found[option] for option in ("hf", "tokenizer", "lora") if found.get(option) is not None}


def _after(words: Sequence[str], option: str) -> str | None:
    """Return the last value of an option in words; None without it."""
    found = None
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == option:
            found = following
        elif word.startswith(f"{option}="):
            found = word.partition("=")[2]
    return found


def model_of(
    option: str, path: str, *, vocab_size: int | None, seq_len: int, name: str = "policy"
) -> ModelChoice | None:
    """Return the model of a checkpoint of ours; None if its description has none of ours.

    Args:
        option: that named the folder, for errors.
        path: the folder.
        vocab_size: of the tokens; None if it is not known.
        seq_len: tokens of the longest sequence.
        name: as of :func:`checkpoint_of`.

    Raises:
        SpecError: if the model cannot take the tokens.
    """
    described: Mapping[str, Any] = parse_json_object((Path(str(checkpoint_of(path, name))) / _STATE).read_bytes())
    described = described.get("model") or {}
    if described.get("kind") in (None, "hf"):
        return None
    from meshfold.huggingface import own_config
    from meshfold.models import build

    config = own_config(described)
    if config.learned_positions is None and seq_len > config.max_positions:
        config = replace(config, max_positions=seq_len)
    alike = (
        known
        for known, preset in PRESETS.items()
        if type(preset) is type(config)
        and replace(preset, vocab_size=config.vocab_size, max_positions=config.max_positions) == config
    )
    called = next(alike, f"the {config.kind} of {path}")
    try:
        check_sizes(called, config.vocab_size, config.max_positions, vocab_size, seq_len)
    except SpecError as error:
        raise SpecError(f"{option} {path!r}: {error}") from None
    return ModelChoice(name=called, vocab_size=config.vocab_size, build=lambda: build(config))
