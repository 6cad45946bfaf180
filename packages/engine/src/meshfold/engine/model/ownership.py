"""A module is trained by one engine at a time.

Each engine takes the gradients that come to its parameters, and drops those of other losses. Of two that train one module the
later would never see a gradient, and its loss would stand still without a word. The cell of a notebook that is run again makes
two.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from weakref import WeakKeyDictionary, ref

from torch import nn

from meshfold.mesh import SpecError


class Claim:
    """Says that an engine trains a module, until it is closed or nobody has it any more."""

    def __init__(self, engine: object, *, in_chunks: bool) -> None:
        """Args:
        engine: who trains it.
        in_chunks: its weights are in the engine's chunks, and go with it if it is not closed.
        """
        self._engine, self._in_chunks, self._closed = ref(engine), in_chunks, False

    @property
    def holds(self) -> bool:
        """Tell whether no other engine may train the model."""
        return not self._closed and (self._in_chunks or self._engine() is not None)

    def close(self) -> None:
        """Let the module go."""
        self._closed = True


_claims: WeakKeyDictionary[nn.Module, Claim] = WeakKeyDictionary()


def check_free(model: object) -> None:
    """Before an engine takes a model. Of a function there is nothing to ask: each call makes another model.

    Raises:
        SpecError: if another engine trains a part of it.
    """
    parts = dict(_trained(model)) if isinstance(model, nn.Module) else {}
    if any(_is_taken(module) for module in parts.values()):
        gc.collect()  # an engine that nobody has any more
    taken = [name for name, module in parts.items() if _is_taken(module)]
    if taken:
        what = "it" if len(taken) == len(parts) else f"its {taken[0]!r}"
        raise SpecError(
            f"model={type(model).__name__}(...): another engine trains {what} already, and this one would see none of its "
            "gradients. Call close() of the other one first, or give this one a model of its own"
        )


def claim(model: nn.Module, engine: object, *, in_chunks: bool) -> Claim:
    """Take a model with all that is trained in it, for an engine that stands."""
    made = Claim(engine, in_chunks=in_chunks)
    _claims.update({module: made for _, module in _trained(model)})
    return made


def _trained(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules with parameters of their own that are trained, by name."""
    for name, module in model.named_modules():
        if any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
            yield name, module


def _is_taken(module: nn.Module) -> bool:
    return module in _claims and _claims[module].holds
