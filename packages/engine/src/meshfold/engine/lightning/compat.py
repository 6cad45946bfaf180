"""``compat="colossalai"``: what the strategy of that name refused, for those whose tests expect it.

Nothing here is a limit of this strategy. Types and occasions of the errors are those of lightning-colossalai 0.1.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden

NAME = "colossalai"
_LIFT = "MeshfoldStrategy refuses it because of compat='colossalai'; leave compat out and it works"


def check_before_setup(trainer: Any, precision: str, accelerator: Any) -> None:
    """What was checked before the module was set up.

    Raises:
        ValueError: for another precision than ``16-mixed``, another accelerator than CUDA, and gradient accumulation.
        TypeError: if the layers are not made in ``configure_sharded_model`` or ``configure_model``.
    """
    if precision != "16-mixed":
        raise ValueError(
            f"`Trainer(strategy='colossalai', precision={precision!r})` is not supported. Consider setting "
            f"`precision='16-mixed'`. ({_LIFT}.)"
        )
    if not isinstance(accelerator, CUDAAccelerator):
        raise ValueError(
            f"the strategy 'colossalai' is only supported on `CUDAAccelerator`, not on {type(accelerator).__name__}. ({_LIFT}.)"
        )
    if trainer.state.fn != TrainerFn.FITTING:
        return
    module = trainer.lightning_module
    if is_overridden("backward", module):
        rank_zero_warn(
            f"{type(module).__name__}.backward was ignored by the strategy 'colossalai'; here it is called"
        )
    if trainer.accumulate_grad_batches > 1:
        raise ValueError(
            f"accumulate_grad_batches={trainer.accumulate_grad_batches}: ColossalAI does not support gradient accumulation. Set "
            f"`accumulate_grad_batches` to 1. ({_LIFT}.)"
        )
    if not (is_overridden("configure_sharded_model", module) or is_overridden("configure_model", module)):
        raise TypeError(
            f"{type(module).__name__} must override the `configure_sharded_model` hook (or `configure_model`) and make its layers "
            f"there. ({_LIFT}.)"
        )


def check_optimizers(optimizers: Sequence[Any]) -> None:
    """What was checked when the optimizers were there.

    Raises:
        ValueError: for several, or one that is neither CPUAdam nor HybridAdam.
    """
    from meshfold.zero_gemini import CPUAdam, HybridAdam

    if len(optimizers) > 1:
        raise ValueError(
            f"{len(optimizers)} optimizers: ColossalAI only supports a single optimizer. ({_LIFT}.)"
        )
    for optimizer in optimizers:
        if not isinstance(optimizer, CPUAdam | HybridAdam):
            raise ValueError(
                f"{type(optimizer).__name__}: ColossalAI only supports the optimizers CPUAdam and HybridAdam, here of "
                f"meshfold.zero_gemini. ({_LIFT}.)"
            )


def refuse_none() -> None:
    """Raises:
    ValueError: for a training_step that returned None.
    """
    raise ValueError(
        f"Skipping backward by returning `None` from your `training_step` is not supported by ColossalAI. ({_LIFT} on one rank.)"
    )


def refuse_clipping_by_value() -> None:
    """Raises:
    NotImplementedError: for ``gradient_clip_algorithm="value"``.
    """
    raise NotImplementedError(f"`clip_grad_by_value` is not supported by ColossalAI. ({_LIFT}.)")


def refuse_gradients_of_gather() -> None:
    """Raises:
    AssertionError: for ``all_gather(sync_grads=True)``.
    """
    raise AssertionError(f"all_gather(sync_grads=True) is not supported by ColossalAI. ({_LIFT}.)")
