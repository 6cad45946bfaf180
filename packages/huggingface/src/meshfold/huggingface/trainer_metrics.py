"""Arguments of a Trainer's ``compute_metrics``: predictions and labels of all rows, in the order of the dataset."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from transformers.trainer_pt_utils import EvalLoopContainer
from transformers.trainer_utils import EvalPrediction, denumpify_detensorize

from meshfold.engine import Engine
from meshfold.engine.batches import gather_list, row_range
from meshfold.mesh.model_io import IGNORE_INDEX


class Predictions:
    """Collector of an evaluation's predictions and labels over the data coordinates; all ranks must call every method."""

    def __init__(
        self,
        engine: Engine,
        rows: int,
        batch_rows: int,
        *,
        labels: Sequence[str],
        left_out: Sequence[str],
        preprocess: Callable[[Any, Any], Any] | None,
    ) -> None:
        """Args:
        engine: has the model.
        rows: of the dataset.
        batch_rows: of a global batch.
        labels: names of the fields that are labels.
        left_out: parts of the model's output that are no predictions.
        preprocess: returns the values to keep, given a batch's predictions and labels.
        """
        self._engine, self._rows, self._batch_rows = engine, rows, batch_rows
        self._label_names, self._left_out, self._preprocess = labels, {*left_out, "loss"}, preprocess
        self._predictions, self._labels = (EvalLoopContainer(padding_index=IGNORE_INDEX) for _ in range(2))
        self._inputs = EvalLoopContainer(padding_index=IGNORE_INDEX)
        self._number = 0

    def add(self, fields: Mapping[str, Any], inputs: Any = None) -> None:
        """Predict the next batch of the loader; ``inputs``: the parts of it that are passed to the metrics."""
        found = self._output(fields)
        labels = tuple(fields.get(name) for name in self._label_names)
        given: Any = None if any(label is None for label in labels) else labels[0] if len(labels) == 1 else labels
        if self._preprocess is not None:
            found = self._preprocess(found, given)
        for container, values in ((self._predictions, found), (self._labels, given), (self._inputs, inputs)):
            if values is not None:
                container.add(self._of_all(values))
        self._number += 1

    def metrics(self, compute: Callable[[EvalPrediction], Mapping[str, Any]]) -> dict[str, Any]:
        """Return the metrics that the user's function computes; none without predictions or labels."""
        predictions, labels = self._predictions.get_arrays(), self._labels.get_arrays()
        if predictions is None or labels is None:
            return {}
        given = EvalPrediction(predictions=predictions, label_ids=labels, inputs=self._inputs.get_arrays())
        return dict(denumpify_detensorize(compute(given)))

    def _output(self, fields: Mapping[str, Any]) -> Any:
        """Return the predictions in the model's output, selected as the Trainer does."""
        output = self._engine.predict(dict(fields))
        if isinstance(output, Mapping):
            parts = tuple(value for name, value in output.items() if name not in self._left_out)
        else:
            # A pipeline's output has its logits under this name.
            parts = tuple(output[1:]) if isinstance(output, tuple) else (getattr(output, "logits", output),)
        return parts[0] if len(parts) == 1 else parts

    def _of_all(self, values: Any) -> Any:
        """Return the tensors of the global batch, gathered over the data ranks in the order of the rows."""
        world = self._engine.world
        whole = min(self._batch_rows, self._rows - self._number * self._batch_rows)
        counts = [len(row_range(whole, index, world.row_size)) for index in range(world.row_size)]

        def of_all(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            parts = [
                part[:count].cpu()  # a rank without rows was given one that does not count
                for part, count in zip(gather_list(value.detach(), world), counts, strict=True)
                if count
            ]
            return torch.cat(_padded(parts))

        return tree_map(of_all, values)


def _padded(parts: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors padded to a common size in every dim but the first."""
    sizes = [max(part.shape[dim] for part in parts) for dim in range(1, parts[0].dim())]
    padded = []
    for part in parts:
        whole = part.new_full((part.shape[0], *sizes), IGNORE_INDEX)
        whole[tuple(slice(size) for size in part.shape)] = part
        padded.append(whole)
    return padded
