"""Optimizer state of one parameter as a flat table of named tensors and numbers, and back, bit for bit.

Optimizers that need whole matrices keep lists of them, and numbers of Python beside tensors. A name says how to come
back: ``gram[0]`` is the first of a list, ``moments(1)`` the second of a tuple, ``sizes.rows`` an entry of a dict;
``count=int`` is a number of Python's, ``gram[1]=list`` an empty list. What is a tensor by itself keeps its plain name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from meshfold.zero_gemini.errors import MemoryPlanError

_NUMBERS: dict[str, type] = {"bool": bool, "int": int, "float": float}
_EMPTY: dict[str, type] = {"list": list, "tuple": tuple, "dict": dict}
_STEP = re.compile(r"\[(\d+)\]|\((\d+)\)|\.([^.\[\(=]+)")


def flatten(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Every leaf of a parameter's state by its name; numbers as tensors of one element on the CPU.

    Raises:
        MemoryPlanError: for what is neither tensor nor number, nor a list, tuple or dict of them.
    """
    return {name: value for key, value in state.items() for name, value in _leaves(_checked(key), value)}


def unflatten(leaves: Mapping[str, Tensor]) -> dict[str, Any]:
    """The inverse of :func:`flatten`; tensors are taken as they are."""
    tree: dict[str, Any] = {}
    for name, value in leaves.items():
        path, _, kind = name.partition("=")
        steps: list[tuple[str, Any]] = [("dict", re.split(r"[.\[\(]", path, maxsplit=1)[0])]
        for place in _STEP.finditer(path, len(steps[0][1])):
            index, position, key = place.groups()
            steps.append(
                ("list", int(index)) if index else ("tuple", int(position)) if position else ("dict", key)
            )
        node = tree
        for (_, key), (kind_below, _) in pairwise(steps):
            node = node.setdefault(key, {"": kind_below})
        node[steps[-1][1]] = _leaf(value, kind)
    return {key: _built(value) for key, value in tree.items()}


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in a parameter's state, or in a part of it."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for below in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(below)


def moved(value: Any, old: torch.device, new: torch.device) -> Any:
    """State that was beside its parameter, beside it again."""
    if isinstance(value, Tensor):
        return value.to(new) if value.device == old else value
    if isinstance(value, dict):
        return {key: moved(below, old, new) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(moved(below, old, new) for below in value)
    return value


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value.detach()
    elif value is None:
        yield f"{name}=none", torch.tensor(0)
    elif type(value) in _NUMBERS.values():
        wide = torch.float64 if isinstance(value, float) else torch.int64
        yield f"{name}={type(value).__name__}", torch.tensor(value, dtype=wide)
    elif type(value) in _EMPTY.values():
        if not value:
            yield f"{name}={type(value).__name__}", torch.tensor(0)
        elif isinstance(value, dict):
            for key, below in value.items():
                yield from _leaves(f"{name}.{_checked(key)}", below)
        else:
            around = "[{}]" if isinstance(value, list) else "({})"
            for place, below in enumerate(value):
                yield from _leaves(name + around.format(place), below)
    else:
        raise MemoryPlanError(
            f"the optimizer keeps {type(value).__name__} {value!r} as {name!r}, which a checkpoint cannot hold: keep tensors, "
            "numbers, None, and lists, tuples or dicts of them"
        )


def _checked(key: object) -> str:
    if not isinstance(key, str) or not key or re.search(r"[.\[\(=/]", key):
        raise MemoryPlanError(
            f"the optimizer keeps something under the key {key!r}: for a checkpoint, keys are words without any of . [ ( = /"
        )
    return key


def _leaf(value: Tensor, kind: str) -> Any:
    if not kind:
        return value
    if kind == "none":
        return None
    return _EMPTY[kind]() if kind in _EMPTY else _NUMBERS[kind](value.item())


def _built(node: Any) -> Any:
    if not isinstance(node, dict) or "" not in node:
        return node
    kind = node[""]
    below = {key: _built(value) for key, value in node.items() if key != ""}
    return below if kind == "dict" else _EMPTY[kind](below[place] for place in sorted(below))
