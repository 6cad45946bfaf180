"""The model of a command: one of our own by name, or a Hugging Face one from a folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from meshfold.mesh import SpecError


@dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """A model before it is built.

    Attributes:
        name: for people.
        vocab_size: token ids are below it.
        build: makes it with fresh weights.
        load: opens the folder's weights for the engine; None if it has none.
    """

    name: str
    vocab_size: int
    build: Callable[[], nn.Module]
    load: Callable[[], Callable[[], nn.Module]] | None = None

    @property
    def source(self) -> Callable[[], nn.Module]:
        """The model argument for the engine: the folder's model, or the function that builds one."""
        return self.build if self.load is None else self.load()


def choose_model(
    name: str | None, folder: str | None, changes: Mapping[str, Any], *, vocab_size: int | None, seq_len: int
) -> ModelChoice:
    """Find a model that can take sequences of ``seq_len`` tokens with ids below ``vocab_size``.

    Our own models get the requested vocabulary and the positions that are needed; Hugging Face models must have them.

    Args:
        name: of a preset, ``"gpt-tiny"``.
        folder: of a Hugging Face model; then ``name`` is None.
        changes: to the preset: ``dict(layers=4)``.
        vocab_size: of the tokens; None if it is not known.
        seq_len: tokens.

    Raises:
        SpecError: if there is no such model, or it cannot take the tokens.
    """
    return (
        _of_folder(folder, changes, vocab_size, seq_len)
        if folder is not None
        else _own(name, changes, vocab_size, seq_len)
    )


def check_name(name: str | None, changes: Mapping[str, Any]) -> None:
    """Check that a model of our own has that name, and accepts the changes.

    Raises:
        SpecError: if not.
    """
    if _is_palm(name):
        from meshfold.huggingface import palm_sizes

        palm_sizes(str(name), **changes)
        return
    from meshfold.models import preset

    preset(name or "gpt-tiny", **changes)


def _is_palm(name: str | None) -> bool:
    """Return True for the name of a PaLM, which is a model of transformers."""
    return name is not None and name.startswith("palm-")


def longest(name: str | None, folder: str | None, changes: Mapping[str, Any]) -> int:
    """Return the longest sequence that a model has positions for; 2048 if unknown.

    Raises:
        SpecError: if there is no such model.
    """
    if folder is None and _is_palm(name):
        from meshfold.huggingface import palm_sizes

        return palm_sizes(str(name), **changes)["max_positions"]
    if folder is None:
        from meshfold.models import preset

        return preset(name or "gpt-tiny", **changes).max_positions
    from meshfold.huggingface import open_model

    return open_model(folder).max_positions or 2048


def _own(name: str | None, changes: Mapping[str, Any], vocab_size: int | None, seq_len: int) -> ModelChoice:
    changed = dict(changes)
    if vocab_size is not None:
        changed.setdefault("vocab_size", vocab_size)
    shown = name or "gpt-tiny"
    if changes:
        shown += f" with {', '.join(f'{key}={value}' for key, value in changes.items())}"
    if _is_palm(name):
        from meshfold.huggingface import palm, palm_sizes

        sizes = palm_sizes(str(name), **changed)
        if "max_positions" not in changed:
            sizes["max_positions"] = max(sizes["max_positions"], seq_len)
        check_sizes(str(name), sizes["vocab_size"], sizes["max_positions"], vocab_size, seq_len)
        return ModelChoice(name=shown, vocab_size=sizes["vocab_size"], build=lambda: palm(str(name), **sizes))
    from meshfold.models import build, preset

    config = preset(name or "gpt-tiny", **changed)
    if "max_positions" not in changed and seq_len > config.max_positions:
        config = preset(name or "gpt-tiny", **changed, max_positions=seq_len)
    check_sizes(name or "gpt-tiny", config.vocab_size, config.max_positions, vocab_size, seq_len)
    return ModelChoice(name=shown, vocab_size=config.vocab_size, build=lambda: build(config))


def _of_folder(folder: str, changes: Mapping[str, Any], vocab_size: int | None, seq_len: int) -> ModelChoice:
    from meshfold.huggingface import open_model

    if changes:
        raise SpecError(f"--set {' '.join(changes)} changes a model of our own: edit {folder}/config.json for this one")
    found = open_model(folder)
    check_sizes(folder, found.vocab_size, found.max_positions, vocab_size, seq_len)
    return ModelChoice(
        name=f"{type(found.config).__name__.removesuffix('Config')} of {folder}",
        vocab_size=found.vocab_size,
        build=found.build,
        load=found.load if found.has_weights else None,
    )


def check_sizes(name: str, has: int, positions: int | None, vocab_size: int | None, seq_len: int) -> None:
    """Check that a model takes sequences of ``seq_len`` tokens with ids below ``vocab_size``.

    Args:
        name: of the model, for errors.
        has: its vocabulary.
        positions: it has; None for any number.
        vocab_size: of the tokens; None if it is not known.
        seq_len: tokens.

    Raises:
        SpecError: if it does not.
    """
    if vocab_size is not None and vocab_size > has:
        raise SpecError(
            f"the tokenizer has {vocab_size} tokens and model {name!r} a vocabulary of {has}: use the tokenizer that "
            "belongs to it"
        )
    if positions is not None and seq_len > positions:
        raise SpecError(f"sequences of {seq_len} tokens are longer than the {positions} positions of model {name!r}")
