"""Hugging Face models beyond their layers: the loss, functional dropout, activation checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn

from meshfold.mesh import Mesh
from meshfold.mesh.random import checkpoint_contexts
from meshfold.tensor_parallel.convert.boundary import Boundary
from meshfold.tensor_parallel.convert.functional_dropout import FunctionalDropout
from meshfold.tensor_parallel.layers.loss import CausalLMLoss
from meshfold.tensor_parallel.modes import Mode

_CHECKPOINT = "_gradient_checkpointing_func"
_RECOMPUTATION = "_meshfold_recomputation"


def is_causal_lm(model: nn.Module) -> bool:
    """Return True if a model calls ``self.loss_function(logits, labels, ...)`` for the next token's loss."""
    return hasattr(type(model), "loss_function") and type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))


def use_sharded_loss(model: nn.Module, mesh: Mesh, mode: Mode, vocabulary: int) -> None:
    """Set the vocab-parallel loss on a Hugging Face model that has a hook for it."""

    def loss_function(
        logits: Tensor,
        labels: Tensor | None = None,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        loss = CausalLMLoss(mesh, mode, vocabulary, ignore_index=ignore_index)
        found: Tensor = loss(logits, labels, num_items_in_batch=num_items_in_batch, shift_labels=shift_labels)
        return found

    loss_function.sharded = CausalLMLoss(mesh, mode, vocabulary)  # type: ignore[attr-defined]  # how its logits lie
    model.loss_function = loss_function  # type: ignore[assignment]


def layers_left_out(model: nn.Module) -> list[str]:
    """Return the names of modules that skip whole layers at random, since ranks would not agree on which."""
    return [name for name, m in model.named_modules() if isinstance(p := getattr(m, "layerdrop", 0.0), float) and p > 0]


def recompute_contexts(
    model: nn.Module,
) -> Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]:
    """Return the ``context_fn`` for ``torch.utils.checkpoint.checkpoint`` on a part of a model, split or not."""
    found = model.__dict__.get(_RECOMPUTATION)
    return checkpoint_contexts if found is None else _Contexts(found, None)


def find_functional_dropout(model: nn.Module) -> FunctionalDropout | None:
    """Return the object that redirects a split model's dropout calls; None if the model makes none."""
    found: Recomputation | None = model.__dict__.get(_RECOMPUTATION)
    return None if found is None else found.calls


class Recomputation:
    """Support of activation checkpointing: a block is recomputed with the same elements dropped and the same batch and
    sequence dims.

    Every forward checks it, so checkpointing may be switched on at any time.
    """

    def __init__(self, boundaries: list[Boundary], calls: FunctionalDropout | None) -> None:
        self.boundaries, self.calls = boundaries, calls

    def attach(self, model: nn.Module) -> None:
        """Register it with :func:`recompute_contexts`, and check the model's own checkpointing before each forward."""
        model.__dict__[_RECOMPUTATION] = self
        if any(hasattr(module, "gradient_checkpointing") for module in model.modules()):
            model.register_forward_pre_hook(self._before)

    def _before(self, module: nn.Module, args: Any) -> None:
        if not module.training:
            return
        for part in module.modules():
            function = part.__dict__.get(_CHECKPOINT)
            if isinstance(function, partial) and not isinstance(function.keywords.get("context_fn"), _Contexts):
                others = function.keywords.get("context_fn")
                settings = {
                    **function.keywords,
                    "use_reentrant": False,
                    "context_fn": _Contexts(self, others),
                }
                setattr(part, _CHECKPOINT, partial(function.func, *function.args, **settings))


class _Contexts:
    """``context_fn`` of a checkpoint: one context for the forward, one for its recomputation."""

    def __init__(self, recomputation: Recomputation, others: Callable[[], tuple[Any, Any]] | None) -> None:
        self._recomputation, self._others = recomputation, others

    def __call__(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        first, again = self._others() if self._others else (nullcontext(), nullcontext())
        return first, _Again(self._recomputation, again)


class _Again:
    """Context of a recomputation: restores the state of the forward in which it was made."""

    def __init__(self, recomputation: Recomputation, other: AbstractContextManager[Any]) -> None:
        self._calls, self._boundaries, self._other = recomputation.calls, recomputation.boundaries, other
        self._leads = [boundary.lead for boundary in self._boundaries]
        self._part = self._calls.part if self._calls else None
        self._stream = checkpoint_contexts()[1]
        self._open = ExitStack()

    def __enter__(self) -> None:
        for boundary, lead in zip(self._boundaries, self._leads, strict=True):
            boundary.lead = lead
        self._open.enter_context(self._other)
        self._open.enter_context(self._stream)
        if self._calls is not None:
            self._open.enter_context(self._calls.inside(self._part))

    def __exit__(self, *error: Any) -> None:
        self._open.close()
