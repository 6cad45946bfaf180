"""The entry ``sequence`` of the spec: whole sequences go into a model, each rank computes on its own tokens, whole
sequences come out.

Ranks along the sequence axes are given the same rows. On the way in, tokens, labels and positions are dealt as the mode
deals them; labels are moved by one token before, since a part of a sequence cannot know its next token. On the way out the
ranks' losses are put together to that of the whole sequences, or, without labels, outputs are gathered along the tokens. The
gradient of what comes out is summed over the ranks, as if each had used the whole for a loss of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from meshfold.engine.batches.batch import IGNORE
from meshfold.engine.batches.packed import Documents, packed_documents
from meshfold.engine.sequence_checks import check_mixing
from meshfold.engine.world import World
from meshfold.mesh import LayoutError, ParallelSpec, SpecError
from meshfold.mesh.dropout_stream import Dealt, deal_tokens
from meshfold.mesh.primitives import gather
from meshfold.mesh.spec import SequenceSpec
from meshfold.tensor_parallel.foreign import dropout_by_function

if TYPE_CHECKING:
    from meshfold.sequence import Dealing, WeightDropout
    from meshfold.tensor_parallel.functional import DropoutCalls

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]

_TARGETS = ("targets", "target")
_CACHES = ("past_key_values", "past_key_value", "layer_past", "use_cache", "cache_position")
_LAST_TOKENS = ("logits_to_keep", "num_logits_to_keep")
_UNSHIFTED = ("ForMaskedLM", "ForTokenClassification")  # transformers' names of losses token by token


@dataclass(frozen=True, kw_only=True)
class _Forward:
    """The forward under way.

    Attributes:
        dealing: of its sequences.
        rows: of the batch.
        share: this rank's share of the targets that count, float64; None if the model was given no labels.
    """

    dealing: Dealing
    rows: int
    share: Tensor | None


class SplitSequence:
    """What a model under the entry ``sequence`` has round it."""

    def __init__(self, model: nn.Module, world: World, spec: SequenceSpec, *, own_loss: bool) -> None:
        """Args:
        model: this rank's part.
        world: where it lies.
        spec: the entry.
        own_loss: the engine has a ``loss_fn``.

        Raises:
            SpecError: for what the model cannot do on a part of a sequence, as far as it can be told.
        """
        from meshfold.sequence import sequence_parallel
        from meshfold.sequence.modes import find

        self._mesh, self._mode, self._written = world.mesh, spec.mode, world.spec.written or str(world.spec)
        self._axes = find(spec.mode, world.mesh).axes
        signature = inspect.signature(model.forward)
        self._names = [
            n
            for n, p in signature.parameters.items()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        self._caches = "use_cache" in signature.parameters
        self._is_theirs = hasattr(type(model), "loss_function")  # of the Hugging Face kind
        self._losses = [
            m for m in model.modules() if getattr(m, "causal_lm_loss", False) and hasattr(m, "shifts")
        ]
        self._labels = self._labels_of(
            model, any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        )
        if self._labels == "" and not own_loss:
            self._no_labels(type(model).__name__)
        check_mixing(model, world)
        for loss in self._losses:
            loss.__dict__["shifts"] = False
        self._now: _Forward | None = None
        self._first = model.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True)
        calls = dropout_by_function(model)
        draw = None if calls is None else partial(_drawn, calls)
        self.parallel = sequence_parallel(model, world.mesh, spec.mode, draw=draw)
        self._last = model.register_forward_hook(self._after)

    def close(self) -> None:
        """Leave the model as it was."""
        self._first.remove()
        self.parallel.remove()
        self._last.remove()
        for loss in self._losses:
            loss.__dict__["shifts"] = True

    def repeated(self, contexts: Contexts) -> Contexts:
        """The contexts of a checkpoint with what repeated attention needs."""

        def both() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            first, again = contexts()
            # Attention is asked for before dropout by function is, as in the forward.
            return first, _Both(again, self.parallel.again())

        return both

    # -- before anything runs -------------------------------------------------------------------------------------

    def _labels_of(self, model: nn.Module, takes_more: bool) -> str:
        """What becomes of labels: ``"moved"``, ``"shift_labels"`` (moved, and said so), ``"as they are"``; "" if a loss cannot be
        told that they are moved."""
        if self._is_theirs:
            kind = getattr(model, "loss_type", None)
            if kind in _UNSHIFTED:
                return "as they are"
            return "shift_labels" if kind in (None, "ForCausalLM") and takes_more else ""
        return "moved" if self._losses else ""

    def _refuse(self, why: str) -> NoReturn:
        raise SpecError(f"{self._written}: {why}")

    def _no_labels(self, name: str) -> NoReturn:
        self._refuse(
            f"the loss inside of {name} cannot be told that labels were moved by one token before they were dealt to ranks, "
            "which it cannot do on a part of a sequence. Let the model return logits and give Engine(..., loss_fn=...), which "
            "gets those of whole sequences; or let it call a module with the attribute causal_lm_loss = True that leaves "
            "labels where they are while its attribute shifts is False, as meshfold.engine.models.loss.CausalLMLoss"
        )

    # -- in -------------------------------------------------------------------------------------------------------

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from meshfold.sequence import dealing

        names = [*self._names, *map(str, range(len(self._names), len(args)))][: len(args)]
        given = {**dict(zip(names, args, strict=True)), **kwargs}
        tokens = next((x for x in given.values() if isinstance(x, Tensor) and x.dim() > 1), None)
        if tokens is None:
            self._refuse(
                "the model was called without a tensor [batch, tokens, ...], and tokens are what is split"
            )
        rows, length = tokens.shape[:2]
        dealt = dealing(length, self._mesh, self._mode)
        rank = self._mesh.index(*self._axes)
        self._refuse_parts(given)
        documents = self._documents(given, rows, length)
        self._drop_mask(given, length)
        share = self._deal_labels(given, dealt, rank, rows)
        for name, value in given.items():
            along = isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == length
            if along and value.shape[0] in (1, rows) and name not in ("labels", "shift_labels"):
                given[name] = dealt.shard(value, rank)
        if self._caches:
            given["use_cache"] = False  # keys and values of a part of the tokens, which nobody could use
        self.parallel.set_batch(length=length, documents=documents)
        if module.training:
            deal_tokens(Dealt(length=length, index=dealt.indices(rank).to(tokens.device)))
        self._now = _Forward(dealing=dealt, rows=rows, share=share)
        return tuple(given.pop(name, None) for name in names), given

    def _refuse_parts(self, given: Mapping[str, Any]) -> None:
        for name in _CACHES:
            if given.get(name) is not None and given[name] is not False:
                self._refuse(
                    f"the model was called with {name}, and a split sequence goes through it as a whole: generate by "
                    "meshfold.engine.models.generate, or with use_cache=False"
                )
        for name in _LAST_TOKENS:
            if given.get(name):
                self._refuse(
                    f"the model was called with {name}={given[name]!r}, and the last tokens are another rank's"
                )
        for name in _TARGETS:
            if isinstance(given.get(name), Tensor):
                self._refuse(
                    f"the model was called with {name!r}: give labels that are not moved yet as 'labels', or use a loss_fn"
                )

    def _deal_labels(self, given: dict[str, Any], dealt: Dealing, rank: int, rows: int) -> Tensor | None:
        """This rank's labels in place of all; its share of those that count."""
        from meshfold.sequence import next_tokens

        found: dict[str, Tensor] = {}
        for name in ("labels", "shift_labels"):
            if (value := given.pop(name, None)) is None:
                continue
            if not self._labels:
                self._no_labels("the model")
            if not isinstance(value, Tensor) or tuple(value.shape) != (rows, dealt.length):
                shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                self._refuse(
                    f"{name} {shape} for tokens {(rows, dealt.length)}: where a sequence is split, each token has its own label"
                )
            found[name] = value
        if not found:
            return None
        moved = found.get("shift_labels")
        if moved is None:
            labels = found["labels"]
            moved = labels if self._labels == "as they are" else next_tokens(labels, ignore_index=IGNORE)
        mine = dealt.shard(moved, rank, pad=IGNORE)
        given["labels"] = mine
        if self._labels == "shift_labels":
            given["shift_labels"] = mine
        if given.get("num_items_in_batch") is not None:  # the loss is a sum, divided already
            return torch.ones((), dtype=torch.float64, device=mine.device)
        return (mine != IGNORE).sum().double() / (moved != IGNORE).sum().clamp(min=1)

    def _drop_mask(self, given: dict[str, Any], length: int) -> None:
        """Leave out masks that say nothing, or nothing that counts; refuse the others."""
        from meshfold.sequence import next_tokens

        mask = given.get("attention_mask")
        if isinstance(mask, Tensor):
            if mask.dim() != 2 or mask.shape[1] != length:
                self._refuse(
                    f"an attention_mask {list(mask.shape)} cannot be dealt with the tokens: leave it out, and pad on the right"
                )
            real = mask.bool()
            # A causal model's tokens do not see padding behind them.
            behind = self._labels == "shift_labels" and bool((real[:, 1:] <= real[:, :-1]).all())
            targets = given.get("shift_labels")
            if targets is None and isinstance(given.get("labels"), Tensor):
                targets = next_tokens(given["labels"], ignore_index=IGNORE)
            counted = targets is None or bool(((targets != IGNORE) & ~real).any())
            if not bool(real.all()) and (counted or not behind):
                self._refuse(
                    f"attention_mask hides tokens that count, or that others see: pad on the right, with the label {IGNORE}, or "
                    "make sequences of one length"
                )
            given["attention_mask"] = None

    def _documents(self, given: dict[str, Any], rows: int, length: int) -> Documents | None:
        """The documents packed into each row, which attention keeps to; None if there are none."""
        if not self._is_theirs:
            return None
        masked = isinstance(given.get("attention_mask"), Tensor)
        try:
            found = packed_documents(given, rows, length)
        except SpecError as error:
            self._refuse(str(error))
        if found is not None and self._labels != "shift_labels":
            self._refuse(
                "position_ids that do not count the tokens from 0 are for causal models: leave them out"
            )
        if found is not None and masked:
            self._refuse(
                "position_ids that begin anew at packed documents come with an attention_mask, with which transformers lets "
                "documents see each other: leave attention_mask out"
            )
        return found

    # -- out ------------------------------------------------------------------------------------------------------

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        now, self._now = self._now, None
        if now is None:
            return output
        if now.share is None:
            return _changed(output, lambda value: self._whole(value, now))
        if isinstance(output, Tensor):
            return self._loss(output, now.share)
        if isinstance(output, Mapping) and isinstance(output.get("loss"), Tensor):
            output["loss"] = self._loss(output["loss"], now.share)  # type: ignore[index]
        elif isinstance(output, tuple) and not hasattr(output, "_fields"):
            output = (self._loss(output[0], now.share), *output[1:])
        elif isinstance(getattr(output, "loss", None), Tensor):
            object.__setattr__(
                output, "loss", self._loss(output.loss, now.share)
            )  # it may be a frozen dataclass
        else:
            self._refuse(f"the model was given labels and returned {type(output).__name__} without a loss")
        return output

    def _loss(self, mine: Tensor, share: Tensor) -> Tensor:
        """The mean over whole sequences from the means over each rank's tokens; the same on every rank of them."""
        if mine.dim():
            self._refuse(
                f"the model was given labels and returned a loss of shape {tuple(mine.shape)}: a mean is a scalar"
            )
        # Where nothing counts the mean is 0/0.
        part = torch.where(share > 0, mine.double() * share, 0.0)
        return gather(part.view(1), self._mesh, 0, self._axes).sum().to(mine.dtype)

    def _whole(self, value: Tensor, now: _Forward) -> Tensor:
        local = now.dealing.local
        if value.dim() < 2 or value.shape[0] != now.rows or value.shape[1] != local:
            self._refuse(
                f"the model returned a tensor {list(value.shape)}, and where a sequence is split each rank's outputs have to lie "
                f"along its tokens, here [{now.rows}, {local}, ...], so that they can be put together"
            )
        return now.dealing.join(gather(value, self._mesh, 1, self._axes), 1)


