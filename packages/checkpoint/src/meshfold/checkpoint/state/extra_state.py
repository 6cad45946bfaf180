"""Extra state of modules (``get_extra_state``): in ``state.json`` if it is plain data, else in ``extra_state.pt``.

State that cannot be read again without running code is refused when it is saved. The names are torch's:
``"norm._extra_state"``.
"""

from __future__ import annotations

import base64
import copy
import io
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.checkpoint.errors import CheckpointError
from meshfold.mesh.parameters import uncompiled_name

KEY = "_extra_state"
"""The last part of a name in a state dict."""


def modules_with_extra_state(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that have extra state, by its names in a state dict."""
    return {
        uncompiled_name(f"{name}.{KEY}" if name else KEY): module
        for name, module in model.named_modules(remove_duplicate=False)
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def describe_extra_state(modules: Mapping[str, nn.Module]) -> dict[str, dict[str, Any]]:
    """Return the extra state of modules in a form that JSON can hold; :func:`extra_state_value` is the inverse.

    Raises:
        CheckpointError: for a value that cannot be read without running code.
    """
    return {name: _described(name, module) for name, module in modules.items()}


def extra_state_value(entry: Mapping[str, Any]) -> Any:
    """Return the value of an entry of :func:`describe_extra_state`."""
    if "json" in entry:
        return entry["json"]
    return _read(base64.b64decode(entry["torch"]))


def split_extra_state(entries: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the parts for ``state.json`` and for a torch file."""
    plain_data = {name: entry["json"] for name, entry in entries.items() if "json" in entry}
    return plain_data, {name: extra_state_value(entry) for name, entry in entries.items() if name not in plain_data}


def load_extra_state(
    modules: Mapping[str, nn.Module], given: Mapping[str, Any]
) -> tuple[dict[str, Any], CheckpointError | None]:
    """Set the extra state of modules.

    Returns:
        The old state of changed modules, and the error, if any.
    """
    here = {name: value for name, value in given.items() if name in modules}
    before: dict[str, Any] = {}
    try:
        for name, value in here.items():
            before[name] = copy.deepcopy(modules[name].get_extra_state())
            modules[name].set_extra_state(copy.deepcopy(value))
    except Exception as error:
        told = CheckpointError(
            f"{type(modules[name]).__name__}.set_extra_state does not take the state of {name!r} "
            f"({type(error).__name__}: {error}): it comes from another version of this module"
        )
        told.__cause__ = error
        return before, told
    return before, None


def restore_extra_state(modules: Mapping[str, nn.Module], before: Mapping[str, Any]) -> None:
    """Restore the old extra state of modules."""
    for name, value in before.items():
        modules[name].set_extra_state(value)


def is_plain(value: Any) -> bool:
    """Return True if JSON gives the same value back."""
    if isinstance(value, dict):
        return type(value) is dict and all(type(key) is str and is_plain(one) for key, one in value.items())
    if isinstance(value, list):
        return type(value) is list and all(map(is_plain, value))
    if type(value) is float:
        return math.isfinite(value)
    return value is None or type(value) in (str, int, bool)


def _described(name: str, module: nn.Module) -> dict[str, Any]:
    value = module.get_extra_state()
    if is_plain(value):
        return {"json": value}
    if isinstance(value, Tensor):
        value = value.detach().to("cpu")
    written = io.BytesIO()
    try:
        torch.save(value, written)
        _read(written.getvalue())
    except Exception as error:  # pickle raises many kinds
        raise CheckpointError(
            f"{name!r} cannot be saved: {type(module).__name__}.get_extra_state() returns {_kind(value)}, which cannot be "
            "loaded without running code. Return numbers, texts, tensors, and dicts, lists and tuples of these"
        ) from error
    return {"torch": base64.b64encode(written.getvalue()).decode()}


def _kind(value: Any) -> str:
    if isinstance(value, dict):
        odd = {type(one).__name__ for one in value.values() if not is_plain(one)}
        return f"a dict with {', '.join(sorted(odd))}" if odd else "a dict"
    return f"a {type(value).__name__}"


def _read(written: bytes) -> Any:
    return torch.load(io.BytesIO(written), map_location="cpu", weights_only=True)
