"""Dropout that a model calls as a function, in its own code rather than in an nn.Dropout.

``torch.nn.functional.dropout`` and ``scaled_dot_product_attention(dropout_p=...)`` would draw from torch's random
state, differently on every rank. While a model runs they are redirected to the dropout by global element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.mesh.tracking import tracker, untracked
from meshfold.tensor_parallel.layers.attention import attention
from meshfold.tensor_parallel.layers.base import OnMesh
from meshfold.tensor_parallel.layers.dropout import Dropout
from meshfold.tensor_parallel.layers.redirection import Redirection


def has_functional_dropout(model: nn.Module) -> bool:
    """Return True if a module or a configuration in a model names a dropout probability, outside of nn.Dropout."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            continue
        for place in (module, getattr(module, "config", None)):
            for name, value in getattr(place, "__dict__", {}).items():
                # transformers' configurations name summary and classifier heads that few models have.
                if (
                    "drop" in name
                    and not name.startswith(("summary", "classifier"))
                    and isinstance(value, float)
                    and value > 0
                ):
                    return True
    return False


class FunctionalDropout(Redirection):
    """Function mode that redirects dropout calls while a model runs, to the :class:`Dropout` of the part that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.part: Dropout | None = None
        """The part that runs now; None outside of the model."""
        self._outer: list[Dropout | None] = []

    @contextmanager
    def inside(self, part: Dropout | None) -> Iterator[None]:
        """Run a part, for example when a checkpoint recomputes it."""
        if part is None:
            yield
            return
        self.enter(part)
        try:
            yield
        finally:
            self.leave()

    def enter(self, part: Dropout) -> None:
        """Begin a part."""
        if self.part is None:
            self.__enter__()
        self._outer.append(self.part)
        self.part = part

    def leave(self) -> None:
        """End a part."""
        self.part = self._outer.pop()
        if self.part is None:
            self.__exit__(None, None, None)

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        part, given = self.part, {} if kwargs is None else kwargs
        if part is not None and func is F.dropout:
            return _dropout(part, *args, **given)
        if part is not None and func is F.scaled_dot_product_attention:
            return _attention(part, *args, **given)
        return func(*args, **given)


def _dropout(part: Dropout, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Replace ``torch.nn.functional.dropout``."""
    if not training or p <= 0.0:
        return input
    with untracked():
        dropped = part.drop(input, p)
    if (found := tracker()) is not None:
        found.mark(dropped, found.dims(input))
        found.rows.keep(dropped, input)
    return dropped


def _attention(
    part: Dropout,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Replace ``torch.nn.functional.scaled_dot_product_attention``."""
    given: dict[str, Any] = dict(mask=attn_mask, causal=is_causal, scale=scale)
    found = tracker()
    if found is None:
        return attention(query, key, value, **given, p=dropout_p, dropout=part)
    if dropout_p == 0.0:
        return attention(query, key, value, **given)
    with torch.no_grad():  # under recomputation, save no more than the model would
        tried = attention(query, key, value, **given)  # the layout is the same without dropout
    with untracked():
        dropped = attention(query, key, value, **given, p=dropout_p, dropout=part)
    found.mark(dropped, found.dims(tried))
    found.rows.keep(dropped, tried)
    return dropped


class DropoutPart(OnMesh):
    """Hooks that tell :class:`FunctionalDropout` when a part of the model begins and ends."""

    def __init__(self, calls: FunctionalDropout, dropout: Dropout) -> None:
        self.calls, self.dropout, self.mesh = calls, dropout, dropout.mesh
        self._begun = 0

    def attach(self, module: nn.Module) -> None:
        """Register the hooks. They run first, so that they also end when a part fails."""
        module.register_forward_pre_hook(self._begin, prepend=True)
        module.register_forward_hook(self._end, always_call=True)

    def _begin(self, module: nn.Module, args: Any) -> None:
        self.calls.enter(self.dropout)
        self._begun += 1

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._begun:  # else a hook that runs before ours has raised
            self._begun -= 1
            self.calls.leave()
