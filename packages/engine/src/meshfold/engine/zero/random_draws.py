"""Search for operators of a forward that draw random numbers, which a repetition of the forward would have to draw again.

The state of torch's generator does not show them: cuDNN's attention moves it on without dropout too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshfold.mesh.tracking import uncompiled


def random_draws(model: nn.Module, run: Callable[[], object]) -> list[str]:
    """Return the operators of a forward that draw random numbers from torch's generators, each once.

    The forward runs without gradients and without compiled code. Buffers that it changes get their values back.

    Args:
        model: which.
        run: calls it.
    """
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    with torch.no_grad(), uncompiled():
        try:
            with _Draws() as draws:
                run()
        finally:
            for buffer, before in buffers:
                buffer.copy_(before)
    return [*dict.fromkeys(draws.names)]


class _Draws(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs):
            self.names.append(str(func.name()))
        return func(*args, **kwargs)


def _draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True unless the operator is one of attention or dropout that drops nothing."""
    named: dict[str, Any] = {}
    for place, argument in enumerate(func._schema.arguments):
        default = argument.default_value if argument.has_default_value() else None
        named[argument.name] = args[place] if place < len(args) else kwargs.get(argument.name, default)
    if named.get("train") is False:
        return False
    probability = named.get("dropout_p", named.get("p"))
    return not (isinstance(probability, int | float) and probability == 0)
