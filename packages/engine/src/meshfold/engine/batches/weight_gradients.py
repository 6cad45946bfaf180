"""A warning about a loss that is computed with gradients of weights, as for a penalty on them, over data ranks.

``torch.autograd.grad(loss, weights, create_graph=True)`` is the gradient of this rank's rows. A penalty on it, which is not
linear, is another one than that of the whole batch. (A penalty on gradients of inputs belongs to rows, and is right.)
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from meshfold.engine.world import World
from meshfold.mesh import metadata

WATCHED = 16
"""Losses that are watched: hooks cost the host some microseconds a parameter in a backward"""


class WeightGradients:
    """Watches the first losses of a training: hooks on weights tell of gradients that are taken with a graph of their own."""

    def __init__(self, trained: Iterable[nn.Parameter], world: World) -> None:
        """Args:
        trained: the trained parameters. Those whose gradients are not summed over ranks are not watched.
        world: their ranks; the first data rank warns.
        """
        self._ranks, self._says = world.data_size, world.data_index == 0
        self._losses = 0
        self._taken: list[Any] = []  # nodes of autograd's graph that made gradients of weights
        me = ref(self)

        def hook(gradient: Tensor) -> None:
            if torch.is_grad_enabled() and (watcher := me()) is not None:  # in a backward only with create_graph=True
                watcher._taken.append(gradient.grad_fn)

        self._handles = []
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in trained:
                known = metadata(parameter)
                if known is not None and known.mesh.size(*known.sum_axes) > 1 and parameter.requires_grad:
                    self._handles.append(parameter.register_hook(hook))

    def check(self, loss: Tensor) -> None:
        """Warn, once, of a loss that is computed with gradients of weights which the ranks have not averaged."""
        taken, self._taken = set(self._taken), []
        self._losses += loss.requires_grad
        if self._losses > WATCHED:
            self.close()
        if not taken:
            return
        waiting, seen = [loss.grad_fn], {loss.grad_fn}
        while waiting:
            node = waiting.pop()
            if node is None or "AllReduce" in node.name():  # averaged by the user
                continue
            if node in taken:
                self.close()
                if self._says:
                    self._warn()
                return
            for following, _ in node.next_functions:
                if following not in seen:
                    seen.add(following)
                    waiting.append(following)

    def close(self) -> None:
        """Remove the hooks; may be called twice."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._taken.clear()

    def _warn(self) -> None:
        warnings.warn(
            "the loss is computed with gradients of weights (torch.autograd.grad(..., create_graph=True)): each of "
            f"{self._ranks} data ranks has the gradient of its own rows, and a penalty on it is another one than in one process. "
            "Average it before: torch.distributed.nn.functional.all_reduce(gradient) / ranks, which has a gradient too; or use a "
            "spec without data and zero. A gradient of each rank's own rows, as in meta-learning, needs no change",
            stacklevel=3,
        )
