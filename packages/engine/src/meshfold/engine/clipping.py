"""Clipping of gradients before a step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from meshfold.engine.states.replicated import States
from meshfold.mesh import SpecError
from meshfold.mesh.spec import argument_checks as settings


@dataclass(frozen=True, kw_only=True)
class Clipping:
    """By the norm of the whole model's gradient, by each element's value, or not at all.

    Attributes:
        norm: the largest norm; None for any.
        norm_type: which norm, also of the one that is reported.
        value: the largest absolute value of an element; None for any.
    """

    norm: float | None = None
    norm_type: float = 2.0
    value: float | None = None

    @classmethod
    def parse(cls, norm: object, norm_type: object, value: object) -> Clipping:
        """Raises:
        SpecError: for what is no number above 0, another norm than 1, 2 and infinity, or both ways at once.
        """
        if isinstance(norm_type, bool) or norm_type not in (1, 2, math.inf):
            raise SpecError(f"clip_norm_type={norm_type!r}: the norm is 2.0, 1.0 or math.inf")
        if norm is not None and value is not None:
            raise SpecError(
                f"clip_grad_norm={norm!r} and clip_grad_value={value!r}: clip by the norm or by the value, not both"
            )
        return cls(
            norm=None if norm is None else settings.positive("clip_grad_norm", norm),
            norm_type=float(norm_type),
            value=None if value is None else settings.positive("clip_grad_value", value),
        )

    @property
    def needs_all(self) -> bool:
        """Tell whether all gradients must be complete before any parameter is stepped."""
        return self.norm is not None or self.value is not None or self.norm_type != 2.0

    def apply(self, states: States) -> Tensor:
        """Clip complete gradients; their norm before."""
        if self.norm is not None:
            return states.clip(self.norm, self.norm_type)
        norm = states.norm(self.norm_type)
        if self.value is not None:
            states.clip_value(self.value)
        return norm
