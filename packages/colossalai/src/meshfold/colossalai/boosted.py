"""Results of ``Booster.boost``: a model and an optimizer that look like the script's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from meshfold.colossalai.training import TrainingEngine
from meshfold.mesh import SpecError


class BoostedModel(nn.Module):
    """A model that is called as before and run by the engine.

    Attributes:
        engine: runs it.
        module: this rank's part of the model.
    """

    def __init__(self, engine: TrainingEngine) -> None:
        super().__init__()
        self.engine = engine
        self.module = engine.model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output: with gradients after ``train()``, without after ``eval()``."""
        return self.engine(*args, **kwargs)

    def train(self, mode: bool = True) -> BoostedModel:
        """Switch dropout on."""
        super().train(mode)
        self.engine.train(mode)
        return self

    def unwrap(self) -> nn.Module:
        """Return this rank's part of the model."""
        return self.module

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the whole model's state under the names of a single process, on every rank; all ranks must call."""
        return dict(self.engine.full_state_dict())

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the whole model's state dict, the same on every rank.

        Raises:
            SpecError: for ``strict=False``.
        """
        if not strict:
            raise SpecError("load_state_dict(strict=False): give all names of the model")
        self.engine.load_state_dict(state_dict)
        return nn.modules.module._IncompatibleKeys([], [])


class BoostedOptimizer:
    """An optimizer that steps through the engine, which has the gradients.

    Attributes:
        engine: steps.
    """

    def __init__(self, engine: TrainingEngine) -> None:
        self.engine = engine

    @property
    def optim(self) -> torch.optim.Optimizer:
        """The engine's own, for this rank's parts of the parameters."""
        if self.engine.optimizer is None:
            raise SpecError("this model was boosted without an optimizer")
        return self.engine.optimizer

    def unwrap(self) -> torch.optim.Optimizer:
        """Return the engine's own."""
        return self.optim

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The engine optimizer's groups, in the order of the script's."""
        return self.optim.param_groups

    @property
    def defaults(self) -> dict[str, Any]:
        """The engine optimizer's defaults."""
        return self.optim.defaults

    def step(self, closure: None = None) -> None:
        """Clip as set in the plugin, and step.

        Raises:
            SpecError: for a closure.
        """
        if closure is not None:
            raise SpecError(
                "optimizer.step(closure): call the model and booster.backward(loss, optimizer) before step()"
            )
        self.engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Release the gradients."""
        self.engine.zero_grad()

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Add a loss's gradient."""
        self.engine.backward(loss, retain_graph=retain_graph)

    def get_grad_norm(self) -> float | None:
        """Return the norm of the whole model's gradient in the last step, before clipping."""
        return None if self.engine.last is None else self.engine.last.grad_norm

    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, **given: Any
    ) -> Tensor:
        """Clip the whole model's gradient before :meth:`step`; return the norm before. All ranks must call."""
        norm: Tensor = clip_grad_norm_(self._parameters(), max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)
        return norm

    def clip_grad_by_value(self, clip_value: float, *args: Any, **given: Any) -> None:
        """Clamp every element of the gradient to [-clip_value, clip_value] before :meth:`step`."""
        clip_grad_value_(self._parameters(), clip_value)

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.engine.model.parameters() if parameter.requires_grad]
