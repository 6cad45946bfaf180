"""What an engine is given as its model: a module that nobody has wrapped, or a function that makes one."""

from __future__ import annotations

import inspect

from torch import nn

from meshfold.mesh import SpecError

# By name: importing what wraps costs more than all of this library.
_WRAPPERS = {
    "DataParallel",
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "FSDPModule",
    "DeepSpeedEngine",
}


def check_model(model: object) -> None:
    """Whether it is one of the two, as far as can be told before it is called.

    Raises:
        SpecError: if it is neither, is wrapped by another library, or wants arguments.
    """
    if isinstance(model, nn.Module):
        wrapper = next((cls.__name__ for cls in type(model).__mro__ if cls.__name__ in _WRAPPERS), None)
        if wrapper is not None:
            raise SpecError(
                f"the model is a {wrapper} already, which sums gradients by itself: give the module as it was written "
                "(model.module), and leave the rest to parallel=dict(data=...)"
            )
        return
    if not callable(model):
        raise SpecError(f"model={model!r}: an nn.Module, or a function without arguments that makes one")
    try:
        signature = inspect.signature(model)
    except ValueError:  # it does not say
        return
    try:
        signature.bind()
    except TypeError as error:
        name = getattr(model, "__name__", type(model).__name__)
        raise SpecError(
            f"model={name} is called without arguments, and takes {signature}: write lambda: {name}(...)"
        ) from error
