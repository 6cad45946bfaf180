"""Steps of DPO and GRPO in plain torch and transformers, as TRL computes them: a row for each completion, logits and all.

Where `trl` is installed its own function takes the log-probabilities; else the same is written here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MakeModel = Callable[..., Any]
Ids = Callable[[dict[str, Any], int, int, int], list[list[int]]]


def log_softmax_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the log-probabilities of labels, ``b s v, b s -> b s``, row by row in 16 bits, as TRL does."""
    try:
        from trl.trainer.utils import selective_log_softmax  # type: ignore[import-not-found]
    except ImportError:
        rows = [
            F.log_softmax(row, -1).gather(-1, label[:, None])[:, 0] for row, label in zip(logits, labels, strict=True)
        ]
        return torch.stack(rows)
    found: Tensor = selective_log_softmax(logits, labels)
    return found


class Trained:
    """A model with float32 masters, fused AdamW, clipping by the norm and layers that are recomputed."""

    def __init__(self, model: Any) -> None:
        self.model = model.train()
        self.model.gradient_checkpointing_enable(dict(use_reentrant=False))
        self.parameters: list[Tensor] = [*model.parameters()]
        self.masters: list[Tensor] = [p.detach().float().requires_grad_() for p in self.parameters]
        fused = torch.cuda.is_available()
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-6, weight_decay=0.01, fused=fused)

    def step(self) -> None:
        """Step with the gradients of the model."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.masters)


def log_probs(model: Any, ids: Tensor, completion: int) -> Tensor:
    """Return the log-probabilities of the last tokens of rows, ``b completion``."""
    logits = model(input_ids=ids, logits_to_keep=completion + 1, use_cache=False).logits[:, :-1]
    return log_softmax_of(logits, ids[:, -completion:])


def dpo_by_hand(job: dict[str, Any], model_of: MakeModel, random_ids: Ids) -> Callable[[], Tensor]:
    """Return a step of DPO: chosen and rejected in one batch, each with its prompt; the reference scores in the step."""
    trained, reference = Trained(model_of(job)), model_of(job).eval().requires_grad_(False)
    device = trained.masters[0].device
    rows, completion = job["rows"], job["completion"]
    prompts, chosen, rejected = (
        torch.tensor(random_ids(job, rows, n, seed), device=device)
        for seed, n in enumerate((job["prompt"], completion, completion))
    )
    batch = torch.cat([torch.cat([prompts, chosen], 1), torch.cat([prompts, rejected], 1)]).view(2, rows, -1)

    def step() -> Tensor:
        total = torch.zeros((), device=device)
        for part in batch.chunk(job["micro_steps"], 1):
            ids = part.flatten(0, 1)
            with torch.no_grad():
                old = log_probs(reference, ids, completion).float().sum(-1)
            now = log_probs(trained.model, ids, completion).float().sum(-1)
            gains = (now - old).view(2, -1)
            loss = -F.logsigmoid(0.1 * (gains[0] - gains[1])).sum() / rows
            loss.backward()
            total += loss.detach()
        trained.step()
        return total

    return step


def grpo_by_hand(job: dict[str, Any], model_of: MakeModel, random_ids: Ids, method: str) -> Callable[[], Tensor]:
    """Return a step of GRPO: samples of transformers, and training on a row for each completion."""
    trained = Trained(model_of(job))
    device = trained.masters[0].device
    group, completion = job["group"], job["completion"]
    prompts = [ids for ids in random_ids(job, job["rows"], job["prompt"], 0) for _ in range(group)]

    def sample() -> Tensor:
        from transformers import GenerationConfig

        model = trained.model.eval()
        config = GenerationConfig(
            max_new_tokens=completion, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0
        )
        try:
            with torch.no_grad():
                if method == "generate":
                    ids = torch.tensor(prompts, device=device)
                    found: Tensor = model.generate(
                        ids, attention_mask=torch.ones_like(ids), generation_config=config, use_cache=True
                    )
                    return found
                answers = model.generate_batch(prompts, generation_config=config)
                rows = [p + a.generated_tokens for p, a in zip(prompts, answers.values(), strict=True)]
                return torch.tensor(rows, device=device)
        finally:
            trained.model.train()

    def step() -> Tensor:
        ids = sample()
        rewards = (ids[:, -completion:] % 2 == 0).float().mean(1).view(-1, group)
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()
        total = torch.zeros((), device=device)
        for rows, weight in zip(ids.chunk(job["micro_steps"]), advantages.chunk(job["micro_steps"]), strict=True):
            now = log_probs(trained.model, rows, completion).float()
            loss = -((now - now.detach()).exp() * weight[:, None]).mean(1).sum() / len(ids)
            loss.backward()
            total += loss.detach()
        trained.step()
        return total

    return step
