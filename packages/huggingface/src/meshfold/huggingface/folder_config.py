"""Configurations of Hugging Face folders, which anyone may have written: read without running the folder's code."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from meshfold.checkpoint import CheckpointError
from meshfold.checkpoint.files import parse_json_object
from meshfold.checkpoint.tensors import check_inside_folder
from meshfold.mesh import SpecError

NO_REMOTE_CODE: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
"""Given to every ``from_pretrained`` of transformers, which else asks on a terminal and then runs the folder's code."""


def read_config(folder: Path, what: str) -> Any:
    """Return transformers' configuration of a folder.

    Args:
        folder: with ``config.json``.
        what: begins the message of an error: ``"pretrained('models/a')"``.

    Raises:
        SpecError: if it cannot be read, needs the folder's code, or transformers is not installed.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        from transformers import AutoConfig
    except ImportError:
        raise SpecError(f"{what} needs transformers: pip install meshfold[hf]") from None
    path = folder / "config.json"
    try:
        check_inside_folder(path, folder)
        told = parse_json_object(path.read_bytes())
        config = AutoConfig.from_pretrained(str(folder), **NO_REMOTE_CODE)
    except CheckpointError as error:
        raise SpecError(f"{what}: {error}") from error
    except Exception as error:  # transformers raises many kinds here
        reason = _first_sentence(str(error)) or type(error).__name__
        if "trust_remote_code" in str(error):
            raise SpecError(
                f"{what}: its config.json asks for its own code (auto_map), which Meshfold never runs. Give the engine a "
                "function that builds the model with your own copy of that code"
            ) from error
        raise SpecError(f"{what}: its config.json cannot be read: {reason}") from error
    for key in (
        "attn_implementation",
        "_attn_implementation",
        "experts_implementation",
        "_experts_implementation",
    ):
        if "/" in str(told.get(key, "")):
            raise SpecError(
                f"{what}: its config.json has {key}={told[key]!r}, code that would be fetched from elsewhere. Take the entry out"
            )
    return config


def _first_sentence(text: str) -> str:
    """Return the first line of a message, and the next one if the first ends in a colon."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    count = next((number for number, line in enumerate(lines, 1) if not line.endswith(":")), len(lines))
    return " ".join(lines[:count])


def read_raw_config(folder: Path) -> dict[str, Any]:
    """Return the configuration of a Hugging Face folder.

    Raises:
        CheckpointError: if it cannot be read, or is a link to a file elsewhere.
    """
    path = folder / "config.json"
    check_inside_folder(path, folder)
    try:
        return parse_json_object(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


def checkpoint_in(path: Path) -> Path | None:
    """Return the newest checkpoint that a folder is or has; None if there is none."""
    places = ("state.json", "*/state.json", "*/*/state.json")  # of a checkpoint, a run, a run of alignment
    return max((state.parent for place in places for state in path.glob(place)), key=str, default=None)


def require_config(folder: str | os.PathLike[str], given: str = "") -> None:
    """Raise a SpecError if a folder does not exist or has no ``config.json``; ``given`` is the user's text."""
    path = Path(folder)
    if not (path / "config.json").is_file():
        what = "the folder has no config.json" if path.is_dir() else "there is no such folder"
        checkpoint = checkpoint_in(path)
        if checkpoint is not None:
            raise SpecError(
                f"{given or f'--hf {str(folder)!r}'}: {what}, but a checkpoint of Meshfold; meshfold convert {checkpoint} NEW "
                "makes the folder NEW of it, which fits here"
            )
        raise SpecError(
            f"{given or f'--hf {str(folder)!r}'}: {what}; give a local folder of a Hugging Face model, nothing is downloaded"
        )
