"""Checks of an engine's argument ``model``: a module that nobody has wrapped, or a function that makes one."""

from __future__ import annotations

from torch import nn

from meshfold.mesh import SpecError, metadata
from meshfold.mesh.spec import argument_checks as settings

# By name: importing what wraps costs more than all of this library.
_WRAPPERS = {
    "DataParallel",
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "FSDPModule",
    "DeepSpeedEngine",
}


def check_model(model: object) -> None:
    """Check that the model is one of the two, as far as can be told before it is called.

    Raises:
        SpecError: if it is neither, is wrapped by another library, is what an engine has left of one, or wants arguments.
    """
    if isinstance(model, nn.Module):
        wrapper = next((cls.__name__ for cls in type(model).__mro__ if cls.__name__ in _WRAPPERS), None)
        if wrapper is not None:
            raise SpecError(
                f"the model is a {wrapper} already, which sums gradients by itself: give the module as it was written "
                "(model.module), and leave the rest to parallel=dict(data=...)"
            )
        partial = next((name for name, parameter in model.named_parameters() if _is_partial(parameter)), None)
        if partial is not None:
            raise SpecError(
                f"model={type(model).__name__}(...): an engine that had it before has left this rank a part of it; {partial!r} is "
                "not whole. Make the model anew, with the weights of engine.full_state_dict() before close(), or of a checkpoint"
            )
        return
    if not callable(model):
        raise SpecError(f"model={model!r}: an nn.Module, or a function without arguments that makes one")
    signature = settings.signature_mismatch(model)
    if signature is not None:
        name = getattr(model, "__name__", type(model).__name__)
        raise SpecError(
            f"model={name} is called without arguments, and takes {signature}: write lambda: {name}(...)"
        )


def _is_partial(parameter: nn.Parameter) -> bool:
    """Return whether a parameter was in chunks that are gone, a block over a closed mesh, or of a stage that this rank had."""
    meta = metadata(parameter)
    if meta is None:
        return False
    gone = parameter.data.numel() == 0 and 0 not in meta.placement.shape
    split = meta.mesh.is_closed and meta.mesh.size(*meta.placement.split_axes) > 1
    return gone or split or meta.mesh.size(*meta.only_at) > 1
