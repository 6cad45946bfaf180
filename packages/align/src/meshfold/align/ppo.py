"""PPO: a policy and a critic, trained on the policy's own samples; the KL penalty to the reference is in the reward.

A step, from top to bottom: sample completions, score them, estimate the advantage of every token from the critic's values, and
train policy and critic on parts of them for some epochs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from meshfold.align.engines import Model, trained_engine
from meshfold.align.grpo import at_labels, taken, whole_completions
from meshfold.align.log_probs import TokenValues
from meshfold.align.means import mean_of_tokens, whiten
from meshfold.align.objective import Objective, Terms
from meshfold.align.policy import clipped_policy_losses, clipped_value_losses, gae, kl_penalties, rewards_of_tokens
from meshfold.align.policy_engines import PolicyEngines
from meshfold.align.records import Prompt, TextTokenizer, check_examples
from meshfold.align.residency import WorkSize
from meshfold.align.rewards import Rewards
from meshfold.align.rollout import Correction, EngineRollouts, Rollout, sampling_until
from meshfold.align.rollout_ranks import parts_of
from meshfold.align.rows import completion_rows, model_inputs, shuffled
from meshfold.align.run import in_micro_steps, run_checkpoint
from meshfold.engine import Engine
from meshfold.inference import Sampling
from meshfold.mesh import SpecError, key_of
from meshfold.mesh.model_io import IGNORE_INDEX


class PPO:
    """Trains a policy on its own samples with a critic (arXiv 1707.06347, 2203.02155).

    Attributes:
        engines: ``policy`` and ``critic``; checkpoints have a folder for each. None on ranks that only generate.
        reference: the frozen policy.
        parts: how ranks are divided.
        phases: of memory.
    """

    def __init__(
        self,
        model: Model,
        critic: Model,
        prompts: Sequence[Prompt],
        rewards: Sequence[Callable[..., Any]],
        tokenizer: TextTokenizer,
        *,
        batch_size: int = 16,
        sampling: Sampling | None = None,
        epochs: int = 2,
        updates: int = 1,
        low: float = 0.2,
        high: float | None = None,
        dual: float | None = None,
        value_clip: float | None = 0.2,
        gamma: float = 1.0,
        lam: float = 0.95,
        beta: float = 0.05,
        kl: str = "k1",
        reward_weights: Sequence[float] | None = None,
        reference: str = "copy",
        rollout: Callable[[Engine], Rollout] | Mapping[str, Any] = EngineRollouts,
        importance: Mapping[str, Any] | None = None,
        max_staleness: int = 0,
        memory: Mapping[str, Any] | None = None,
        parallel: Mapping[str, object] | None = None,
        micro_steps: int = 1,
        start: str | None = None,
        critic_start: str | None = None,
        critic_optimizer: Any = None,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        """Args:
            model: the policy, a causal language model, as of :class:`meshfold.engine.Engine`.
            critic: returns a number a token, as a reward model does: see :func:`meshfold.align.scorer`.
            prompts, rewards, tokenizer, sampling, reward_weights: as of :class:`meshfold.align.GRPO`.
            batch_size: completions of a step, one a prompt, on all ranks together.
            epochs: times that a step's completions are trained on.
            updates: optimizer steps of an epoch.
            low, high, dual: of :func:`meshfold.align.clipped_policy_losses`.
            value_clip: of :func:`meshfold.align.clipped_value_losses`.
            gamma, lam: of :func:`meshfold.align.gae`.
            beta: factor of the KL penalty in the reward of each token.
            kl: of :func:`meshfold.align.kl_penalties`.
            rollout, importance, max_staleness, memory: as of :class:`meshfold.align.GRPO`; weights are those of the policy's
                losses.
            reference, parallel, micro_steps, seed, settings: as of :class:`meshfold.align.DPO`; the spec is of all models.
            start, critic_start: checkpoints or folders of runs to take weights from; a reward model's or a run of PPO's critic for
                the critic, or a policy's without its head.
            critic_optimizer: of the critic; None: as the policy's.

        Raises:
            SpecError: for a setting out of range, or a model with dropout.
        """
        if epochs < 1 or updates < 1 or batch_size % updates:
            raise SpecError(
                f"epochs={epochs}, updates={updates} for {batch_size} completions: 1 or more epochs, and optimizer steps of "
                f"equally many completions; write a divisor of {batch_size}"
            )
        self._clip: dict[str, Any] = dict(low=low, high=high, dual=dual)
        self._value_clip, self._gae = value_clip, dict(gamma=gamma, lam=lam)
        self._beta, self._kl = beta, kl
        self._correction = Correction(importance, max_staleness=max_staleness)
        check_examples("prompts", prompts, Prompt, "prompt_of")
        one = torch.zeros(1, 1)  # checks the settings before anything starts
        clipped_policy_losses(one, one, one, one, **self._clip)
        clipped_value_losses(one, one, one, value_clip)
        gae(one, one, one, **self._gae)
        kl_penalties(one, one, kl)  # type: ignore[arg-type]
        self._prompts, self._batch, self._epochs, self._updates = prompts, batch_size, epochs, updates
        self._micro_steps, self._seed = micro_steps, seed
        self._sampling = sampling_until(tokenizer.end, sampling)
        temperature = self._sampling.temperature or 1.0
        self.parts = parts_of(
            rollout, model, parallel, dict(seed=seed, **settings), updates=updates * epochs, max_staleness=max_staleness
        )
        self.objective = Objective(self._policy_terms, fields=("old", "advantages", "weights"), temperature=temperature)
        self.values = Objective(self._value_terms, fields=("old_values", "returns"), reads="scores")
        self.engines: dict[str, Engine] = {}
        with self.parts.training() as trains:
            if not trains:
                return
            self.rewards = Rewards(rewards, tokenizer, reward_weights)
            made = PolicyEngines(
                model,
                self.objective,
                parallel,
                reference=reference,
                work=WorkSize.of_samples(
                    prompts,
                    completions=batch_size,
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
                critic=critic,
                made=self.rewards.engines,
            )
            self.phases = made.phases
            of_critic = {name: value for name, value in made.settings.items() if name != "kernels"}
            if critic_optimizer is not None:
                of_critic["optimizer"] = critic_optimizer
            judge = trained_engine(
                self.values,
                critic,
                self.phases.spec("critic"),
                micro_steps=micro_steps,
                start=critic_start and (run_checkpoint(critic_start, "critic") or critic_start),
                new_head=True,
                **of_critic,
            )
            self.engines = dict(policy=made.policy, critic=judge)
            self.rollout = self.parts.generator(made.policy)
            found = made.reference(temperature)
            if found is None:
                raise SpecError("reference=None: PPO holds the policy to one, 'copy' or 'adapter'")
            self.reference = found
            self.phases.take(**self.engines, **found.engines)

    def step(self, number: int) -> dict[str, float]:
        """Sample, score and train; ``number`` counts from 0 and decides prompts and samples. All ranks must call."""
        return self.parts.run(self._step, number)

    def _step(self, number: int) -> dict[str, float]:
        chosen = [self._prompts[each] for each in shuffled(len(self._prompts), number, self._batch, self._seed)]
        sampling = replace(self._sampling, seed=key_of(f"step/{self._seed}/{number}"))
        if self.parts.samples:
            self.phases.enter("rollout")
        found = self.rollout.generate([prompt.ids for prompt in chosen], 1, sampling)
        behind = self._correction.staleness(found, self.engines["policy"])
        self.phases.enter("score")
        scores = self.rewards(self.engines["policy"], chosen, found.tokens)
        batch = completion_rows(whole_completions(chosen, found.tokens, [True] * len(chosen)))
        mask = batch["labels"] != IGNORE_INDEX

        seen = model_inputs(batch)
        batch["old"] = self.objective.score(seen).log_probs.cpu()
        batch["weights"] = torch.ones_like(batch["old"])
        told: dict[str, float] = {}
        if not self.rollout.exact:
            sampled = at_labels(batch, found.logprobs)
            batch["weights"], told = self._correction.weights(batch["old"], sampled, mask)
            told["stale"] = float(behind)
        reference = self.reference.score(seen).log_probs.cpu()
        batch["old_values"] = torch.where(mask, _before(self.values.score(seen).log_probs.cpu()), 0.0)
        penalty = kl_penalties(batch["old"], reference, self._kl)  # type: ignore[arg-type]  # checked
        rewards = rewards_of_tokens(scores.nan_to_num(), penalty, mask, self._beta)
        advantages, batch["returns"] = gae(rewards, batch["old_values"], mask, **self._gae)
        batch["advantages"] = whiten(advantages, mask)

        parts = self._parts(batch, number)
        self.phases.enter("train policy")
        policy = [self.objective.step([_only(row, "old", "advantages", "weights") for row in rows]) for rows in parts]
        self.phases.enter("train critic")
        critic = [self.values.step([_only(row, "old_values", "returns") for row in rows]) for rows in parts]
        steps = [{**a, "value_loss": b["loss"]} for a, b in zip(policy, critic, strict=True)]
        metrics = {name: sum(each[name] for each in steps) / len(steps) for name in steps[0]}
        known = ~scores.isnan()
        return {
            **metrics,
            "reward": float(scores[known].mean()) if known.any() else 0.0,
            "kl": float((penalty * mask).sum() / mask.sum().clamp(min=1)),
            "tokens": sum(map(len, found.tokens)) / len(found.tokens),
            **told,
        }

    def _parts(self, batch: Mapping[str, Tensor], number: int) -> list[list[dict[str, Any]]]:
        """Return the micro-steps of every optimizer step of all epochs; the two models are trained on the same ones."""
        found = []
        for epoch in range(self._epochs):
            order = torch.Generator().manual_seed(key_of(f"order/{self._seed}/{number}/{epoch}"))
            for part in torch.randperm(len(batch["labels"]), generator=order).tensor_split(self._updates):
                found.append(in_micro_steps(taken(batch, part.sort().values), self._micro_steps))
        return found

    def close(self) -> None:
        """Release the engines."""
        self.objective.close()
        self.values.close()
        for engine in self.engines.values():
            engine.close()
        if self.engines:
            self.reference.close()
        self.parts.close()

    def _policy_terms(self, values: TokenValues, batch: Mapping[str, Any]) -> Terms:
        mask, logs = batch["labels"] != IGNORE_INDEX, values.log_probs
        old, advantages = batch["old"].to(logs), batch["advantages"].to(logs)
        losses = clipped_policy_losses(logs, old, advantages, mask, **self._clip) * batch["weights"].to(logs)
        with torch.no_grad():
            ratio = (logs - old).exp()
            outside = (ratio < 1 - self._clip["low"]) | (ratio > 1 + (self._clip["high"] or self._clip["low"]))
        return Terms(
            loss=[mean_of_tokens(losses, mask)],
            metrics=dict(clipped=mean_of_tokens(outside.to(logs.dtype), mask)),
        )

    def _value_terms(self, values: TokenValues, batch: Mapping[str, Any]) -> Terms:
        mask, now = batch["labels"] != IGNORE_INDEX, _before(values.log_probs)
        losses = clipped_value_losses(now, batch["old_values"].to(now), batch["returns"].to(now), self._value_clip)
        return Terms(loss=[mean_of_tokens(losses, mask)])


def _before(scores: Tensor) -> Tensor:
    """Return the critic's value of what comes before each token, at the token's place."""
    return F.pad(scores[:, :-1], (1, 0))


def _only(batch: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {**model_inputs(batch), **{name: batch[name] for name in names}}
