"""Precision: compute dtype, master weights, and the dynamic loss scale of fp16.

========= ============== ======================= =============================== ==============
precision parameters     master weights          gradients over micro-steps      optimizer
========= ============== ======================= =============================== ==============
fp32      float32        the parameters          float32                         float32
fp64      float64        the parameters          float64                         float64
bf16      bfloat16       float32, apart          summed and reduced in float32   float32
fp16      float16        float32, apart          summed and reduced in float32   float32
========= ============== ======================= =============================== ==============

Norms with running statistics (BatchNorm, InstanceNorm) keep weight, bias and statistics in the dtype of the master weights,
whatever their inputs are in, as apex and FSDP users know it: torch's kernels take both together, or neither, in 16 bits.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.engine.precision.fp8 import FP8_KEYS, Fp8Settings
from meshfold.engine.precision_names import precision_name
from meshfold.mesh import SpecError, annotate, metadata
from meshfold.mesh.parameters import settle, unwatch, was_written, watch, with_written
from meshfold.mesh.spec import argument_checks as settings

__all__ = ["Fp8Settings", "LossScaler", "Masters", "Precision", "ScaleSettings", "cast_rest", "other_dtypes"]

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class ScaleSettings:
    """Settings of fp16's dynamic loss scale (Micikevicius et al., arXiv 1710.03740, section 3.2).

    Attributes:
        initial_scale: initial factor of the loss.
        growth_factor: the scale grows by this ...
        growth_interval: ... after this many steps in a row without overflow.
        backoff_factor: the scale shrinks by this ...
        hysteresis: ... at this number of overflows in a row, and at each further one in that row.
        min_scale: it never falls below.
        max_scale: it never grows above.
    """

    initial_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    min_scale: float = 1.0
    max_scale: float = 2.0**32

    def __post_init__(self) -> None:
        for name in ("initial_scale", "growth_factor", "backoff_factor", "min_scale", "max_scale"):
            settings.positive(name, getattr(self, name))
        for name in ("growth_interval", "hysteresis"):
            settings.count(name, getattr(self, name))
        if self.growth_factor < 1:
            raise SpecError(f"growth_factor={self.growth_factor!r}: give a factor from 1 up, by which the scale grows")
        if self.backoff_factor >= 1:
            raise SpecError(
                f"backoff_factor={self.backoff_factor!r}: give a factor below 1, by which the scale shrinks"
            )
        if self.min_scale > self.max_scale:
            raise SpecError(f"min_scale={self.min_scale!r} is above max_scale={self.max_scale!r}")
        if self.initial_scale < self.min_scale:
            raise SpecError(f"initial_scale={self.initial_scale!r} is below min_scale={self.min_scale!r}")
        if self.initial_scale > self.max_scale:
            raise SpecError(f"initial_scale={self.initial_scale!r} is above max_scale={self.max_scale!r}")


class LossScaler:
    """The current loss scale. ``settings=None`` is a constant scale of 1."""

    def __init__(self, scale_settings: ScaleSettings | None, *, says: bool = True) -> None:
        """Args:
        scale_settings: its settings.
        says: warn when it cannot go lower; one rank should.
        """
        self.settings = scale_settings
        self.scale = scale_settings.initial_scale if scale_settings else 1.0
        self._good_steps = 0  # since the last change of the scale or the last overflow
        self._overflows = 0  # consecutive
        self._said = not says

    @property
    def moves(self) -> bool:
        """Return True if the gradient norm must be read before each step."""
        return self.settings is not None

    def update(self, norm: float) -> bool:
        """Record a step's gradient norm; return True if the step must be skipped because it is not finite."""
        if self.settings is None:
            return False
        if math.isfinite(norm):
            self._overflows = 0
            self._good_steps += 1
            if self._good_steps >= self.settings.growth_interval:
                self.scale = min(self.scale * self.settings.growth_factor, self.settings.max_scale)
                self._good_steps = 0
            return False
        self._good_steps = 0
        self._overflows += 1
        if self._overflows >= self.settings.hysteresis:
            if self.scale == self.settings.min_scale:
                self._say(self.scale)
            self.scale = max(self.scale * self.settings.backoff_factor, self.settings.min_scale)
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint keeps."""
        return {"scale": self.scale, "good_steps": self._good_steps, "overflows": self._overflows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load another scaler's state, within the bounds of these settings."""
        if self.settings is not None:
            bounded = max(float(state["scale"]), self.settings.min_scale)
            self.scale = min(bounded, self.settings.max_scale)
            self._good_steps, self._overflows = int(state["good_steps"]), int(state["overflows"])

    def _say(self, scale: float) -> None:
        if not self._said:
            self._said = True
            warnings.warn(
                f"fp16: gradients overflow although the loss scale is at min_scale={scale:g} and cannot go lower; these steps "
                "are skipped. The loss itself may not be finite: look at it, lower the learning rate, or use "
                "precision='bf16', which needs no loss scale",
                RuntimeWarning,
                stacklevel=2,
            )


