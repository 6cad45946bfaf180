"""Cuts a batch into micro-batches on the device, as many as all data-parallel replicas of the pipeline have."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from meshfold.mesh.model_io import labels_are_shifted
from meshfold.pipeline.runtime.microbatch import Microbatch, rows_of, split
from meshfold.pipeline.scheduling.programs import Programs


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """Agreements with the data-parallel replicas of a pipeline that share its parameters (ZeRO stage 3); all of them must call.

    Attributes:
        agree_on_count: from how many micro-batches this pipeline's batch has to how many all have, the most of any. None: each has
            its own.
        around_trial: context manager for trial forwards, which one pipeline may make and another not.
    """

    agree_on_count: Callable[[int], int] | None = None
    around_trial: Callable[[], AbstractContextManager[None]] = nullcontext

    def filled(self, works: Sequence[Microbatch]) -> list[Microbatch]:
        """Repeat the last micro-batch, with weight 0, until there are as many as every replica has."""
        if self.agree_on_count is None:
            return [*works]
        nothing = replace(works[-1], weight=torch.zeros_like(works[-1].weight))
        return [*works, *[nothing] * (self.agree_on_count(len(works)) - len(works))]


NO_REPLICAS = Replicas()


class Batches:
    """Cuts batches as a model and its schedules want them."""

    def __init__(
        self,
        model: nn.Module,
        programs: Programs,
        device: torch.device,
        *,
        own_loss: bool,
        weigh: Callable[[Any], Tensor | float] | None,
    ) -> None:
        """Args:
        model: says by its class what it is called with, and what its loss is a mean over.
        programs: say how many micro-batches there are.
        device: where to.
        own_loss: the loss is a ``loss_fn``'s.
        weigh: how much a micro-batch counts, where neither labels nor rows tell.
        """
        self._programs, self._device = programs, device
        self._own_loss, self._weigh = own_loss, weigh
        self._takes_cache = "use_cache" in inspect.signature(model.forward).parameters
        self._shifted = labels_are_shifted(model)

    def to_train(self, batch: Any, *, unit: int = 1) -> list[Microbatch]:
        """Cut a training batch; ``unit``: see :func:`meshfold.pipeline.runtime.microbatch.split`."""
        works = split(
            self._moved(batch),
            self._programs.count(rows_of(batch), unit=unit),
            unit=unit,
            own_loss=self._own_loss,
            shifted=self._shifted,
            weigh=self._weigh,
        )
        if self._takes_cache:
            for work in works:
                work.kwargs.setdefault("use_cache", False)
        return works

    def to_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Microbatch]:
        """Cut the arguments of a call whose output is wanted; all parts count alike."""
        given = self._moved((args, kwargs))
        count = self._programs.count(rows_of(given), training=False)
        default = {"use_cache": False} if self._takes_cache else {}
        works = split(given, count, own_loss=True, weigh=lambda part: 1.0)
        return [
            replace(work, args=work.given[0], kwargs={**default, **work.given[1]}, given=None)
            for work in works
        ]

    def _moved(self, batch: Any) -> Any:
        return tree_map_only(Tensor, lambda tensor: tensor.to(self._device, non_blocking=True), batch)