def _drawn(calls: DropoutCalls, q: Tensor, p: float) -> WeightDropout:
    """Which weights of the next attention fall: those that would in one process."""
    from meshfold.sequence import WeightDropout

    if calls.part is None:
        raise LayoutError("attention that drops weights ran outside of the model that it is part of")
    seed, key, first_row, first_head, heads = calls.part.draw_weights(q)
    return WeightDropout(p=p, seed=seed, key=key, heads=heads, first_row=first_row, first_head=first_head)


class _Both:
    """Two contexts, one in the other, as often as they are entered."""

    def __init__(self, outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> None:
        self._outer, self._inner = outer, inner
        self._open: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self._outer)
            stack.enter_context(self._inner)
            self._open.append(stack.pop_all())

    def __exit__(self, *error: object) -> None:
        self._open.pop().close()


def split_sequence(model: nn.Module, world: World, *, own_loss: bool) -> SplitSequence | None:
    """Let a model's ranks share its sequences if the spec says so; None if it does not.

    Args:
        model: this rank's part, tensor parallelism done.
        world: where it lies.
        own_loss: the engine has a ``loss_fn``.

    Raises:
        SpecError: for what the model cannot do on a part of a sequence.
    """
    spec = world.spec.sequence
    if spec is None or spec.size == 1:  # megatron's too
        return None
    return SplitSequence(model, world, spec, own_loss=own_loss)


