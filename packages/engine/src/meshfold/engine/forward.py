"""Calls of an engine's model: a batch in, its mean loss out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from meshfold.engine.batches import batch as batches
from meshfold.engine.batches.branches import BranchMask
from meshfold.engine.batches.given_rows import GivenRows
from meshfold.engine.batches.loss import LossCalls, fields_of, leave_out_targets
from meshfold.engine.batches.observed_mean import check_rows_apart, observed_mean
from meshfold.engine.batches.packed import OwnDocuments
from meshfold.engine.batches.parameter_reads import ParameterReads
from meshfold.engine.batches.sharding import Shares
from meshfold.engine.batches.shown import called, explain_failure, rows_of_tables
from meshfold.engine.batches.weight_gradients import WeightGradients
from meshfold.engine.model.checks import KnownParameters
from meshfold.engine.model.mask_choice import makes_masks, positions_of_the_model
from meshfold.engine.model.pipelined_model import PipelinedModel
from meshfold.engine.precision import Precision
from meshfold.engine.states.protocols import States
from meshfold.engine.world import World
from meshfold.kernels.fuse import DeferredLogits
from meshfold.mesh import SpecError
from meshfold.mesh.model_io import IGNORE_INDEX, LABEL_NAMES, LossMean, eval_mode, is_encoder_decoder, loss_mean
from meshfold.mesh.tracking import uncompiled


class Counted(Protocol):
    """Number of targets that a loss is the mean of; :class:`meshfold.engine.batches.sharding.Shares` has it."""

    @property
    def count(self) -> Tensor:
        """A scalar int64 on the device."""

    def recount(self, mean: LossMean, ignored: int) -> None:
        """Count again, what the loss is a mean over."""


class Forward:
    """Calls of a model on this data coordinate's batches.

    Attributes:
        rows: cuts global batches, and notices data ranks that are all given the same rows.
    """

    def __init__(
        self,
        model: nn.Module,
        world: World,
        precision: Precision,
        states: States,
        *,
        pipelined: PipelinedModel | None,
        loss_fn: Callable[[Any, Any], Tensor] | None,
        logits: DeferredLogits | None = None,
        weight_gradients: WeightGradients,
    ) -> None:
        """Args:
        model: this rank's part.
        world: its ranks.
        precision: of floating inputs.
        states: the model's, which may explain why a forward failed.
        pipelined: runs a model in stages.
        loss_fn: the user's own; None: the loss is in the model's output.
        logits: deferred logits that only the loss reads; None: all logits are computed.
        weight_gradients: warns of losses that are computed with them.
        """
        self._weight_gradients = weight_gradients
        self._model, self._world, self._precision, self._states = model, world, precision, states
        self._pipelined, self._loss_fn, self._logits = pipelined, loss_fn, logits
        self._mean = loss_mean(model) if loss_fn is None else LossMean.LABELS
        self._aligned = not is_encoder_decoder(model)
        self._takes_cache = batches.takes_cache(model)
        self._makes_masks = makes_masks(model)
        self._names_taken, self._ids_by_name = batches.names_taken(model), batches.takes_ids_by_name(model)
        self._ignores_labels = batches.ignores_labels(model)
        self._ignored = IGNORE_INDEX
        self._parameters_known, self._reads = KnownParameters(model), ParameterReads()
        # Determined once: a loss always averages over the same things.
        self._looks = world.data_size > 1
        self.rows = GivenRows(world)
        self._documents, self._branches = OwnDocuments(model, own_loss=loss_fn is not None), BranchMask(model)

    @property
    def shifts_labels(self) -> bool:
        """True if the model predicts each label from the tokens before it, so that the first of a row does not count."""
        return self._mean is LossMean.NEXT_TOKENS

    def train(self, work: batches.Batch, *, complete: bool = True) -> None:
        """Call ``model.train()`` if the model is in eval mode; submodules that the user put in eval mode stay in it.

        Args:
            work: the batch to train on; the first one is compared with those of other data ranks.
            complete: it has targets too, or the model needs none; else it has inputs alone.

        Raises:
            TrainingError: for a parameter that the engine was not made to train.
            SpecError: if all data ranks have the same complete batch.
        """
        if torch.is_grad_enabled():
            self.rows.check(work, complete=complete)
        self._parameters_known.check()
        if not self._model.training:
            self._model.train()

    # -- before a call ----------------------------------------------------------------------------------------------

    def prepare(self, batch: Any) -> batches.Batch:
        """Return the user's batch as the model is called with it, checked and on the device.

        Raises:
            SpecError: for a batch the model cannot be called with.
        """
        own_loss = self._loss_fn is not None
        batch = self._documents.settle(batch)
        work = batches.prepare_batch(
            batch,
            self._world.device,
            self._precision.dtype,
            own_loss=own_loss,
            aligned=self._aligned,
            kept=fields_of(self._loss_fn) or (),
            ids_by_name=self._ids_by_name,
        )
        if self._ignores_labels and isinstance(batch, Mapping) and "labels" not in batch and "labels" in work.kwargs:
            # Made of the token ids, for a model that has targets of other names, or none.
            kwargs = {name: value for name, value in work.kwargs.items() if name != "labels"}
            work = replace(work, kwargs=kwargs, targets=None)
        if self._takes_cache:
            work.kwargs.setdefault("use_cache", False)
        work = self._branches.add(batch, work, self._precision.dtype)
        work = replace(work, kwargs=leave_out_targets(work.kwargs, self._model, self._loss_fn))
        batches.check_fields(work, self._model, self._names_taken, own_loss=own_loss)
        return work

    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> batches.Batch:
        """Bring the arguments of a direct call of the model to the device."""
        return batches.inputs(args, kwargs, self._world.device, self._precision.dtype)

    def shares(self, work: batches.Batch, *, places: bool = True) -> Shares:
        """Return the batch's weight in the global one, and the position of its rows there; all data ranks must call.

        Args:
            work: from :meth:`prepare` or :meth:`inputs`.
            places: whether positions are needed, as by dropout; computing them waits for the device.
        """
        places = places and self._world.device.type != "meta"
        return Shares(work, self._world, mean=self._mean, places=places, ignored=self._ignored)

    # -- calls ------------------------------------------------------------------------------------------------------

    def output(self, work: batches.Batch) -> Any:
        """Return the model's output."""
        # Positions may be among further arguments without names.
        own_positions = self._makes_masks and len(work.args) < 2 and work.kwargs.get("position_ids") is None
        try:
            with positions_of_the_model() if own_positions else nullcontext():
                return self._model(*work.args, **work.kwargs)
        except Exception as error:
            if isinstance(error, RuntimeError):
                explain_failure(error, self._states)
            error.add_note(f"the model was called with {called(work.args, work.kwargs)}")
            if isinstance(error, IndexError) and (note := rows_of_tables(self._model, work.args, work.kwargs)):
                error.add_note(note)
            raise

    def output_with_loss(self, work: batches.Batch) -> Any:
        """Return the model's output for a user's own loop.

        If the model computes its own loss, logits are computed only if they are read, before :meth:`weights_change`.
        """
        if self._logits is None or not any(work.kwargs.get(name) is not None for name in LABEL_NAMES):
            return self.output(work)
        with self._logits.waiting(until_expired=True):
            return self.output(work)

    def weights_change(self) -> None:
        """Expire deferred logits: reading them now raises, since they would be computed with other weights."""
        if self._logits is not None:
            self._logits.expire()

    def loss_of(self, output: Any, work: batches.Batch) -> Tensor:
        """Return the scalar loss from the model's output, or from ``loss_fn``.

        Raises:
            SpecError: if there is none.
        """
        with self._reads.in_first_call():
            return batches.loss_of(output, work, self._loss_fn)

    def loss(self, work: batches.Batch, shares: Counted) -> Tensor:
        """Return this data coordinate's mean loss in float64; 0 if no target counts here.

        Raises:
            SpecError: if there is none, or one that does not depend on trained parameters.
        """
        # If nothing counts, the mean is 0/0 and so may be its gradient: keep both out.
        work = work.countable(shares.count)
        loss = self._loss(work, shares).double()
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise SpecError(
                "the loss depends on no trained parameter: compute it from the model's output, without .detach(), .data or "
                "torch.no_grad()"
            )
        self._weight_gradients.check(loss)
        return torch.where(shares.count > 0, loss, 0.0)

    def _loss(self, work: batches.Batch, shares: Counted) -> Tensor:
        """Return the loss; if only the loss reads the logits, they are never materialised in full."""
        with nullcontext() if self._logits is None else self._logits.waiting():
            return self._loss_looked_at(work, shares)

    def observed_step(self) -> AbstractContextManager[object]:
        """Return the context manager around forward and backward of a micro-step.

        The first forward runs eagerly, so its backward must recompute eagerly what a model checkpoints.
        """
        return uncompiled() if self._looks else nullcontext()

    def _loss_looked_at(self, work: batches.Batch, shares: Counted) -> Tensor:
        """Return the loss, and observe its cross-entropy calls in the first forward."""
        if not self._looks:
            return self.loss_of(self.output(work), work)
        exact = self._world.data_size == self._world.row_size
        with LossCalls(parts="data ranks", exact=exact) as calls:
            output = self.output(work)
            loss = self.loss_of(output, work)
        self._looks = calls.ignored != IGNORE_INDEX  # then filler rows need their own targets
        if calls.ignored != self._ignored:
            self._ignored = calls.ignored
            shares.recount(self._mean, calls.ignored)
        elif exact and self._ignored == IGNORE_INDEX and self._loss_fn is None:
            self._settle_mean(calls, output, work, shares)
        return loss

    def _settle_mean(self, calls: LossCalls, output: Any, work: batches.Batch, shares: Counted) -> None:
        """Weight ranks by what the model's own loss is a mean over, once that was observed."""
        name = type(self._model).__name__
        check_rows_apart(calls, output, work, self._world, name)
        mean = observed_mean(calls, work, self._world, mean=self._mean, name=name)
        if mean is not self._mean:
            self._mean = mean
            shares.recount(mean, self._ignored)

    def assess(self, work: batches.Batch, shares: Shares) -> Tensor:
        """Return :meth:`loss` in eval mode without gradients, also for a model in stages."""
        with eval_mode(self._model), torch.no_grad():
            return self.loss(work, shares) if self._pipelined is None else self._pipelined.assess(work)

    def check_loss(self, loss: object) -> None:
        """Check that backward can start from the loss of a user's own loop.

        Raises:
            SpecError: for anything but a scalar that depends on parameters.
            LayoutError: if it was computed with parts of parameters.
        """
        _check_scalar(loss)
        assert isinstance(loss, Tensor)  # checked above
        self._weight_gradients.check(loss)
        if self._world.mode is not None:
            self._reads.check_graph(loss)


def _check_scalar(loss: object) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        raise SpecError(f"backward({what}): give a tensor of one element that was computed from the model's parameters")
