"""Exponential moving averages of weights, as state of the optimizer that changes them.

So an average is sharded, placed and saved like a moment. After step t of a parameter:

    average ← average + (1 − d) · (weight − average),  d = min(decay, t / (9 + t)) for t > 1, and 0 for t = 1

which is ``diffusers.training_utils.EMAModel`` with its defaults. ``ramp=False`` takes d = decay from the second step on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from meshfold.optimizers.settings import OptimizerSettingError

AVERAGE = "average"
"""Name of the average in the optimizer's state of a parameter."""
_STEPS = "average_steps"
_made: dict[type[torch.optim.Optimizer], type[torch.optim.Optimizer]] = {}


def averaged(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Return a subclass of an optimizer that also keeps an exponential moving average of each weight.

    Its constructor takes two more settings: ``average``, the decay, in (0, 1), and ``average_ramp`` (True).

    Args:
        kind: an optimizer that steps on each element by itself, such as torch.optim.AdamW.
    """
    if kind not in _made:
        _made[kind] = _subclass(kind)
    return _made[kind]


def _subclass(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    class Averaged(kind):  # type: ignore[valid-type, misc]
        elementwise, averages_weights = True, True

        def __init__(self, params: Any, *args: Any, average: float, average_ramp: bool = True, **settings: Any) -> None:
            if not isinstance(average, int | float) or isinstance(average, bool) or not 0 < average < 1:
                raise OptimizerSettingError(
                    f"{kind.__name__}: average={average!r}; give the decay of the weights' moving average, between 0 and 1, "
                    "such as average=0.9999"
                )
            self._average, self._ramp = float(average), average_ramp
            super().__init__(params, *args, **settings)

        @torch.no_grad()
        def step(self, closure: Callable[[], float] | None = None) -> float | None:
            found: float | None = super().step(closure)
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._follow(parameter)
            return found

        def _follow(self, parameter: torch.Tensor) -> None:
            state = self.state[parameter]
            if AVERAGE not in state:
                state[AVERAGE] = parameter.detach().clone(memory_format=torch.preserve_format)
                state[_STEPS] = torch.zeros((), dtype=torch.float32)
            state[_STEPS] += 1
            steps = float(state[_STEPS])
            limit = steps / (9.0 + steps) if self._ramp else 1.0
            state[AVERAGE].lerp_(parameter, 1.0 - (min(self._average, limit) if steps > 1 else 0.0))

    Averaged.__name__ = f"Averaged{kind.__name__}"
    Averaged.__qualname__ = Averaged.__name__
    return Averaged
