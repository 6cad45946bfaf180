"""Supervised fine-tuning on completions: documents packed into rows, the mean over the tokens that count in the global batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshfold.align.engines import Model, trained_engine
from meshfold.align.log_probs import TokenValues
from meshfold.align.means import mean_of_tokens
from meshfold.align.objective import Objective, Terms
from meshfold.align.records import Completion, check_examples
from meshfold.align.rows import pack, shuffled
from meshfold.align.run import in_micro_steps
from meshfold.mesh.model_io import IGNORE_INDEX


def _terms(values: TokenValues, batch: Mapping[str, Any]) -> Terms:
    counts = batch["labels"] != IGNORE_INDEX
    return Terms(
        loss=[mean_of_tokens(-values.log_probs, counts)],
        metrics=dict(token_probability=mean_of_tokens(values.log_probs.detach().exp(), counts)),
    )


class SFT:
    """Trains a model on completions.

    Attributes:
        engines: by name; checkpoints have a folder for each.
    """

    def __init__(
        self,
        model: Model,
        completions: Sequence[Completion],
        *,
        parallel: Mapping[str, object] | None = None,
        batch_size: int = 8,
        length: int = 1024,
        micro_steps: int = 1,
        start: str | None = None,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        """Args:
        model: a causal language model, as of :class:`meshfold.engine.Engine`.
        completions: to be learned.
        parallel: the spec.
        batch_size: completions of a step, on all ranks together.
        length: tokens of a packed row; longer completions are cut.
        micro_steps: parts that the rows of a step are run in, one after the other.
        start: a checkpoint to take weights from.
        seed: of the order of examples, and the engine's.
        settings: further ones of the engine: ``optimizer``, ``precision``, ``clip_grad_norm``, ...
        """
        check_examples("completions", completions, Completion, "completion_of")
        self._completions, self._batch, self._length = completions, batch_size, length
        self._micro_steps, self._seed = micro_steps, seed
        self.objective = Objective(_terms)
        given = {"kernels": dict(loss=True), "seed": seed, **settings}
        engine = trained_engine(self.objective, model, parallel or {}, micro_steps=micro_steps, start=start, **given)
        self.engines = dict(policy=engine)

    def step(self, number: int) -> dict[str, float]:
        """Make a step; ``number`` counts from 0 and decides which examples it is of. All ranks must call."""
        chosen = shuffled(len(self._completions), number, self._batch, self._seed)
        rows = pack([self._completions[each] for each in chosen], self._length)
        return self.objective.step(in_micro_steps(rows, self._micro_steps))

    def close(self) -> None:
        """Release the engine."""
        self.objective.close()
        self.engines["policy"].close()
