"""Objectives: losses that an engine trains on, of log-probabilities or of scores, with the means of :mod:`meshfold.align.means`.

An engine runs a batch in parts: data ranks have some rows, stages of a pipeline see micro-batches of them, and an optimizer
step may have several micro-steps. It weights each part's loss by the part's share of the labels. :class:`Objective` turns that
into the mean that the loss asks for::

    engine's share of a part  =  labels of the part / labels of the micro-step
    loss of the part          =  sum of its items / items of the step  ·  labels of the micro-step / labels of the part

so that share times loss is the part's sum over the items of the whole step. The items of the step are counted beforehand, on the
global batch that every rank has: the terms are computed on zeros, for their counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshfold.align.log_probs import TokenLogProbs, TokenValues
from meshfold.align.means import Mean
from meshfold.align.rows import aligned
from meshfold.engine import Engine
from meshfold.engine.batches import row_range
from meshfold.mesh import SpecError, all_reduce
from meshfold.mesh.model_io import IGNORE_INDEX

_COUNTED = "counted_labels"

GlobalBatch = Mapping[str, Any]
"""A batch of all data ranks, the same on every rank: ``input_ids`` and ``labels`` (-100 where none counts) ``b s``, whatever else
the model takes, and what the objective reads: tensors whose first dim is the rows."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """A loss of some rows, in parts.

    Attributes:
        loss: its terms; the loss is the sum of their means.
        metrics: means to be reported, by name.
    """

    loss: Sequence[Mean]
    metrics: Mapping[str, Mean] = field(default_factory=dict)


class Objective:
    """A ``loss_fn`` of an engine that is a mean over the global batch of each of its terms.

    >>> objective = Objective(terms, fields=("reference",))                                   # doctest: +SKIP
    >>> engine = Engine(model, parallel=..., loss_fn=objective, kernels=dict(loss=True))      # doctest: +SKIP
    >>> objective.attach(engine)                                                              # doctest: +SKIP
    >>> numbers = objective.step([batch])                                                     # doctest: +SKIP

    Attributes:
        batch_fields: the entries of a batch that the model is not called with.
    """

    def __init__(
        self,
        terms: Callable[[TokenValues, Mapping[str, Any]], Terms],
        *,
        fields: Sequence[str] = (),
        temperature: float = 1.0,
        entropy: bool = False,
        reads: str = "log_probs",
    ) -> None:
        """Args:
            terms: the loss of rows, of what the model says of their tokens and of the batch.
            fields: entries of the batch that ``terms`` alone reads.
            temperature: divides logits.
            entropy: find entropies too.
            reads: ``"log_probs"`` of labels; or ``"scores"``: the model's output is a number a token, ``b s 1``, which takes the
                place of ``log_probs``.

        Raises:
            SpecError: for a temperature that is not above 0, or another ``reads``.
        """
        if not temperature > 0:
            raise SpecError(f"temperature={temperature!r}: a number above 0, which divides the logits")
        if reads not in ("log_probs", "scores"):
            raise SpecError(f"reads={reads!r}: use 'log_probs' or 'scores'")
        self._terms, self._temperature, self._entropy = terms, temperature, entropy
        self._scores = reads == "scores"
        # The model computes no loss of its own from labels: a score has none.
        self.batch_fields = (*fields, _COUNTED, "labels") if self._scores else (*fields, _COUNTED)
        self._engine: Engine | None = None
        self._values: TokenLogProbs | None = None
        self._items: Terms | None = None  # of the step, by their counts
        self._share = 1.0  # labels of the micro-step times micro-steps
        self._metrics: dict[str, Tensor] = {}
        self._kept: list[TokenValues] | None = None  # rows that are scored, not trained on

    def attach(self, engine: Engine) -> None:
        """Take the place of the loss of an engine's model.

        Raises:
            SpecError: if the engine has another ``loss_fn``, or its model no loss.
        """
        if not self._scores:
            self._values = TokenLogProbs(engine, temperature=self._temperature, entropy=self._entropy)
        self._engine = engine

    def close(self) -> None:
        """Give the model its own loss back."""
        if self._values is not None:
            self._values.close()
        self._engine = self._values = None

    # -- called by the engine ---------------------------------------------------------------------------------------

    def __call__(self, output: Any, batch: Mapping[str, Any]) -> Tensor:
        """Return the loss of some rows, so that the engine's weights make it a part of the global mean."""
        labels: Tensor = batch["labels"]
        values = self._of(output, labels)
        # The engine puts a target into a part that has none, for losses that would divide by 0.
        batch = {**batch, "labels": labels.masked_fill(~batch[_COUNTED], IGNORE_INDEX)}
        if self._kept is not None:
            self._kept.append(values)
            return values.log_probs.new_zeros(())
        if self._items is None:
            raise SpecError("an objective is trained by objective.step(batches), which counts what its means are over")
        found = self._terms(values, batch)
        total = values.log_probs.new_zeros((), dtype=torch.float64)
        for term, of_step in zip(found.loss, self._items.loss, strict=True):
            total = total + term.weight * term.total.double() / of_step.count.clamp(min=1).to(total.device)
        for name, mean in found.metrics.items():
            before = self._metrics.get(name)
            now = mean.total.detach().double()
            self._metrics[name] = now if before is None else before + now
        return total * self._share / (labels != IGNORE_INDEX).sum().clamp(min=1)

    def _of(self, output: Any, labels: Tensor) -> TokenValues:
        if not self._scores:
            assert self._values is not None, "attach(engine) comes before"
            return self._values.take(labels)
        scores: Tensor = getattr(output, "logits", output)
        if scores.shape != (*labels.shape, 1):
            raise SpecError(
                f"a model of scores returned {list(scores.shape)} for tokens {list(labels.shape)}: a number a token, "
                f"{[*labels.shape, 1]}, as of a head of one output"
            )
        wide = scores[..., 0]
        return TokenValues(log_probs=wide if wide.dtype == torch.float64 else wide.float())

    # -- called by trainers -----------------------------------------------------------------------------------------

    def step(self, batches: Sequence[GlobalBatch]) -> dict[str, float]:
        """Train on global batches, a micro-step each; the engine's ``gradient_accumulation`` is their number. All ranks must call.

        Returns:
            The loss and the metrics, over all of them: the same on every rank.
        """
        engine = self._attached()
        if self._values is not None:
            self._values.forget()
        batches = [self._filled(batch) for batch in batches]
        counted = [self._on_zeros(batch) for batch in batches]
        self._items = _added(counted)
        self._metrics = {}
        loss = 0.0
        for batch in batches:
            labels = int((batch["labels"] != IGNORE_INDEX).sum())
            self._share = float(labels * len(batches))
            part = engine.train_step(engine.shard_batch(batch))
            loss += 0.0 if labels == 0 else part / len(batches)
        return {"loss": loss, **self._summed(self._items)}

    def score(self, batch: GlobalBatch) -> TokenValues:
        """Return the model's results for the tokens of a global batch, without gradients and dropout; all ranks must call.

        Returns:
            ``b s`` of all rows, the same on every rank, on the device.
        """
        engine = self._attached()
        if self._values is not None:
            self._values.forget()
        world = engine.world
        wanted, length = batch["labels"].shape
        batch = self._filled(batch)
        rows = len(batch["labels"])
        mine = engine.shard_batch(batch)
        self._kept = []
        try:
            engine.eval_loss(mine)
            kept = self._kept
        finally:
            self._kept = None
        kinds = 2 if self._entropy else 1
        # Each rank of the last stage has its data coordinate's rows, whole: they are put at their places and added up.
        table = torch.zeros(kinds, rows, length, dtype=torch.float64, device=engine.device)
        if kept:
            values = torch.cat([torch.stack([v for v in (k.log_probs, k.entropy) if v is not None]) for k in kept], 1)
            here = row_range(rows, world.row_index, world.row_size)
            # A pipeline repeats some rows.
            table[:, here.start : here.stop, : values.shape[2]] = values[:, : len(here)].double()
        table = all_reduce(table, world.everyone)[:, :wanted] / _copies(engine)
        return TokenValues(log_probs=table[0], entropy=table[1] if self._entropy else None)

    def _attached(self) -> Engine:
        if self._engine is None:
            raise SpecError("this objective has no engine: call objective.attach(engine) first")
        return self._engine

    def _filled(self, batch: GlobalBatch) -> dict[str, Any]:
        """Return a batch that says which labels count, with a row at least for each data coordinate: further ones do not count.

        Rows are cut behind the last label that counts, to a length for which attention is fast. A causal model's tokens do not
        see what comes after them.
        """
        labels: Tensor = batch["labels"]
        rows, more = len(labels), max(0, self._attached().world.row_size - len(labels))
        counts = (labels != IGNORE_INDEX).any(0).nonzero()
        stop = max(2, int(counts.max()) + 1) if len(counts) else 2
        stop = aligned(stop) if "position_ids" in batch else stop
        batch = {
            name: value[:, :stop] if isinstance(value, Tensor) and value.shape[:2] == labels.shape else value
            for name, value in batch.items()
        }
        filled = {
            name: torch.cat([value, value[:1].expand(more, *value.shape[1:])])
            if more and isinstance(value, Tensor) and value.dim() and len(value) == rows
            else value
            for name, value in batch.items()
        }
        filled["labels"] = filled["labels"].clone()
        filled["labels"][rows:] = IGNORE_INDEX
        return {**filled, _COUNTED: filled["labels"] != IGNORE_INDEX}

    def _on_zeros(self, batch: GlobalBatch) -> Terms:
        """Return the terms of a global batch for values of 0, of which only the counts say something."""
        zeros = torch.zeros(batch["labels"].shape, dtype=torch.float64)
        return self._terms(TokenValues(log_probs=zeros, entropy=zeros if self._entropy else None), batch)

    def _summed(self, items: Terms) -> dict[str, float]:
        """Return the metrics of the step, over all ranks."""
        engine = self._attached()
        names = sorted(items.metrics)
        if not names:
            return {}
        zero = torch.zeros((), dtype=torch.float64, device=engine.device)
        sums = torch.stack([self._metrics.get(name, zero).to(engine.device) for name in names])
        sums = all_reduce(sums, engine.world.everyone) / _copies(engine)
        counts = [max(float(items.metrics[name].count), 1.0) for name in names]
        weights = [items.metrics[name].weight for name in names]
        return {
            name: weight * total / count
            for name, total, count, weight in zip(names, sums.tolist(), counts, weights, strict=True)
        }


def _copies(engine: Engine) -> int:
    """Return how many ranks have the same rows in the last stage."""
    world = engine.world
    stages = world.pipe_group.size if world.pipelined else 1
    return int(engine.mesh.world_size // (world.row_size * stages))


def _added(counted: Sequence[Terms]) -> Terms:
    """Return the terms of several batches, with their counts added up."""
    first = counted[0]

    def summed(means: Sequence[Mean]) -> Mean:
        return Mean(
            total=means[0].total,
            count=torch.stack([mean.count for mean in means]).sum(),
            over=means[0].over,
            weight=means[0].weight,
        )

    return Terms(
        loss=[summed([each.loss[place] for each in counted]) for place in range(len(first.loss))],
        metrics={name: summed([each.metrics[name] for each in counted]) for name in first.metrics},
    )