def local_length(length: int, world: World) -> int:
    """How many tokens of a sequence of so many each rank has, with padding."""
    spec = world.spec.sequence
    if spec is None or spec.size == 1:
        return length
    from meshfold.sequence import dealing

    return dealing(length, world.mesh, spec.mode).local


@contextmanager
def counted_attention(spec: ParallelSpec, count: Callable[[int], None]) -> Iterator[None]:
    """Tell of the operations of attention over split sequences, for tensors without values."""
    if spec.sequence is None or spec.sequence.size == 1:
        yield
        return
    from meshfold.sequence.blocks import SHAPES

    SHAPES.count = count
    try:
        yield
    finally:
        SHAPES.count = None


def _changed(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A model's output with its tensors changed: a tensor, a tuple or list, a mapping or a dataclass."""
    if isinstance(output, Tensor):
        return change(output)
    if isinstance(output, tuple | list):
        parts = [_changed(value, change) for value in output]
        return type(output)(*parts) if hasattr(output, "_fields") else type(output)(parts)
    if isinstance(output, Mapping):
        for name, value in output.items():
            if isinstance(value, Tensor | tuple | list):
                output[name] = _changed(value, change)  # type: ignore[index]
    else:
        for name, value in getattr(output, "__dict__", {}).items():
            if isinstance(value, Tensor | tuple | list):
                object.__setattr__(output, name, _changed(value, change))
    return output
