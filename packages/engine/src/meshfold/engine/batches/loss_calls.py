"""Calls of torch's cross entropy, which show what a loss is a mean over.

Ranks' means are put together by how many targets each is over, so that has to be known: targets of another
``ignore_index`` than -100 do not count either, and a mean over the weights of classes is none over targets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from meshfold.mesh import SpecError
from meshfold.mesh.model_io import IGNORE_INDEX


class LossCalls(TorchFunctionMode):
    """Looks at the calls of cross entropy inside.

    Attributes:
        ignored: the ``index`` that they ignored; -100 if none said another.
    """

    def __init__(self, *, parts: str, exact: bool) -> None:
        """Args:
        parts: what the batch is split into, for errors.
        exact: another index than -100 can be counted without.
        """
        super().__init__()
        self.ignored = IGNORE_INDEX
        self._parts, self._exact = parts, exact

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = {} if kwargs is None else kwargs
        if func is F.cross_entropy or func is F.nll_loss:
            self._look(*args, **given)
            if self.ignored != IGNORE_INDEX:
                if "target" in given:
                    given = {**given, "target": self._filler(given["target"])}
                else:
                    args = (args[0], self._filler(args[1]), *args[2:])
        return func(*args, **given)

    def _filler(self, target: Tensor) -> Tensor:
        """Return the targets of a rank without rows, -100 but for one, as the user's loss takes them; others as they are.

        The one that counts, so that the mean is finite, is of class 0, or of class 1 where 0 does not count.
        """
        if target.is_floating_point():
            return target
        ignored = target == IGNORE_INDEX
        is_filler = (
            ignored.any() & (ignored | (target == 0)).all()
        )  # not looked at: the host would wait for it
        one = torch.full_like(target, self.ignored).flatten()
        one[-1] = int(self.ignored == 0)
        return torch.where(is_filler, one.view(target.shape), target)

    def _look(
        self,
        input: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = IGNORE_INDEX,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        """Raises:
        SpecError: for a mean that cannot be put together again from those of parts.
        """
        if reduction != "mean" or target.is_floating_point():
            return
        if weight is not None:
            raise SpecError(
                f"cross_entropy(weight=...): its mean is over the weights of the targets' classes, and the means of {self._parts} "
                "are put together by how many targets each has. Take the sum, and divide by the targets that count: "
                "cross_entropy(output, targets, weight=weight, reduction='sum') / (targets != -100).sum()"
            )
        if ignore_index == IGNORE_INDEX:
            return
        if not self._exact or self.ignored not in (IGNORE_INDEX, ignore_index):
            raise SpecError(
                f"cross_entropy(ignore_index={ignore_index}): the means of {self._parts} are put together by how many targets "
                f"each has that are not {IGNORE_INDEX}. Write targets.masked_fill(targets == {ignore_index}, {IGNORE_INDEX}), "
                "and leave ignore_index out"
            )
        self.ignored = ignore_index


def is_compiled(called: object) -> bool:
    """Return whether torch.compile has wrapped a function, or a module or any that it holds."""
    modules = called.modules() if isinstance(called, nn.Module) else ()
    return hasattr(called, "_torchdynamo_orig_callable") or any(
        hasattr(m, "_orig_mod") or getattr(m, "_compiled_call_impl", None) is not None for m in modules
    )
