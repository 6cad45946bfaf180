"""Refusal of a forward that goes through all parameters of a model of which a stage has a part."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from meshfold.mesh import LayoutError
from meshfold.pipeline.runtime.placeholders import AbsentBlock

_LIBRARIES = frozenset(("torch", "meshfold", "transformers", "peft", "diffusers", "accelerate", "lightning"))
"""Packages that go through parameters for other reasons than their values, such as the dtype or the number of them."""


@contextmanager
def without_parameter_walks(model: nn.Module) -> Iterator[None]:
    """Context manager: a model's own code that goes through all its parameters, as for a penalty, raises a LayoutError."""
    absent = [name.split(".") for name, module in model.named_modules() if isinstance(module, AbsentBlock)]
    around = {".".join(names[:end]) for names in absent for end in range(len(names))}  # all that contain one, "" too
    modules = [model.get_submodule(name) for name in around]
    try:
        for module in modules:
            module.__dict__["named_parameters"] = partial(_walk, module, module.named_parameters)
        yield
    finally:
        for module in modules:
            module.__dict__.pop("named_parameters", None)


def _walk(module: nn.Module, walk: Callable[..., Iterator[Any]], *args: Any, **kwargs: Any) -> Iterator[Any]:
    yield from walk(*args, **kwargs)
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.endswith("module.py"):  # nn.Module.parameters
        frame = frame.f_back
    if str(frame.f_globals.get("__name__")).partition(".")[0] not in _LIBRARIES:
        raise LayoutError(
            f"{frame.f_code.co_filename}, line {frame.f_lineno}, goes through all parameters of {type(module).__name__}, of "
            "which a stage has a part: a sum over them would lack those of other stages. Use the optimizer's weight_decay for a "
            "penalty, or a spec without pipeline"
        )
