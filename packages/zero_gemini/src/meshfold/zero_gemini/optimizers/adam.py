"""HybridAdam and CPUAdam: Adam and AdamW (arXiv 1412.6980, 1711.05101) as torch.optim has them, on any parameters.

They step with the kernels of :mod:`meshfold.kernels`, so a parameter in bfloat16 keeps its exact float32 value in two planes,
itself and its low bits, and is updated without a cast or a second copy::

    optimizer = HybridAdam(model.parameters(), lr=3e-4, weight_decay=0.1)
    loss.backward()
    optimizer.step()
    optimizer.master(model.weight)          # float32, to the bit

Passed to Gemini, they determine how it steps its chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from meshfold.kernels import AdamSettings, adam_step
from meshfold.zero_gemini.optimizers import slots
from meshfold.zero_gemini.optimizers.loading import exactly

# beta to this power is 0 in float64, so the kernels' bias corrections become 1.
_LONG_AFTER = 2**40


class FlatAdam(torch.optim.Optimizer):
    """Base class of :class:`HybridAdam` and :class:`CPUAdam`. Settings may differ between groups."""

    # Lets torch.amp.GradScaler set `grad_scale` and `found_inf` here, which saves two passes over the gradients.
    _step_supports_amp_scaling = True
    elementwise = True

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        adamw_mode: bool = True,
        regime: str = "A",
        seed: int = 0,
        amsgrad: bool = False,
        maximize: bool = False,
        nvme_offload_fraction: float = 0.0,
        nvme_offload_dir: str | None = None,
    ) -> None:
        """Args:
        params: float32, bfloat16 or float16 tensors, or groups of them.
        lr: learning rate.
        betas: decay of the first and second moments.
        eps: added to the root of the second moment.
        weight_decay: 0 for none.
        bias_correction: correct the moments' bias in the first steps.
        adamw_mode: True for decoupled decay (AdamW), False for L2 regularisation in the gradient (Adam).
        regime: state of a bfloat16 parameter: ``"A"`` 12 bytes, exact; ``"B"`` 8, moments in bfloat16 rounded stochastically;
            ``"C"`` 6.03, moments in 8 bits. Others are kept exactly, and take only ``"A"``.
        seed: of stochastic rounding.
        amsgrad: only False; see Raises.
        maximize: only False.
        nvme_offload_fraction: only 0.
        nvme_offload_dir: only None.

        Raises:
            ValueError: for invalid settings, or ones that these optimizers do not have.
            TypeError: for parameters in another dtype.
        """
        _refuse(amsgrad=amsgrad, maximize=maximize)
        if nvme_offload_fraction or nvme_offload_dir is not None:
            raise ValueError(
                f"nvme_offload_fraction={nvme_offload_fraction}, nvme_offload_dir={nvme_offload_dir!r}: optimizer state of "
                "plain tensors stays in memory; train with Gemini, or zero=dict(stage=3, offload_path=...), to have it on disk"
            )
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "adamw_mode": adamw_mode,
            "regime": regime,
            "seed": seed,
        }
        self._versions: dict[Tensor, int] = {}  # version of each parameter after our last step
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._versions = {}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add another group of parameters.

        Raises:
            ValueError, TypeError: as when the optimizer is made.
        """
        super().add_param_group(param_group)
        try:
            group = self.param_groups[-1]
            _refuse(**{key: group.get(key) for key in ("amsgrad", "maximize")})
            settings_of(self, group)
            if group["regime"] not in slots.REGIMES:
                raise ValueError(f"regime is {group['regime']!r}; it is 'A', 'B' or 'C'")
            for parameter in group["params"]:
                self._check_parameter(parameter)
        except BaseException:
            del self.param_groups[-1]
            raise

    @overload
    def step(self, closure: None = None, *, div_scale: float | Tensor | None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float], *, div_scale: float | Tensor | None = None) -> float: ...
    def step(
        self, closure: Callable[[], float] | None = None, *, div_scale: float | Tensor | None = None
    ) -> float | None:
        """Step every parameter that has a gradient.

        Args:
            closure: recomputes the loss and the gradients.
            div_scale: gradients are divided by it first, in the same pass: a loss scale, or a norm over its bound; a number
                or a tensor of one element.

        Returns:
            The closure's result, or None.

        Raises:
            RuntimeError: for a sparse gradient.
            TypeError: for a regime that a parameter's dtype does not have.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf = getattr(self, "found_inf", None)  # set by GradScaler: skip this step
        if found_inf is not None and bool(found_inf):
            return loss
        scale = _Scale(_product(div_scale, getattr(self, "grad_scale", None)))
        start = 0
        with torch.no_grad():
            for group in self.param_groups:
                settings = settings_of(self, group)
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._step(parameter, group, settings, scale.on(parameter.device), start)
                    # An element's noise depends on its offset among all parameters; blocks of 256 share a scale.
                    start += -(-parameter.numel() // 256) * 256
        return loss

    def _step(
        self,
        parameter: Tensor,
        group: Mapping[str, Any],
        settings: AdamSettings,
        scale: float | Tensor,
        start: int,
    ) -> None:
        assert parameter.grad is not None
        gradient = self._dense(parameter.grad, parameter)
        state = self._state_of(parameter, group)
        state["step"] += 1
        if not parameter.numel():
            return
        if self._versions.get(parameter) != parameter._version:
            slots.notice_change(parameter, state)
        weights = slots.row_major(parameter)
        number = int(state["step"])
        adam_step(
            slots.adam_state(weights.view(-1), state),
            gradient,
            settings,
            step=number if group["bias_correction"] else _LONG_AFTER + number,
            grad_scale=scale,
            start=start,
            seed=int(group["seed"]),
        )
        if weights.data_ptr() != parameter.data_ptr():
            parameter.copy_(weights)
        self._versions[parameter] = parameter._version

    def _dense(self, gradient: Tensor, parameter: Tensor) -> Tensor:
        """Return a gradient's elements flat, in row-major order."""
        if gradient.layout != torch.strided:
            raise RuntimeError(
                f"{type(self).__name__} was given a sparse gradient (of a parameter of shape {list(parameter.shape)}): every "
                "element has moments that decay in each step; make the layer with sparse=False, or use torch.optim.SparseAdam"
            )
        return gradient.reshape(-1).contiguous()

    def _state_of(self, parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
        self._check_parameter(parameter)
        regime = group["regime"]
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            if regime != "A" and parameter.dtype != torch.bfloat16:
                raise TypeError(
                    f"regime {regime!r} is for parameters in bfloat16, and one of shape {list(parameter.shape)} is "
                    f"{_name(parameter.dtype)}: put it into a group of its own with regime='A', or convert it"
                )
            state.update(slots.fresh(parameter, regime))
        elif state["exp_avg"].device != parameter.device:  # the parameter was moved: move its state
            for key, value in state.items():
                state[key] = value if key == "step" else value.to(parameter.device)
        return state

    def _check_parameter(self, parameter: Tensor) -> None:
        """Raise if this optimizer cannot step the parameter."""
        if parameter.dtype not in slots.DTYPES:
            other = (
                "torch.optim.AdamW computes in float64"
                if parameter.dtype == torch.float64
                else "leave it out"
                if not parameter.is_complex()
                else "give torch.view_as_real(parameter), or use torch.optim.AdamW"
            )
            raise TypeError(
                f"{type(self).__name__} steps on float32, bfloat16 and float16, and a parameter of shape "
                f"{list(parameter.shape)} is {_name(parameter.dtype)}: {other}"
            )

    def master(self, parameter: Tensor) -> Tensor:
        """Return a parameter's master weights in float32, of its shape: a new tensor. A bfloat16 parameter is this, rounded."""
        with torch.no_grad():
            return slots.master_of(parameter, self.state.get(parameter, {}))

    def set_master(self, parameter: Tensor, value: Tensor) -> None:
        """Give a parameter a float32 value, such as a checkpoint's, without losing the bits that its own dtype cannot hold.

        Raises:
            ValueError: for a value of another shape, or a parameter that this optimizer does not have.
        """
        group = next((g for g in self.param_groups if any(p is parameter for p in g["params"])), None)
        if group is None:
            raise ValueError(f"a parameter of shape {list(parameter.shape)} is in no group of this optimizer")
        if value.shape != parameter.shape:
            raise ValueError(f"a value of shape {list(value.shape)} for a parameter of shape {list(parameter.shape)}")
        with torch.no_grad():
            slots.set_master(parameter, self._state_of(parameter, group), value)
        self._versions[parameter] = parameter._version

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of :meth:`state_dict`, bit for bit; moments of torch's Adam and AdamW are accepted too.

        Raises:
            ValueError: for state of another regime, of other parameters, or with keys that these optimizers do not have.
        """
        with exactly(self):
            super().load_state_dict(state_dict)


class HybridAdam(FlatAdam):
    """Adam for parameters on GPUs (Triton) and on the CPU (numba), in one step; see :class:`FlatAdam` for arguments.

    The state of a moved parameter moves with it.
    """


class CPUAdam(FlatAdam):
    """Adam for parameters on the CPU, at the speed of its memory; see :class:`FlatAdam` for arguments.

    Raises:
        ValueError: for a parameter on another device.
    """

    def _check_parameter(self, parameter: Tensor) -> None:
        super()._check_parameter(parameter)
        if parameter.device.type not in ("cpu", "meta"):
            raise ValueError(
                f"CPUAdam steps on the CPU, and a parameter of shape {list(parameter.shape)} is on {parameter.device}: use "
                "HybridAdam, which steps each where it is"
            )


class _Scale:
    """Factor on gradients, cached per device."""

    def __init__(self, divisor: float | Tensor | None) -> None:
        self._divisor = divisor
        self._on: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> float | Tensor:
        if self._divisor is None:
            return 1.0
        if not isinstance(self._divisor, Tensor):
            return 1.0 / self._divisor
        if device not in self._on:
            self._on[device] = self._divisor.to(device).double().reciprocal().float().reshape(())
        return self._on[device]


def _product(a: float | Tensor | None, b: float | Tensor | None) -> float | Tensor | None:
    """Return the product of two divisors, where None is 1.

    Raises:
        ValueError: for a number that is not positive.
    """
    for value in (a, b):
        if value is not None and not isinstance(value, Tensor) and not value > 0.0:
            raise ValueError(f"div_scale is {value}: give a number above 0, by which gradients are divided, or None")
    if a is None or b is None:
        return b if a is None else a
    return a * b


def settings_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> AdamSettings:
    """Return the settings of a group of one of our optimizers, or of torch's Adam and AdamW.

    Raises:
        ValueError: for an invalid setting.
    """
    beta1, beta2 = group["betas"]
    # our key, else torch's, which older saved groups lack
    decoupled = group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))
    return AdamSettings(
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        adamw_mode=bool(group.get("adamw_mode", decoupled)),
    )


def _refuse(**extras: object) -> None:
    reasons = {
        "amsgrad": "the largest second moment is not kept, it would be 4 more bytes a parameter; use torch.optim.AdamW",
        "maximize": "gradients are descended; negate the loss, or use torch.optim.AdamW",
    }
    for name, value in extras.items():
        if value:
            raise ValueError(f"{name}={value!r}: {reasons[name]}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
