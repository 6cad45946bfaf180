"""Reward models: a number a completion, trained on preferences, read at the completion's last token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.align.engines import Model, trained_engine
from meshfold.align.log_probs import TokenValues
from meshfold.align.means import mean_of_sequences
from meshfold.align.objective import Objective, Terms
from meshfold.align.preference import reward_losses
from meshfold.align.records import Completion, Preference, check_examples
from meshfold.align.rows import CHOSEN, REJECTED, completion_rows, longest_of, pair_rows, shuffled
from meshfold.align.run import in_micro_steps
from meshfold.align.sharing import SharedPrompts
from meshfold.mesh import SpecError
from meshfold.mesh.model_io import IGNORE_INDEX


def scorer(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return a function that builds a model of ours, GPT or Llama, with a head of one output: a number a token.

    For a folder of transformers give ``pretrained(folder, model_class="AutoModelForTokenClassification", num_labels=1)`` instead.

    Args:
        build: makes the model.
    """

    def make() -> nn.Module:
        model: Any = build()
        head = getattr(model, "head", None)
        if not isinstance(head, nn.Linear):
            raise SpecError(
                f"{type(model).__name__} has no linear layer 'head' to put a head of one output in the place of"
            )
        parameter = head.weight
        model.head = nn.Linear(head.in_features, 1, bias=False, device=parameter.device, dtype=parameter.dtype)
        with torch.no_grad():
            model.head.weight.normal_(0.0, head.in_features**-0.5)
        made: nn.Module = model
        return made

    return make


class RewardModel:
    """Trains a model of scores on preferences (Bradley and Terry); then a reward function of tokens.

    Attributes:
        engines: by name.
        shared_prompt: whether pairs share their prompt, and how many tokens that has saved.
    """

    def __init__(
        self,
        model: Model,
        pairs: Sequence[Preference],
        *,
        centering: float = 0.0,
        shared_prompt: object = "auto",
        parallel: Mapping[str, object] | None = None,
        batch_size: int = 8,
        length: int | None = None,
        micro_steps: int = 1,
        start: str | None = None,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        """Args:
            model: returns a number a token, ``b s 1`` in ``.logits``: see :func:`scorer`.
            pairs: to be learned from; none for a model that is only to score.
            centering: of :func:`meshfold.align.reward_losses`.
            start: a checkpoint to take weights from: a reward model's; with pairs also a language model's, all but the head.
            shared_prompt, parallel, batch_size, length, micro_steps, seed, settings: as of :class:`meshfold.align.DPO`.

        Raises:
            SpecError: for a setting out of range.
        """
        check_examples("pairs", pairs, Preference, "preference_of")
        reward_losses(torch.zeros(1), torch.zeros(1), centering=centering)
        self._pairs, self._batch, self._length, self._centering = pairs, batch_size, length, centering
        self._micro_steps, self._seed = micro_steps, seed
        self.objective = Objective(self._terms, fields=("branch", "margin"), reads="scores")
        given = dict(micro_steps=micro_steps, start=start, seed=seed, new_head=bool(pairs), **settings)
        engine = trained_engine(self.objective, model, parallel or {}, **given)
        self.engines = dict(policy=engine)
        self.shared_prompt = SharedPrompts(shared_prompt, engine, "pair", longest=longest_of(pairs, length))

    def step(self, number: int) -> dict[str, float]:
        """Make a step; ``number`` counts from 0 and decides which pairs it is of. All ranks must call."""
        chosen = shuffled(len(self._pairs), number, self._batch, self._seed)
        pairs = [self._pairs[each] for each in chosen]
        shared = self.shared_prompt.shares([(pair.chosen, pair.rejected) for pair in pairs])
        batch = at_last_tokens(pair_rows(pairs, self._length, shared=shared))
        return self.objective.step(in_micro_steps(batch, self._micro_steps))

    def scores(self, completions: Sequence[Completion]) -> Tensor:
        """Return the score of each completion, ``n`` on the host; all ranks must call with the same."""
        rows = completion_rows(completions)
        last = torch.tensor([len(one.ids) - 1 for one in completions])
        found = self.objective.score(rows).log_probs.cpu()
        return found.gather(1, last[:, None])[:, 0]

    def close(self) -> None:
        """Release the engine."""
        self.objective.close()
        self.engines["policy"].close()

    def _terms(self, values: TokenValues, batch: Mapping[str, Any]) -> Terms:
        at, branch = batch["labels"] != IGNORE_INDEX, batch["branch"]
        chosen, rejected = (
            torch.where(at & (branch == one), values.log_probs, 0.0).sum(-1) for one in (CHOSEN, REJECTED)
        )
        pairs = at.any(-1)
        losses = reward_losses(chosen, rejected, batch["margin"].to(chosen), centering=self._centering)
        return Terms(
            loss=[mean_of_sequences(losses, pairs)],
            metrics=dict(
                accuracy=mean_of_sequences((chosen > rejected).to(chosen.dtype), pairs),
                margin=mean_of_sequences((chosen - rejected).detach(), pairs),
            ),
        )


def at_last_tokens(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return pairs in which only the last token of each completion counts."""
    labels = torch.full_like(batch["labels"], IGNORE_INDEX)
    places = torch.arange(labels.shape[1])
    for one in (CHOSEN, REJECTED):
        last = torch.where(batch["branch"] == one, places, -1).max(-1).values
        here = places == last[:, None]
        labels[here] = batch["input_ids"][here]
    return {**batch, "labels": labels}
