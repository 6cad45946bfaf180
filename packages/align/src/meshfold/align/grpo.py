"""Training on own samples without a critic: GRPO, Dr. GRPO, DAPO and RLOO.

A step, from top to bottom: sample a group of completions of each prompt, score them, compare each with its group, and train on
them. The kind of loss says which mean is taken. All ranks know all completions of the step, so every mean and deviation is
global.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from torch import Tensor

from meshfold.align.engines import Model
from meshfold.align.log_probs import TokenValues
from meshfold.align.means import (
    Mean,
    group_advantages,
    leave_one_out,
    mean_of_sequences,
    mean_of_token_means,
    mean_of_tokens,
    mean_over_length,
)
from meshfold.align.objective import Objective, Terms
from meshfold.align.policy import clipped_policy_losses, kl_penalties
from meshfold.align.policy_engines import PolicyEngines
from meshfold.align.records import Completion, Prompt, TextTokenizer, check_examples
from meshfold.align.reference import Reference
from meshfold.align.residency import WorkSize
from meshfold.align.rewards import Rewards
from meshfold.align.rollout import Correction, EngineRollouts, Rollout, sampling_until
from meshfold.align.rollout_ranks import parts_of
from meshfold.align.rows import completion_rows, group_rows, model_inputs, shuffled
from meshfold.align.run import in_micro_steps
from meshfold.align.sharing import SharedPrompts, unfolded
from meshfold.engine import Engine
from meshfold.inference import Sampling
from meshfold.mesh import SpecError, did_you_mean, key_of
from meshfold.mesh.model_io import IGNORE_INDEX

GRPO_KINDS = ("grpo", "dr_grpo", "dapo", "rloo")
"""Kinds of :class:`GRPO`"""


class GRPO:
    """Trains a policy on its own samples, by how much better each is than the others of its group.

    Attributes:
        engines: by name; checkpoints have a folder for each. None on ranks that only generate.
        reference: the frozen policy; None if ``beta`` is 0.
        parts: how ranks are divided.
        phases: of memory.
        shared_prompt: whether groups share their prompt in scoring and training, and how many tokens that has saved.
    """

    def __init__(
        self,
        model: Model,
        prompts: Sequence[Prompt],
        rewards: Sequence[Callable[..., Any]],
        tokenizer: TextTokenizer,
        *,
        kind: str = "grpo",
        group: int = 8,
        batch_size: int = 4,
        sampling: Sampling | None = None,
        updates: int = 1,
        low: float = 0.2,
        high: float | None = None,
        ratio_of: str = "token",
        scale: str | None = None,
        beta: float = 0.0,
        kl: str = "k3",
        unbiased_kl: bool = False,
        mask_truncated: bool = False,
        reward_weights: Sequence[float] | None = None,
        reference: str = "copy",
        rollout: Callable[[Engine], Rollout] | Mapping[str, Any] = EngineRollouts,
        importance: Mapping[str, Any] | None = None,
        max_staleness: int = 0,
        shared_prompt: object = "auto",
        memory: Mapping[str, Any] | None = None,
        parallel: Mapping[str, object] | None = None,
        micro_steps: int = 1,
        start: str | None = None,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        """Args:
            model: a causal language model, as of :class:`meshfold.engine.Engine`.
            prompts: to be completed.
            rewards: of :class:`meshfold.align.Rewards`.
            tokenizer: makes texts for the rewards; its ``end`` ends a completion.
            kind: ``"grpo"`` (mean over completions of their tokens' mean), ``"dr_grpo"`` (sum over a fixed length, no deviation),
                ``"dapo"`` (mean over tokens), ``"rloo"`` (against the mean of the others; the KL penalty is in the reward).
            group: completions of a prompt.
            batch_size: prompts of a step, on all ranks together.
            sampling: of the completions; the seed is the step's. None: temperature 1, 128 tokens.
            updates: optimizer steps that a step's completions are divided into.
            low, high, ratio_of: of :func:`meshfold.align.clipped_policy_losses`.
            scale: of :func:`meshfold.align.group_advantages`; None: ``"none"`` for dr_grpo, else ``"group"``.
            beta: factor of the KL penalty to the reference; 0: there is no reference.
            kl: of :func:`meshfold.align.kl_penalties`.
            unbiased_kl: multiply the penalty by the probability ratio of each token, whose gradient makes that of the KL divergence
                unbiased (DeepSeek-V3.2, arXiv 2512.02556; ``use_bias_correction_kl``, True by default in TRL 1.16). Not of rloo.
            mask_truncated: completions that did not end within their tokens do not count in the loss (DAPO).
            reward_weights: factor of each reward.
            memory: limits of a plan of phases, see :class:`meshfold.align.Phases`: ``dict(gpu="80GiB", host="120GiB")``.
            reference, parallel, micro_steps, start, seed, settings: as of :class:`meshfold.align.DPO`.
            rollout: makes the generator for the policy's engine; or ``dict(ranks=2, parallel=dict(tensor=2))``: so many of the
                job's ranks, the last ones, do nothing but generate, under a spec of their own, and get the policy's weights before
                each step, or every so many (``every``).
            importance: options of :func:`meshfold.align.importance_weights`, for a generator that is not ``exact``.
            max_staleness: most optimizer steps that such a generator's weights may be behind the policy's.
            shared_prompt: compute the prompt of a group once: True, False, or ``"auto"``: if the model can, where it saves time,
                and ``updates`` is 1. Losses and gradients are the same. ``micro_steps`` are then parts of groups.

        Raises:
            SpecError: for a setting out of range, or a model with dropout.
        """
        _check_settings(kind, group, batch_size, updates, beta, unbiased_kl=unbiased_kl)
        self._kind, self._group, self._batch, self._updates = kind, group, batch_size, updates
        self._scale = cast(Literal["group", "batch", "none"], scale or ("none" if kind == "dr_grpo" else "group"))
        self._clip: dict[str, Any] = dict(low=low, high=high, ratio_of=ratio_of)
        self._beta, self._kl, self._mask_truncated = beta, kl, mask_truncated
        self._unbiased_kl = unbiased_kl
        self._correction = Correction(importance, max_staleness=max_staleness)
        check_examples("prompts", prompts, Prompt, "prompt_of")
        one = torch.zeros(1, 1)
        clipped_policy_losses(one, one, one, one, **self._clip)  # checks the settings before anything starts
        kl_penalties(one, one, kl)  # type: ignore[arg-type]
        group_advantages(one[0], one[0].long(), 1, scale=self._scale)
        self._prompts, self._micro_steps, self._seed = prompts, micro_steps, seed
        self._sampling = sampling_until(tokenizer.end, sampling)
        temperature = self._sampling.temperature or 1.0
        self.parts = parts_of(
            rollout, model, parallel, dict(seed=seed, **settings), updates=updates, max_staleness=max_staleness
        )
        self.objective = Objective(
            self._terms,
            fields=("advantage", "old", "reference", "weights", "places"),
            temperature=temperature,
        )
        self.engines: dict[str, Engine] = {}
        self.reference: Reference | None = None
        with self.parts.training() as trains:
            if not trains:
                return
            self.rewards = Rewards(rewards, tokenizer, reward_weights)
            made = PolicyEngines(
                model,
                self.objective,
                parallel,
                reference=reference if beta else None,
                work=WorkSize.of_samples(
                    prompts,
                    completions=batch_size * group,
                    max_new_tokens=self._sampling.max_new_tokens,
                    updates=updates,
                    micro_steps=micro_steps,
                    samples=self.parts.samples,
                ),
                memory=memory,
                micro_steps=micro_steps,
                start=start,
                seed=seed,
                settings=settings,
                made=self.rewards.engines,
            )
            self.phases, self.engines = made.phases, dict(policy=made.policy)
            self.rollout = self.parts.generator(made.policy)
            longest = max((len(prompt.ids) for prompt in prompts), default=0) + self._sampling.max_new_tokens
            self.shared_prompt = SharedPrompts(shared_prompt, made.policy, "group", longest=longest)
            if updates > 1:
                self.shared_prompt.refuse("updates divide a group's completions among optimizer steps")
            elif micro_steps > batch_size:
                self.shared_prompt.refuse(f"micro_steps={micro_steps} divide {batch_size} groups")
            self.reference = made.reference(temperature)
            self.phases.take(**self.engines, **(self.reference.engines if self.reference else {}))
        # Then the policy that sampled is the one that is trained, every ratio is 1, and no scoring comes before the step.
        self._on_policy = updates == 1 and self.rollout.exact

    def step(self, number: int) -> dict[str, float]:
        """Sample, score and train; ``number`` counts from 0 and decides prompts and samples. All ranks must call."""
        return self.parts.run(self._step, number)

    def _step(self, number: int) -> dict[str, float]:
        chosen = [self._prompts[each] for each in shuffled(len(self._prompts), number, self._batch, self._seed)]
        sampling = replace(self._sampling, seed=key_of(f"step/{self._seed}/{number}"))
        if self.parts.samples:
            self.phases.enter("rollout")
        found = self.rollout.generate([prompt.ids for prompt in chosen], self._group, sampling)
        behind = self._correction.staleness(found, self.engines["policy"])
        self.phases.enter("score")
        of_each = [prompt for prompt in chosen for _ in range(self._group)]
        rewards = self.rewards(self.engines["policy"], of_each, found.tokens)
        groups = torch.arange(len(chosen)).repeat_interleave(self._group)

        ended = [bool(ids) and ids[-1] in sampling.stop_tokens for ids in found.tokens]
        counted = [not self._mask_truncated or end for end in ended]
        batch = self._rows(of_each, found.tokens, counted)
        alone = unfolded(_nothing(batch), batch)[1]  # a row for each completion
        batch["old"] = torch.zeros(alone["labels"].shape, dtype=torch.float64)
        batch["reference"], batch["weights"] = batch["old"], torch.ones_like(batch["old"])
        if not self._on_policy or self._kind == "rloo":
            batch["old"] = unfolded(self.objective.score(model_inputs(batch)), batch)[0].log_probs.cpu()
        if self.reference is not None:
            batch["reference"] = unfolded(self.reference.score(batch), batch)[0].log_probs.cpu()
        told: dict[str, float] = {}
        if not self.rollout.exact:
            sampled, mask = at_labels(alone, found.logprobs), alone["labels"] != IGNORE_INDEX
            batch["weights"], told = self._correction.weights(batch["old"], sampled, mask)
            told["stale"] = float(behind)
        batch["advantage"] = self._advantages(rewards, groups, len(chosen), {**batch, "labels": alone["labels"]})

        self.phases.enter("train policy")
        if "places" in batch:  # a row for each group
            for name in ("old", "reference", "weights", "advantage"):
                batch[name] = batch[name].unflatten(0, (len(chosen), self._group))
        order = torch.randperm(
            len(batch["labels"]), generator=torch.Generator().manual_seed(key_of(f"order/{self._seed}/{number}"))
        )
        steps = []
        for part in order.tensor_split(self._updates):
            rows = part.sort().values
            steps.append(self.objective.step(in_micro_steps(taken(batch, rows), self._micro_steps)))
        metrics = {name: sum(each[name] for each in steps) / len(steps) for name in steps[0]}
        known = ~rewards.isnan()
        return {
            **metrics,
            "reward": float(rewards[known].mean()) if known.any() else 0.0,
            "tokens": sum(map(len, found.tokens)) / len(found.tokens),
            "ended": sum(ended) / len(ended),
            **told,
        }

    def close(self) -> None:
        """Release the engines."""
        self.objective.close()
        for engine in self.engines.values():
            engine.close()
        if self.reference is not None:
            self.reference.close()
        self.parts.close()

    def _rows(
        self, prompts: Sequence[Prompt], tokens: Sequence[Sequence[int]], counted: Sequence[bool]
    ) -> dict[str, Tensor]:
        """Return a row for each completion, or for each group."""
        whole = whole_completions(prompts, tokens, counted)
        groups = [whole[first : first + self._group] for first in range(0, len(whole), self._group)]
        return group_rows(whole, self._group) if self.shared_prompt.shares(groups) else completion_rows(whole)

    def _advantages(self, rewards: Tensor, groups: Tensor, count: int, batch: Mapping[str, Tensor]) -> Tensor:
        if self._kind != "rloo":
            return group_advantages(rewards, groups, count, scale=self._scale)
        if self._beta:
            mask = batch["labels"] != IGNORE_INDEX
            rewards = rewards - self._beta * ((batch["old"] - batch["reference"]) * mask).sum(-1)
        return leave_one_out(rewards, groups, count)

    def _terms(self, values: TokenValues, batch: Mapping[str, Any]) -> Terms:
        values, batch = unfolded(values, batch)
        mask, logs = batch["labels"] != IGNORE_INDEX, values.log_probs
        old = logs.detach() if self._on_policy else batch["old"].to(logs)
        advantages = batch["advantage"].to(logs)[:, None].expand_as(logs)
        losses = clipped_policy_losses(logs, old, advantages, mask, **self._clip) * batch["weights"].to(logs)
        metrics = {}
        with torch.no_grad():
            ratio = (logs - old).exp()
            high = self._clip["low"] if self._clip["high"] is None else self._clip["high"]
            outside = (ratio < 1 - self._clip["low"]) | (ratio > 1 + high)
            metrics["clipped"] = mean_of_tokens(outside.to(logs.dtype), mask)
        if self._beta:
            penalty = kl_penalties(logs, batch["reference"].to(logs), self._kl)  # type: ignore[arg-type]  # checked
            metrics["kl"] = mean_of_tokens(penalty.detach(), mask)
            if self._kind != "rloo":
                losses = losses + self._beta * (penalty * (logs - old).exp() if self._unbiased_kl else penalty)
        return Terms(loss=[self._mean(losses, mask)], metrics=metrics)

    def _mean(self, losses: Tensor, mask: Tensor) -> Mean:
        if self._kind == "dapo":
            return mean_of_tokens(losses, mask)
        if self._kind == "dr_grpo":
            return mean_over_length(losses, mask, self._sampling.max_new_tokens)
        if self._kind == "rloo":
            return mean_of_sequences(torch.where(mask, losses, 0.0).sum(-1), mask.any(-1))
        return mean_of_token_means(losses, mask)


def whole_completions(
    prompts: Sequence[Prompt], tokens: Sequence[Sequence[int]], counted: Sequence[bool]
) -> list[Completion]:
    """Return prompts with their completions, whose tokens count if ``counted``."""
    return [
        Completion(ids=(*prompt.ids, *ids), counts=(False,) * len(prompt.ids) + (counts,) * len(ids))
        for prompt, ids, counts in zip(prompts, tokens, counted, strict=True)
    ]


def _nothing(batch: Mapping[str, Tensor]) -> TokenValues:
    return TokenValues(log_probs=torch.zeros(batch["labels"].shape))


def at_labels(batch: Mapping[str, Tensor], values: Sequence[Sequence[float]]) -> Tensor:
    """Return numbers of the tokens of completions at the places of their labels: ``n s``."""
    found = torch.zeros(batch["labels"].shape, dtype=torch.float64)
    for row, numbers in enumerate(values):
        places = (batch["labels"][row] != IGNORE_INDEX).nonzero().flatten()
        if len(places):
            found[row, places] = torch.tensor(numbers, dtype=torch.float64)
    return found


def taken(batch: Mapping[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    """Return some rows of a batch."""
    return {name: value[rows] for name, value in batch.items()}


def _check_settings(kind: str, group: int, batch_size: int, updates: int, beta: float, *, unbiased_kl: bool) -> None:
    """Refuse settings out of range, or that contradict each other; they are those of :class:`GRPO`."""
    if kind not in GRPO_KINDS:
        raise SpecError(f"kind={kind!r}: use {', '.join(map(repr, GRPO_KINDS))}.{did_you_mean(kind, GRPO_KINDS)}")
    if group < 2:
        raise SpecError(f"group={group}: completions of a prompt are compared with each other, so 2 or more")
    if unbiased_kl and kind == "rloo":
        raise SpecError("unbiased_kl=True with kind='rloo', whose KL penalty is in the reward: leave unbiased_kl out")
    if not beta >= 0:
        raise SpecError(f"beta={beta!r}: a factor from 0 up")
    if updates < 1 or batch_size * group % updates:
        raise SpecError(
            f"updates={updates} for {batch_size} prompts of {group} completions: optimizer steps of equally many; write a "
            f"divisor of {batch_size * group}"
        )
