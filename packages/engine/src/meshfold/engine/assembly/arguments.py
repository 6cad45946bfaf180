"""The engine's arguments, each checked before anything starts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshfold.engine.batches.loss import check_loss_fn
from meshfold.engine.long_runs.nonfinite import Mode, check_mode
from meshfold.engine.model.compile_blocks import CompileSettings
from meshfold.engine.model.fused_kernels import check_kernels
from meshfold.engine.optimizers import Factory, optimizer_factory
from meshfold.engine.precision import Precision
from meshfold.engine.states.protocols import States
from meshfold.engine.world import check_watchdog, has_tensor, has_zero
from meshfold.mesh import ParallelSpec, SpecError
from meshfold.mesh.spec import argument_checks as settings


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The checked arguments of ``Engine(...)``, except those that need the model or the other processes.

    Attributes:
        precision: of the model.
        make_optimizer: of its parameters; None for evaluation only.
        clip: how gradients are clipped.
        accumulation: micro-steps of an optimizer step.
        seed: of initial weights, dropout and the order of data.
        loss_fn: of the model's output and the batch; None: the model's own loss.
        lr_scheduler: makes a torch scheduler of the optimizer; None for none.
        kernels: the rules for fused kernels in the model; None for none.
        nonfinite: what to do about nan and infinity; None: no check.
        watchdog: seconds; None: from the environment.
        compare: whether every collective is compared between its ranks.
        compile: how repeated blocks are compiled; None if they are not.
        cuda_graph: micro-steps are captured and replayed.
    """

    precision: Precision
    make_optimizer: Factory | None
    clip: Clipping
    accumulation: int
    seed: int
    loss_fn: Callable[[Any, Any], Tensor] | None
    lr_scheduler: Callable[[torch.optim.Optimizer], Any] | None
    kernels: Mapping[str, bool | None] | None
    nonfinite: Mode | None
    watchdog: float | None
    compare: bool
    compile: CompileSettings | None
    cuda_graph: bool

    @classmethod
    def check(
        cls,
        *,
        parallel: Mapping[str, object] | ParallelSpec,
        optimizer: object,
        precision: object,
        clip_grad_norm: object,
        clip_norm_type: object,
        clip_grad_value: object,
        gradient_accumulation: object,
        loss_fn: Callable[[Any, Any], Tensor] | None,
        lr_scheduler: Callable[[torch.optim.Optimizer], Any] | None,
        seed: object,
        kernels: object,
        nonfinite: object,
        watchdog: object,
        check_collectives: object,
        compile: object,
        cuda_graph: object,
    ) -> Arguments:
        """See :class:`meshfold.engine.Engine`, whose arguments have these names.

        Raises:
            SpecError: for the first invalid one.
        """
        checked_precision = Precision.parse(precision)
        make_optimizer = optimizer_factory(optimizer, whole=has_zero(parallel) or not has_tensor(parallel))
        clip = Clipping.parse(clip_grad_norm, clip_norm_type, clip_grad_value)
        mode = check_mode(nonfinite)
        accumulation = settings.count("gradient_accumulation", gradient_accumulation)
        checked_seed = settings.count("seed", seed, least=0)
        check_loss_fn(loss_fn)
        if lr_scheduler is not None and make_optimizer is None:
            raise SpecError("lr_scheduler without an optimizer: give Engine(..., optimizer=dict(name='adamw', lr=...))")
        rules = check_kernels(kernels)
        checked_compile = CompileSettings.parse(compile)
        if not isinstance(cuda_graph, bool):
            raise SpecError(f"cuda_graph={cuda_graph!r}: True or False")
        limit_s, compare = check_watchdog(watchdog, check_collectives)
        return cls(
            precision=checked_precision,
            make_optimizer=make_optimizer,
            clip=clip,
            accumulation=accumulation,
            seed=checked_seed,
            loss_fn=loss_fn,
            lr_scheduler=lr_scheduler,
            kernels=rules,
            nonfinite=mode,
            watchdog=limit_s,
            compare=compare,
            compile=checked_compile,
            cuda_graph=cuda_graph,
        )

    @property
    def looks_at_all(self) -> bool:
        """Return True if all gradients must be complete before any parameter is stepped."""
        return self.clip.needs_all or self.precision.scale is not None or self.nonfinite is not None


@dataclass(frozen=True, kw_only=True)
class Clipping:
    """Clipping of gradients before a step: by the whole model's norm, by each element's value, or not at all.

    Attributes:
        norm: the largest norm; None: no limit.
        norm_type: which norm, also of the one that is reported.
        value: the largest absolute value of an element; None: no limit.
    """

    norm: float | None = None
    norm_type: float = 2.0
    value: float | None = None

    @classmethod
    def parse(cls, norm: object, norm_type: object, value: object) -> Clipping:
        """Check the engine's arguments for clipping.

        Raises:
            SpecError: for anything but a number above 0, a norm other than 1, 2 and infinity, or both ways at once.
        """
        if isinstance(norm_type, bool) or norm_type not in (1, 2, math.inf):
            raise SpecError(f"clip_norm_type={norm_type!r}: write 2.0, 1.0 or math.inf")
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
        """Return True if all gradients must be complete before any parameter is stepped."""
        return self.norm is not None or self.value is not None or self.norm_type != 2.0

    def apply(self, states: States) -> Tensor:
        """Clip complete gradients; return their norm before."""
        if self.norm is not None:
            return states.clip(self.norm, self.norm_type)
        norm = states.norm(self.norm_type)
        if self.value is not None:
            states.clip_value(self.value)
        return norm
