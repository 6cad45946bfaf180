"""Adam's hyperparameters, and what one step makes of them."""

from __future__ import annotations

from dataclasses import dataclass

from meshfold.kernels.float_bits import rounded


@dataclass(frozen=True, kw_only=True)
class AdamSettings:
    """Hyperparameters of Adam, with the names and defaults of torch.optim.

    Attributes:
        lr: learning rate.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the root of the second moment.
        weight_decay: 0 for none.
        adamw_mode: True for decoupled decay (AdamW), False for L2 regularisation in the gradient (Adam).
    """

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    adamw_mode: bool = True

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "weight_decay"):
            if not getattr(self, name) >= 0.0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 0 or more")
        for name in ("beta1", "beta2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 0 and below 1")


@dataclass(frozen=True, kw_only=True)
class Scalars:
    """The numbers of one step, computed in float64 and rounded to float32 once.

    Attributes:
        beta1: decay of the first moment.
        rest1: 1 - beta1.
        beta2: decay of the second moment.
        rest2: 1 - beta2.
        keep: 1 - lr * weight_decay for decoupled decay, else 1.
        step_size: lr / (1 - beta1 ** step).
        correction: 1 / sqrt(1 - beta2 ** step).
        eps: added to the root of the second moment.
        l2: weight decay that goes through the gradient, else 0.
    """

    beta1: float
    rest1: float
    beta2: float
    rest2: float
    keep: float
    step_size: float
    correction: float
    eps: float
    l2: float

    @classmethod
    def at(cls, settings: AdamSettings, step: int) -> Scalars:
        """The scalars of the step of this number, from 1.

        Raises:
            ValueError: for a step below 1.
        """
        if step < 1:
            raise ValueError(f"step is {step}; the first step has number 1, for the bias corrections")
        s = settings
        return cls(
            beta1=rounded(s.beta1),
            rest1=rounded(1.0 - s.beta1),
            beta2=rounded(s.beta2),
            rest2=rounded(1.0 - s.beta2),
            keep=rounded(1.0 - s.lr * s.weight_decay) if s.adamw_mode else 1.0,
            step_size=rounded(s.lr / (1.0 - s.beta1**step)),
            correction=rounded((1.0 - s.beta2**step) ** -0.5),
            eps=rounded(s.eps),
            l2=0.0 if s.adamw_mode else rounded(s.weight_decay),
        )