@dataclass(frozen=True, kw_only=True)
class Precision:
    """A checked precision.

    Attributes:
        name: ``fp32``, ``fp64``, ``bf16`` or ``fp16``.
        scale: settings of the loss scale; None for a precision that needs none.
        fp8: how linear layers multiply in fp8; None if none does.
    """

    name: str
    scale: ScaleSettings | None = None
    fp8: Fp8Settings | None = None

    @classmethod
    def parse(cls, value: object) -> Precision:
        """Parse a name, or ``dict(name="fp16", initial_scale=...)`` with fields of :class:`ScaleSettings`, or
        ``dict(name="bf16", matmul="fp8", recipe=..., keep=...)``.

        Raises:
            SpecError: for an unknown name or key, or a value out of range.
        """
        written = value.get("name") if isinstance(value, Mapping) else value
        if (
            isinstance(written, int | str | torch.dtype)
            and written not in _DTYPES
            and (name := precision_name(written))
        ):
            raise SpecError(f"precision={value!r}: it is called {name!r} here. Known: {', '.join(_DTYPES)}")
        if written in ("fp8", "float8"):
            raise SpecError(
                f"precision={value!r}: fp8 is for matmuls only: write precision=dict(name='bf16', matmul='fp8')"
            )
        name, rest = settings.named("precision", value, _DTYPES)
        fp8 = Fp8Settings.parse(value, name, {key: rest.pop(key) for key in FP8_KEYS if key in rest})
        known = {field.name: None for field in fields(ScaleSettings)} if name == "fp16" else {}
        settings.known_keys("precision", value, rest, known or (dict.fromkeys(FP8_KEYS) if name == "bf16" else {}))
        return cls(name=name, scale=ScaleSettings(**rest) if name == "fp16" else None, fp8=fp8)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype in which the model computes."""
        return _DTYPES[self.name]

    @property
    def master_dtype(self) -> torch.dtype:
        """Dtype of master weights, of summed and reduced gradients, and of the optimizer."""
        return self.dtype if self.name == "fp64" else torch.float32


class Masters:
    """The weights that the optimizer updates, and the parameters that the model computes with.

    The same objects where both have one dtype; else float32 copies that carry the parameters' metadata.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        precision: Precision,
        other: Mapping[Tensor, torch.dtype] = MappingProxyType({}),
    ) -> None:
        """Cast the parameters to the precision, keeping their full precision in the masters.

        Args:
            parameters: those that are trained.
            precision: of the model.
            other: parameters that the model has in another dtype (:func:`other_dtypes`).
        """
        self._of: dict[Tensor, nn.Parameter] = {}
        self._low: list[Tensor] = []
        self._high: list[Tensor] = []
        with torch.no_grad():
            for parameter in parameters:
                # Contiguous, like reduced gradients: torch's fused optimizers step in memory order, not by index.
                whole = parameter.detach().to(precision.master_dtype).contiguous()
                parameter.data = whole.to(other.get(parameter, precision.dtype))
                if parameter.dtype == whole.dtype:
                    self._of[parameter] = parameter
                    continue
                master = self._of[parameter] = nn.Parameter(whole)
                meta = metadata(parameter)
                if meta is not None:
                    annotate(master, meta)
                self._low.append(parameter)
                self._high.append(master)
                watch(parameter)

    def of(self, tensor: Tensor) -> Tensor:
        """Return the tensor with the master weights: a parameter's master, or the tensor itself."""
        return self._of.get(tensor, tensor)

    def copies(self) -> dict[Tensor, Tensor]:
        """Return the parameters that are rounded from masters, by master."""
        return dict(zip(self._high, self._low, strict=True))

    @torch.no_grad()
    def publish(self, written: Collection[Tensor] = ()) -> None:
        """Round the masters into the parameters; skip those whose masters are given, which are up to date."""
        low, high = self._low, self._high
        if written:
            pairs = [pair for pair in zip(low, high, strict=True) if pair[1] not in written]
            low, high = [one for one, _ in pairs], [other for _, other in pairs]
        if low:
            torch._foreach_copy_(low, high)
        for parameter in self._low:
            settle(parameter)

    def take_written(self, tensor: Tensor | None = None) -> None:
        """Take what a user's own code wrote to parameters into their masters; ``tensor``: only to this one."""
        for low, high in zip(self._low, self._high, strict=True) if tensor is None else self._pair(tensor):
            if was_written(low):
                found = with_written(high.detach(), low)
                if found is not None:
                    high.detach().copy_(found)
                settle(low)

    def _pair(self, tensor: Tensor) -> list[tuple[nn.Parameter, nn.Parameter]]:
        master = self._of.get(tensor)
        return [] if master is None or master is tensor else [(tensor, master)]  # type: ignore[list-item]

    def close(self) -> None:
        """Make the parameters torch's own again."""
        for parameter in self._low:
            unwatch(parameter)


