"""Lamb, Lars, CAME and Adafactor under Colossal-AI's names, with its arguments and the engine's formulas.

In Colossal-AI, ``DistributedLamb`` and its siblings are separate from the classes for one device. Here the engine handles
shards for any class, so both names make the same. An engine steps with the class of :mod:`meshfold.optimizers`, whose
checkpoints it writes.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from meshfold import optimizers as ours
from meshfold.colossalai.arguments import Translation
from meshfold.mesh import SpecError


class Named:
    """Base of classes that stand for an optimizer of :mod:`meshfold.optimizers`.

    Attributes:
        stands_for: the class that the engine uses instead.
    """

    stands_for: ClassVar[type[torch.optim.Optimizer]]

    def setup_distributed(self, *groups: Any, **settings: Any) -> None:
        """Do nothing, with a warning: the engine handles shards."""
        Translation(words=["setup_distributed(...) does nothing: the engine knows where shards lie"]).say(
            type(self).__name__
        )


class Lamb(Named, ours.Lamb):
    """LAMB by the paper without bias correction, as this name means there; see :class:`meshfold.optimizers.Lamb`."""

    stands_for = ours.Lamb

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        adam: bool = False,
    ) -> None:
        """Args:
        params, lr, betas, eps, weight_decay: see :class:`meshfold.optimizers.Lamb`.
        adam: refused: it is Adam.

        Raises:
            SpecError: for ``adam=True``.
        """
        if adam:
            raise SpecError(f"{type(self).__name__}: adam=True is Adam without bias correction: write torch.optim.Adam")
        super().__init__(params, lr, betas, eps, weight_decay, bias_correction=False)


class DistributedLamb(Named, ours.Lamb):
    """LAMB by the paper, with bias correction; see :class:`meshfold.optimizers.Lamb`."""

    stands_for = ours.Lamb

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
    ) -> None:
        """Args as of :class:`meshfold.optimizers.Lamb`. Colossal-AI's corrects the rate and not ``eps``, and bounds norms by 10."""
        super().__init__(params, lr, betas, eps, weight_decay, bias_correction=bias_correction)


class Lars(Named, ours.Lars):
    """LARS by the paper; see :class:`meshfold.optimizers.Lars`. Colossal-AI's also clamps elements to 10 and ratios to 50."""

    stands_for = ours.Lars

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.0,
        eeta: float = 1e-3,
        weight_decay: float = 0.0,
        epsilon: float = 0.0,
    ) -> None:
        """Args:
        params, lr, momentum, weight_decay: see :class:`meshfold.optimizers.Lars`.
        eeta: called ``trust_coeff`` there.
        epsilon: called ``eps`` there.
        """
        super().__init__(params, lr, momentum, weight_decay=weight_decay, trust_coeff=eeta, eps=epsilon)


class CAME(Named, ours.Came):
    """CAME; see :class:`meshfold.optimizers.Came`. Arguments in Colossal-AI's order."""

    stands_for = ours.Came

    def __init__(
        self,
        params: Any,
        lr: float | None = None,
        eps: tuple[float, float] = (1e-30, 1e-16),
        clip_threshold: float = 1.0,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        weight_decay: float = 0.0,
    ) -> None:
        """Args as of :class:`meshfold.optimizers.Came`.

        Raises:
            SpecError: without ``lr``, which has no default there.
        """
        if lr is None:
            raise SpecError(f"{type(self).__name__}: lr=None; give a rate, such as lr=2e-4")
        super().__init__(params, lr, betas, eps, clip_threshold, weight_decay)


class DistributedCAME(CAME):
    """CAME; see :class:`meshfold.optimizers.Came`."""


class Adafactor(Named, ours.AdafactorHF):
    """Adafactor as in transformers; see :class:`meshfold.optimizers.AdafactorHF`. Arguments in Colossal-AI's order."""

    stands_for = ours.AdafactorHF

    def __init__(
        self,
        params: Any,
        lr: float | None = None,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        beta1: float | None = None,
        weight_decay: float = 0.0,
        scale_parameter: bool = True,
        relative_step: bool = True,
        warmup_init: bool = False,
    ) -> None:
        """Args as of :class:`meshfold.optimizers.AdafactorHF`."""
        super().__init__(
            params,
            lr,
            eps,
            clip_threshold,
            decay_rate,
            beta1,
            weight_decay,
            scale_parameter=scale_parameter,
            relative_step=relative_step,
            warmup_init=warmup_init,
        )


class DistributedAdaFactor(Adafactor):
    """Adafactor as in transformers; see :class:`meshfold.optimizers.AdafactorHF`."""
