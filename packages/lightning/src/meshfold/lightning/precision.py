"""Lightning's precisions, implemented by the engine.

============= ================================ ================= ==========
precision     the model computes in            master weights    loss scale
============= ================================ ================= ==========
32-true       float32                          the parameters    no
64-true       float64                          the parameters    no
bf16-mixed    bfloat16                         float32, apart    no
16-mixed      float16                          float32, apart    dynamic
bf16-true     bfloat16                         the parameters    no
16-true       float16                          the parameters    no
============= ================================ ================= ==========

Mixed precision has no autocast: parameters have 16 bits, and the optimizer works on float32 master weights. The inputs of every
module with parameters are cast to their dtype. Outputs of the parts of the LightningModule are cast to float32, so losses are
computed in float32 (``outputs_fp32``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision
from lightning.pytorch.plugins.precision import Precision as LightningPrecision
from meshfold.engine.precision import LossScaler, Precision, ScaleSettings
from meshfold.mesh import SpecError, did_you_mean

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule
    from meshfold.lightning.optimizer_units import OptimizerUnits

_NAMES = {
    "32-true": "fp32",
    "64-true": "fp64",
    "bf16-mixed": "bf16",
    "16-mixed": "fp16",
    "bf16-true": "bf16",
    "16-true": "fp16",
}


class WholePrecision(Precision):
    """A precision without master weights: the optimizer steps the parameters that the model computes with."""

    @property
    def master_dtype(self) -> torch.dtype:
        """Dtype of the parameters, which the optimizer steps."""
        return self.dtype


class MeshfoldPrecision(LightningPrecision):
    """Precision plugin that scales, sums and clips gradients through the strategy, and steps its optimizers."""

    def __init__(self, precision: Any = "32-true", scale: ScaleSettings | None = None) -> None:
        """Args:
            precision: one of the names above.
            scale: settings of the loss scale of ``16-mixed``.

        Raises:
            SpecError: for another name.
        """
        if precision not in _NAMES:
            raise SpecError(
                f"precision={precision!r}: write one of {', '.join(_NAMES)}.{did_you_mean(str(precision), _NAMES)}"
            )
        self.precision = precision
        dynamic = (scale or ScaleSettings()) if precision == "16-mixed" else None
        kind = WholePrecision if precision in ("bf16-true", "16-true") else Precision
        self.engine = kind(name=_NAMES[precision], scale=dynamic)
        self.scaler = LossScaler(dynamic)
        self.units: OptimizerUnits | None = None
        """The optimizers of the run, with the parameters they train; None before there are any."""

    @classmethod
    def of(cls, plugin: LightningPrecision, scale: ScaleSettings | None) -> MeshfoldPrecision:
        """Return the replacement for the plugin that the trainer made from its argument ``precision``.

        Raises:
            SpecError: for a plugin that does something else.
        """
        if isinstance(plugin, cls):
            return plugin
        if type(plugin) not in (LightningPrecision, MixedPrecision, HalfPrecision, DoublePrecision):
            raise SpecError(
                f"the precision plugin {type(plugin).__name__} does not work with MeshfoldStrategy: write Trainer(precision=...) "
                f"with one of {', '.join(_NAMES)}"
            )
        return cls(plugin.precision, scale)

    @property
    def is_mixed(self) -> bool:
        """True if the model computes in 16 bits and everything else is in float32."""
        return self.precision in ("bf16-mixed", "16-mixed")

    @property
    def is_true_half(self) -> bool:
        """True if everything is in 16 bits, inputs and targets too."""
        return self.precision in ("bf16-true", "16-true")

    # -- around the module ----------------------------------------------------------------------------------------

    def convert_input(self, data: Any) -> Any:
        """Return a batch in the precision, if everything is in it; otherwise parts of the module cast their inputs."""
        if not self.is_true_half and self.precision != "64-true":
            return data

        def convert(value: Any) -> Any:
            is_number = isinstance(value, Tensor) and value.is_floating_point()
            return value.to(self.engine.dtype) if is_number else value

        return tree_map(convert, data)

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """Do nothing: the strategy casts the module when it exists."""
        return nullcontext()

    module_init_context = tensor_init_context

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Context of new tensors in the precision, if everything is in it."""
        before = torch.get_default_dtype()
        if self.is_true_half or self.precision == "64-true":
            torch.set_default_dtype(self.engine.dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    # -- gradients ------------------------------------------------------------------------------------------------

    def backward(  # type: ignore[override]  # as Lightning's own
        self, tensor: Tensor, model: LightningModule, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Run backward of this rank's share of the loss; gradients are summed over the data coordinates during it."""
        if self.units is None:
            super().backward(tensor, model, optimizer, *args, **kwargs)
            return
        # A scaled loss does not fit in 16 bits.
        wide = tensor if tensor.dtype == torch.float64 else tensor.float()
        with self.units.backward(self.scaler):
            model.backward(wide * (self.scaler.scale / self.units.data_size), *args, **kwargs)

    def optimizer_step(  # type: ignore[override]  # as Lightning's own
        self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run the closure, then unscale, clip and step; skip a step that overflowed."""
        if self.units is None or self.units.of(optimizer) is None:
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        result = closure()
        unit = self.units.of(optimizer)  # read here: the training step may have replaced it
        assert unit is not None  # there was one before
        if result is None and model.automatic_optimization:
            unit.forget()  # training_step returned None: skip this batch
            return result
        unit.gradients.settle()
        self._after_closure(model, optimizer)
        unit.step(self.scaler, kwargs)
        return result

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """Clip by the norm of the whole gradient of the optimizer's parameters, however they are sharded."""
        unit = None if self.units is None else self.units.of(optimizer)
        if unit is None:
            super().clip_grad_by_norm(optimizer, clip_val)
        else:
            unit.clip(float(clip_val))

    def clip_grad_by_value(self, optimizer: Any, clip_val: float) -> None:
        """Clip each element of the gradient, after it was summed over the data coordinates."""
        unit = None if self.units is None else self.units.of(optimizer)
        if unit is None:
            super().clip_grad_by_value(optimizer, clip_val)
        else:
            unit.clip_value(float(clip_val))

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scale, if there is one."""
        return self.scaler.state_dict() if self.scaler.moves else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a loss scale, also one saved by torch's GradScaler."""
        found = dict(state_dict)
        if "_growth_tracker" in found:
            found["good_steps"] = found["_growth_tracker"]
        if "scale" in found:
            self.scaler.load_state_dict({"good_steps": 0, "overflows": 0, **found})