def keeps_statistics(module: nn.Module) -> bool:
    """Return True if a module is a norm with running statistics: all of it then stays in the dtype of the master weights."""
    return isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None


def other_dtypes(model: nn.Module, precision: Precision) -> dict[Tensor, torch.dtype]:
    """Return the model's parameters in another dtype than the precision's: in norms with running statistics."""
    norms = (module for module in model.modules() if keeps_statistics(module))
    wide = {parameter for norm in norms for parameter in norm.parameters(recurse=False)}
    return dict.fromkeys(wide, precision.master_dtype) if precision.dtype != precision.master_dtype else {}


def cast_rest(model: nn.Module, precision: Precision, trained: set[Tensor]) -> None:
    """Cast everything that is not trained to the precision: frozen parameters, and buffers in the state dict.

    Tables that a module recomputes (non-persistent buffers, such as rotary frequencies) and the running statistics
    of batch norms stay in float32: rounding them loses more than it saves. With fp64 everything is float64. Codes of packed
    weights stay as they are, and make weights in the precision.
    """
    for module in model.modules():
        statistics = keeps_statistics(module)
        if isinstance(getattr(module, "weight_dtype", None), torch.dtype):  # of meshfold.kernels.keep_packed
            module.__dict__["weight_dtype"] = precision.dtype
        for parameter in module.parameters(recurse=False):
            if parameter not in trained and parameter.is_floating_point():
                wanted = precision.master_dtype if statistics else precision.dtype
                parameter.data = parameter.data.to(wanted)
        for name, buffer in module._buffers.items():
            if buffer is None or not buffer.is_floating_point() or buffer.itemsize == 1:
                continue
            keep = statistics or name in module._non_persistent_buffers_set
            wanted = precision.master_dtype if keep else precision.dtype
            if buffer.dtype != wanted:
                meta = metadata(buffer)
                module._buffers[name] = buffer.to(wanted)
                if meta is not None:
                    annotate(module._buffers[name], meta)  # type: ignore[arg-type]
