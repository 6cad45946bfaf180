"""Hooks around a model under sequence parallelism.

Ranks along the sequence axes get the same rows. Before the forward, tokens, labels and positions are sharded by the mode.
Labels are shifted by one token first, since a part of a sequence does not have the token after its last one. After it, the
ranks' losses are combined into the loss of whole sequences, or, without labels, outputs are gathered along the tokens. The
gradient of the outputs is summed over the ranks, as if each had used the whole for its own loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from meshfold.engine.batches.packed import Documents
from meshfold.engine.experts import balances
from meshfold.engine.sequence.checks import check_mixing
from meshfold.engine.sequence.incoming import Forward, Incoming, Labels, next_token_losses
from meshfold.engine.world import World
from meshfold.kernels.fuse import LazyLogits, SplitRows
from meshfold.mesh import LayoutError, Mesh, SpecError
from meshfold.mesh.collectives import gather, gather_blocks, scatter_sums
from meshfold.mesh.model_io import ShardedOutput, lazy_gather, map_tensors, meet_for_loss, meet_to_read
from meshfold.mesh.spec import SequenceSpec
from meshfold.sequence import ImageTokens, WeightDropout, sequence_mode, sequence_parallel
from meshfold.tensor_parallel import find_mode
from meshfold.tensor_parallel.convert import find_functional_dropout, row_multiple
from meshfold.tensor_parallel.layers import checked

if TYPE_CHECKING:
    from meshfold.tensor_parallel.convert import FunctionalDropout


class SplitSequence:
    """The hooks before and after a model's forward, and its attention between them."""

    def __init__(self, model: nn.Module, world: World, spec: SequenceSpec, *, own_loss: bool) -> None:
        """Args:
        model: this rank's part.
        world: where it lies.
        spec: the entry.
        own_loss: the engine has a ``loss_fn``.

        Raises:
            SpecError: for what the model cannot do on a part of a sequence, as far as known.
        """
        written = world.spec.written or str(world.spec)
        labels = Labels(model, written)
        if not own_loss:
            labels.require(type(model).__name__)
        check_mixing(model, world)
        self._incoming = Incoming(model, world.mesh, spec.mode, labels, written)
        self._outgoing = Outgoing(world.mesh, spec.mode, written)
        self._written, self._ranks, self._balances = written, spec.size, balances(model)
        self._now: Forward | None = None
        with ExitStack() as undo:
            for loss in next_token_losses(model):
                loss.__dict__["shifts"] = False
                undo.callback(loss.__dict__.update, shifts=True)
            undo.callback(model.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True).remove)
            try:
                self._attention = SplitAttention(model, world, spec.mode)
            except LayoutError as error:
                raise SpecError(f"{written}: {error}") from error
            undo.callback(self._attention.close)
            undo.callback(model.register_forward_hook(self._after).remove)
            self._undo = undo.pop_all()

    def close(self) -> None:
        """Leave the model as it was."""
        self._undo.close()

    def repeated(self) -> AbstractContextManager[Any]:
        """Return the context in which the attention of the current forward can be repeated."""
        return self._attention.repeated()

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs, now = self._incoming.take(args, kwargs, training=module.training)
        ranks, length = self._ranks, now.sharding.length
        if self._balances and module.training and now.sharding.local * ranks != length:
            raise SpecError(
                f"{self._written}: sequences of {length} tokens are padded to {now.sharding.local * ranks} for {ranks} ranks, "
                f"and the experts' balance loss would count the padding: give {now.sharding.local * ranks} tokens"
            )
        self._attention.begin(now)
        self._now = now
        return args, kwargs

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        now, self._now = self._now, None
        return output if now is None else self._outgoing.give(output, now)


