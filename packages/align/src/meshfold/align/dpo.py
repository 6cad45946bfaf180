"""Training on preferences: DPO and its relatives on pairs, KTO on completions that are good or bad."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meshfold.align.engines import Model, trained_engine
from meshfold.align.log_probs import TokenValues
from meshfold.align.means import mean_of_sequences, mean_of_tokens
from meshfold.align.objective import Objective, Terms
from meshfold.align.policy_engines import PolicyEngines
from meshfold.align.preference import DPO_LOSSES, dpo_losses, kto_baseline, kto_losses, odds_ratio_losses, simpo_losses
from meshfold.align.records import Completion, Preference, check_examples
from meshfold.align.reference import copied, make_reference
from meshfold.align.residency import WorkSize
from meshfold.align.rows import CHOSEN, REJECTED, completion_rows, longest_of, pair_rows, shuffled
from meshfold.align.run import in_micro_steps
from meshfold.align.sharing import SharedPrompts
from meshfold.mesh import SpecError, did_you_mean
from meshfold.mesh.model_io import IGNORE_INDEX

_WITHOUT_REFERENCE = ("simpo", "orpo")


class DPO:
    """Trains a policy to prefer the chosen completion of each pair.

    Attributes:
        engines: by name; checkpoints have a folder for each. The reference is not among them: it does not change.
        phases: of memory.
        shared_prompt: whether pairs share their prompt, and how many tokens that has saved.
        reference: the frozen policy; None for losses without one.
    """

    def __init__(
        self,
        model: Model,
        pairs: Sequence[Preference],
        *,
        loss: str = "sigmoid",
        beta: float = 0.1,
        gamma: float = 1.0,
        label_smoothing: float = 0.0,
        reference: str = "copy",
        shared_prompt: object = "auto",
        memory: Mapping[str, Any] | None = None,
        parallel: Mapping[str, object] | None = None,
        batch_size: int = 8,
        length: int | None = None,
        micro_steps: int = 1,
        start: str | None = None,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        """Args:
            model: a causal language model, as of :class:`meshfold.engine.Engine`.
            pairs: to be learned from.
            loss: ``"sigmoid"``, ``"hinge"``, ``"ipo"``, ``"robust"`` (:func:`meshfold.align.dpo_losses`); or without a reference
                ``"simpo"`` and ``"orpo"``, whose odds ratio losses count ``beta`` times beside SFT on the chosen completions.
            beta: how strongly the policy is held to the reference; of SimPO the factor, of ORPO lambda.
            gamma: margin of SimPO.
            label_smoothing: share of wrong labels.
            reference: ``"copy"`` of the model as it is now, or ``"adapter"``: the model without its adapters.
            shared_prompt: compute the prompt of a pair once: True, False, or ``"auto"``: if the model can. Losses and
                gradients are the same.
            memory: limits of a plan of phases, see :class:`meshfold.align.Phases`: ``dict(gpu="80GiB", host="120GiB")``.
            parallel: the spec of policy and reference.
            batch_size: pairs of a step, on all ranks together.
            length: most tokens of a prompt with a completion; None: as they are.
            micro_steps: parts that the pairs of a step are run in, one after the other.
            start: a checkpoint to take weights from, for policy and reference.
            seed: of the order of pairs, and the engine's.
            settings: further ones of the engine: ``optimizer``, ``precision``, ...

        Raises:
            SpecError: for an unknown loss, a setting out of range, or a model with dropout.
        """
        check_examples("pairs", pairs, Preference, "preference_of")
        known = (*DPO_LOSSES, *_WITHOUT_REFERENCE)
        if loss not in known:
            raise SpecError(f"loss={loss!r}: use {', '.join(map(repr, known))}.{did_you_mean(loss, known)}")
        self._loss, self._beta, self._gamma, self._smoothing = loss, beta, gamma, label_smoothing
        nothing = torch.zeros(1)
        self._of_pairs(
            nothing, nothing, nothing, nothing, nothing, nothing
        )  # checks the settings before anything starts
        self._pairs, self._batch, self._length = pairs, batch_size, length
        self._micro_steps, self._seed = micro_steps, seed
        self.objective = Objective(self._terms, fields=("branch", "margin", "reference_chosen", "reference_rejected"))
        made = PolicyEngines(
            model,
            self.objective,
            parallel,
            reference=None if loss in _WITHOUT_REFERENCE else reference,
            work=WorkSize.of_pairs(pairs, length, batch_size=batch_size, micro_steps=micro_steps),
            memory=memory,
            micro_steps=micro_steps,
            start=start,
            seed=seed,
            settings=settings,
        )
        self.phases, self.engines = made.phases, dict(policy=made.policy)
        self.shared_prompt = SharedPrompts(shared_prompt, made.policy, "pair", longest=longest_of(pairs, length))
        self.reference = made.reference()
        self.phases.take(**self.engines, **(self.reference.engines if self.reference else {}))

    def step(self, number: int) -> dict[str, float]:
        """Make a step; ``number`` counts from 0 and decides which pairs it is of. All ranks must call."""
        chosen = shuffled(len(self._pairs), number, self._batch, self._seed)
        pairs = [self._pairs[each] for each in chosen]
        shared = self.shared_prompt.shares([(pair.chosen, pair.rejected) for pair in pairs])
        batch: dict[str, Any] = pair_rows(pairs, self._length, shared=shared)
        batch["reference_chosen"] = batch["reference_rejected"] = torch.zeros(len(chosen), dtype=torch.float64)
        if self.reference is not None:
            self.phases.enter("score")
            logs = self.reference.score(batch).log_probs.cpu()
            batch["reference_chosen"], batch["reference_rejected"] = _of_branches(logs, batch["branch"])
        self.phases.enter("train policy")
        return self.objective.step(in_micro_steps(batch, self._micro_steps))

    def close(self) -> None:
        """Release the engines."""
        self.objective.close()
        self.engines["policy"].close()
        if self.reference is not None:
            self.reference.close()

    def _terms(self, values: TokenValues, batch: Mapping[str, Any]) -> Terms:
        labels, branch = batch["labels"] != IGNORE_INDEX, batch["branch"]
        chosen, rejected = _of_branches(values.log_probs * labels, branch)
        long, short = (((branch == one) & labels).sum(-1) for one in (CHOSEN, REJECTED))
        pairs = (long + short) > 0
        reference = batch["reference_chosen"].to(chosen), batch["reference_rejected"].to(chosen)
        losses = self._of_pairs(chosen, rejected, *reference, long, short)
        terms = [mean_of_sequences(losses, pairs)]
        if self._loss == "orpo":
            terms = [terms[0].times(self._beta), mean_of_tokens(-values.log_probs, (branch == CHOSEN) & labels)]
        with torch.no_grad():
            gains = [self._beta * (now - before) for now, before in zip((chosen, rejected), reference, strict=True)]
            metrics = dict(
                accuracy=mean_of_sequences((gains[0] > gains[1]).to(chosen.dtype), pairs),
                chosen_reward=mean_of_sequences(gains[0], pairs),
                rejected_reward=mean_of_sequences(gains[1], pairs),
            )
        return Terms(loss=terms, metrics=metrics)

    def _of_pairs(
        self, chosen: Tensor, rejected: Tensor, of_chosen: Tensor, of_rejected: Tensor, long: Tensor, short: Tensor
    ) -> Tensor:
        """Return the losses of pairs, of summed log-probabilities and lengths."""
        if self._loss in _WITHOUT_REFERENCE:
            means = chosen / long.clamp(min=1), rejected / short.clamp(min=1)
            if self._loss == "orpo":
                return odds_ratio_losses(*means)
            return simpo_losses(*means, beta=self._beta, gamma=self._gamma, label_smoothing=self._smoothing)
        return dpo_losses(
            chosen,
            rejected,
            of_chosen,
            of_rejected,
            kind=self._loss,
            beta=self._beta,
            label_smoothing=self._smoothing,
            lengths=(long, short),
        )


class KTO:
    """Trains a policy on completions that are good or bad (:func:`meshfold.align.kto_losses`).

    The reference point is estimated on the prompts of the batch with the next example's completion, as in TRL.

    Attributes:
        engines: by name.
        reference: the frozen policy.
    """

    def __init__(
        self,
        model: Model,
        completions: Sequence[Completion],
        *,
        beta: float = 0.1,
        desirable_weight: float = 1.0,
        undesirable_weight: float = 1.0,
        reference: str = "copy",
        parallel: Mapping[str, object] | None = None,
        batch_size: int = 8,
        length: int | None = None,
        micro_steps: int = 1,
        start: str | None = None,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        """Args:
            model, reference, parallel, length, micro_steps, start, seed, settings: as of :class:`DPO`.
            completions: each of which says whether it is ``good``.
            beta, desirable_weight, undesirable_weight: as of :func:`meshfold.align.kto_losses`.
            batch_size: completions of a step, on all ranks together: 2 at least.

        Raises:
            SpecError: for completions without a label, a batch of 1, or a model with dropout.
        """
        check_examples("completions", completions, Completion, "completion_of")
        if any(one.good is None for one in completions):
            raise SpecError(
                "KTO needs to know of each completion whether it is good: give records with 'label': true or false"
            )
        if batch_size < 2:
            raise SpecError(f"batch_size={batch_size}: KTO compares with completions of other prompts, so 2 or more")
        self._beta, self._weights = beta, (desirable_weight, undesirable_weight)
        kto_losses(torch.zeros(1), torch.ones(1), beta=beta)
        self._completions, self._batch, self._length = completions, batch_size, length
        self._micro_steps, self._seed = micro_steps, seed
        self.objective = Objective(self._terms, fields=("good", "reference", "baseline"))
        given = {"kernels": dict(loss=True), "seed": seed, **settings}
        frozen, spec = copied(model), parallel or {}
        engine = trained_engine(
            self.objective, model, spec, micro_steps=micro_steps, start=start, dropout=False, **given
        )
        self.engines = dict(policy=engine)
        found = make_reference(reference, self.objective, engine, frozen, spec, start=start, settings=given)
        if found is None:
            raise SpecError("reference=None: KTO needs one, 'copy' or 'adapter'")
        self.reference = found

    def step(self, number: int) -> dict[str, float]:
        """Make a step; ``number`` counts from 0 and decides which completions it is of. All ranks must call."""
        chosen = [self._completions[each] for each in shuffled(len(self._completions), number, self._batch, self._seed)]
        batch: dict[str, Any] = completion_rows(chosen, self._length)
        batch["reference"] = self.reference.score(batch).log_probs.cpu().sum(-1)
        batch["good"] = torch.tensor([bool(one.good) for one in chosen])
        others = completion_rows(
            [_with_completion_of(a, b) for a, b in zip(chosen, [*chosen[1:], chosen[0]], strict=True)]
        )
        ratios = self.objective.score(others).log_probs.sum(-1) - self.reference.score(others).log_probs.sum(-1)
        batch["baseline"] = float(kto_baseline(ratios))  # of the whole batch on every rank
        return self.objective.step(in_micro_steps(batch, self._micro_steps))

    def close(self) -> None:
        """Release the engines."""
        self.objective.close()
        self.engines["policy"].close()
        self.reference.close()

    def _terms(self, values: TokenValues, batch: Mapping[str, Any]) -> Terms:
        labels = batch["labels"] != IGNORE_INDEX
        ratios = (values.log_probs * labels).sum(-1) - batch["reference"].to(values.log_probs)
        good, weights = batch["good"].to(ratios.device), self._weights
        losses = kto_losses(
            ratios, good, batch["baseline"], beta=self._beta, desirable_weight=weights[0], undesirable_weight=weights[1]
        )
        there, rewards = labels.any(-1), self._beta * ratios.detach()
        return Terms(
            loss=[mean_of_sequences(losses, there)],
            metrics=dict(
                good_reward=mean_of_sequences(rewards, there & good),
                bad_reward=mean_of_sequences(rewards, there & ~good),
            ),
        )


def _with_completion_of(one: Completion, other: Completion) -> Completion:
    """Return a prompt with the completion of another example."""
    told = other.ids[len(other.prompt) :]
    return Completion(ids=(*one.prompt, *told), counts=(False,) * len(one.prompt) + (True,) * len(told))


def _of_branches(log_probs: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed log-probabilities of the chosen and of the rejected completions: ``b s, b s -> b, b``."""
    return tuple((log_probs * (branch == one)).sum(-1) for one in (CHOSEN, REJECTED))  # type: ignore[return-value]