class SplitImage:
    """A model of images whose tokens are split between its first block and its last; its output is whole on every rank."""

    def __init__(self, model: nn.Module, world: World, spec: SequenceSpec) -> None:
        """Raises:
        SpecError: for a model, or another entry of the spec, with which they cannot be.
        """
        written = world.spec.written or str(world.spec)
        if world.pipelined:
            raise SpecError(
                f"{written}: the image tokens of {type(model).__name__} cannot be split in a pipeline, whose stages begin "
                "between its blocks: leave out pipeline, or sequence"
            )
        if not isinstance(spec.mode, str):
            raise SpecError(f"{written}: image tokens are split by mode 'ring', 'ulysses' or 'ring_ulysses'")
        try:
            self._tokens = ImageTokens(model, world.mesh, spec.mode)
        except LayoutError as error:
            raise SpecError(f"{written}: {error}") from error

    def close(self) -> None:
        """Leave the model as it was."""
        self._tokens.remove()

    def repeated(self) -> AbstractContextManager[Any]:
        """Return a context that does nothing: each attention module has hooks of its own, also when it is repeated."""
        return nullcontext()


class SplitAttention:
    """A model's attention, run over the ranks until it is closed."""

    def __init__(self, model: nn.Module, world: World, mode: str | Callable[..., object]) -> None:
        """Args:
        model: this rank's part.
        world: where it lies.
        mode: of the entry ``sequence``.
        """
        self._model, self._world = model, world
        calls = find_functional_dropout(model)
        draw = None if calls is None else partial(_drawn, calls)
        self._parallel = sequence_parallel(model, world.mesh, mode, draw=draw)

    def begin(self, now: Forward) -> None:
        """Set the batch of the current forward."""
        documents = None if now.documents is None else self._attended(now.documents, now)
        self._parallel.set_batch(length=now.sharding.length, documents=documents)

    def close(self) -> None:
        """Leave the model as it was."""
        self._parallel.remove()

    def repeated(self) -> AbstractContextManager[Any]:
        """Return the context in which the attention of the current forward can be repeated."""
        return self._parallel.again()  # entered after functional dropout's context, as in the forward

    def _attended(self, documents: Documents, now: Forward) -> Documents:
        """Return the documents of this rank's rows in attention.

        A tensor mode may split the batch by rows, padded with copies of the last row.
        """
        if len(documents) == 1 or self._world.mode is None:
            return documents
        unit, mesh = row_multiple(self._model, now.sharding.local), self._world.mesh
        rows = -(-now.rows // unit) * unit
        axes = find_mode(self._world.mode).layout("hidden")["m"]  # type: ignore[arg-type]
        each = rows // mesh.size(*axes)
        first = each * mesh.index(*axes)
        return (*documents, *documents[-1:] * (rows - now.rows))[first : first + each]


def _drawn(calls: FunctionalDropout, q: Tensor, p: float) -> WeightDropout:
    """Return the dropout of the next attention's weights, the same as in one process."""
    if calls.part is None:
        raise LayoutError("attention with dropout ran outside its model's forward: call the model")
    seed, key, first_row, first_head, heads = calls.part.draw_weights(q)
    return WeightDropout(p=p, seed=seed, key=key, heads=heads, first_row=first_row, first_head=first_head)


class Outgoing:
    """Combines each rank's outputs into what one process would have returned."""

    def __init__(self, mesh: Mesh, mode: str | Callable[..., object], written: str) -> None:
        """Args:
        mesh, mode: how sequences are sharded.
        written: the spec, for messages.
        """
        self._mesh, self._axes, self._written = mesh, sequence_mode(mode, mesh).axes, written

    def give(self, output: Any, now: Forward) -> Any:
        """Return a model's output for whole sequences. Next to a loss, tensors are gathered when they are read.

        Raises:
            SpecError: for an output without a loss, or tensors that are not along the tokens.
        """
        if now.share is None:
            return map_tensors(output, lambda name, value: self._whole(name, value, now), deep=True)
        share, place = now.share, _place_of_loss(output)
        if place is None:
            self._refuse(f"the model was given labels but returned {type(output).__name__} without a loss")
        return map_tensors(
            output,
            lambda name, value: self._loss(value, share) if name == place else self._beside(name, value, now),
        )

    def _refuse(self, why: str) -> NoReturn:
        raise SpecError(f"{self._written}: {why}")

    def _loss(self, mine: Tensor, share: Tensor) -> Tensor:
        """Return the mean over whole sequences from the means over each rank's tokens, the same on every rank."""
        if mine.dim():
            self._refuse(
                f"the model was given labels but returned a loss of shape {tuple(mine.shape)}: return the mean, a scalar"
            )
        # If no token counts, the mean is 0/0.
        part = torch.where(share > 0, mine.double() * share, 0.0)
        return gather(part.view(1), self._mesh, 0, self._axes).sum().to(mine.dtype)

    def _whole(self, name: str, value: Tensor, now: Forward) -> Tensor:
        local = now.sharding.local
        if value.dim() < 2 or value.shape[0] != now.rows or value.shape[1] != local:
            self._refuse(
                f"the model returned a tensor {list(value.shape)}, but with a split sequence outputs must have this rank's "
                f"tokens, here [{now.rows}, {local}, ...], to be joined"
            )

        def whole(piece: Tensor) -> Tensor:
            return now.sharding.join(gather(piece, mesh, 1, axes), 1)

        def read(piece: Tensor) -> Tensor:
            meet_to_read(name, mesh, axes)
            return whole(piece)

        mesh, axes = self._mesh, self._axes
        lazy = value.joined(self._rows(name, value, now), read) if isinstance(value, LazyLogits) else None
        return whole(value) if lazy is None else lazy

    def _rows(self, name: str, logits: LazyLogits, now: Forward) -> SplitRows:
        """Return how the rows of whole sequences are split, for a loss of them.

        Gradients are summed over the ranks, as those of gathered logits are.
        """
        mesh, axes, sharding, rows = self._mesh, self._axes, now.sharding, now.rows
        length, words = sharding.length, logits.shape[-1]
        rank = mesh.index(*axes)

        def targets(target: Tensor, ignore_index: int) -> Tensor:
            target = checked(target, words, "label", ignore_index).view(rows, length)
            return sharding.shard(target, rank, pad=ignore_index).reshape(-1)

        def collect(found: Tensor) -> Tensor:
            local = found.reshape(-1, rows, sharding.local)
            return sharding.join(gather(local, mesh, 2, axes), 2).reshape(*found.shape[:-1], rows * length)

        return SplitRows(
            numbers=torch.arange(rows * length, device=logits.device).view(rows, length, 1),
            targets=targets,
            add_up=lambda found: gather(found.view(1), mesh, 0, axes).sum(),
            collect=collect,
            meet=lambda rows: meet_for_loss(name, rows, mesh, axes),
        )

    def _beside(self, name: str, value: Tensor, now: Forward) -> Tensor:
        """Return an output next to the loss; one with a dim of tokens is gathered when it is read."""
        sharding, rows, mesh, axes = now.sharding, now.rows, self._mesh, self._axes
        along = value.dim() > 1 and value.shape[:2] == (rows, sharding.local)
        if value.is_meta or not (along or (value.dim() > 1 and value.shape[0] == rows * sharding.local)):
            return value
        inner = value.shape[2:] if along else value.shape[1:]
        shape = (rows, sharding.length, *inner) if along else (rows * sharding.length, *inner)

        def whole(piece: Tensor) -> Tensor:
            local = piece.reshape(rows, sharding.local, *inner)
            return sharding.join(gather_blocks(local, mesh, 1, axes), 1).reshape(shape)

        def piece(grad: Tensor) -> Tensor:
            rows_of_all = grad.reshape(rows, sharding.length, *inner)
            sharded = torch.cat([sharding.shard(rows_of_all, rank, 1) for rank in range(sharding.ranks)], 1)
            return scatter_sums(sharded, mesh, 1, axes).reshape(value.shape)

        pieces = ShardedOutput(what=name, mesh=mesh, axes=axes, shape=shape, whole=whole, piece=piece)
        if isinstance(value, LazyLogits):
            return value.finished(shape, lambda values: lazy_gather(values, pieces))
        return lazy_gather(value, pieces)


def _place_of_loss(output: Any) -> str | None:
    """Return the name of the loss in a model's output."""
    if isinstance(output, Tensor):
        return "output"
    if isinstance(output, tuple) and not hasattr(output, "_fields"):
        return "output[0]" if output and isinstance(output[0], Tensor) else None
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return "output.loss" if isinstance(loss, Tensor) else None
