"""One contestant makes steps of DPO, GRPO or PPO for a while, in processes of its own; rank 0 writes JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that this file runs on its own

from benchmarks.align import trl_trainers
from benchmarks.align.peers import dpo_by_hand, grpo_by_hand
from benchmarks.peers.absent import AbsentError

Step = Callable[[], Tensor]


def model_of(job: dict[str, Any], dtype: str | None = None) -> nn.Module:
    """Return the model, with the same weights for every contestant."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    longest = job["prompt"] + job["completion"] + 1
    config = AutoConfig.for_model(**job["model"], max_position_embeddings=longest)
    config._attn_implementation = "sdpa"
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    torch.set_default_dtype(getattr(torch, dtype or job["dtype"]))
    try:
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            return AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return]
    finally:
        torch.set_default_dtype(torch.float32)


def random_ids(job: dict[str, Any], rows: int, tokens: int, seed: int) -> list[list[int]]:
    """Return rows of token ids, the last word left out: it ends texts."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(job["model"]["vocab_size"] - 1, (rows, tokens), generator=generator).tolist()


def settings_of(
    job: dict[str, Any], sharded: Mapping[str, Any] = MappingProxyType({}), recompute: str | None = "blocks"
) -> dict[str, Any]:
    """Return the settings of our trainers.

    Args:
        job: of the contestant.
        sharded: more words of ``zero``.
        recompute: what is recomputed in backward; None: nothing.

    Raises:
        AbsentError: for such words without stage 3 on several GPUs.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if sharded and (ranks == 1 or job.get("stage", 3) < 3):
        raise AbsentError("pushes and parameters that are kept whole need stage 3 on several GPUs")
    parallel: dict[str, Any] = dict(data=ranks)
    if job.get("stage", 3) < 3:
        parallel["zero"] = dict(stage=job["stage"])
    elif ranks > 1 or job["regime"] != "A":
        parallel["zero"] = dict(stage=3, placement="cuda", regime=job["regime"], **sharded)
    return dict(
        parallel=parallel,
        precision="bf16" if job["dtype"] == "bfloat16" else "fp32",
        optimizer=dict(name="adamw", lr=1e-6, weight_decay=0.01),
        clip_grad_norm=1.0,
        recompute=recompute,
        micro_steps=job["micro_steps"],
    )


PUSHED: Mapping[str, Any] = MappingProxyType(dict(transport="push"))
KEPT_WHOLE: Mapping[str, Any] = MappingProxyType(dict(transport="push", reshard_after_forward=False))


def our_dpo(
    job: dict[str, Any],
    *,
    shared: bool,
    masked: bool = False,
    sharded: Mapping[str, Any] = MappingProxyType({}),
    recompute: str | None = "blocks",
    compiled: bool = False,
) -> Step:
    """Return a step of our DPO; scoring by the reference is in it.

    Args:
        job: of the contestant.
        shared: a pair shares its prompt.
        masked: completions are kept apart by a mask.
        sharded: more words of ``zero``.
        recompute: what is recomputed in backward; None: nothing.
        compiled: blocks are compiled.
    """
    from meshfold.align import DPO, Completion, Preference

    def whole(prompt: list[int], rest: list[int]) -> Completion:
        return Completion(ids=(*prompt, *rest), counts=(False,) * len(prompt) + (True,) * len(rest))

    rows, completion = job["rows"], job["completion"]
    prompts, chosen, rejected = (
        random_ids(job, rows, n, seed) for seed, n in enumerate((job["prompt"], completion, completion))
    )
    pairs = [
        Preference(chosen=whole(p, a), rejected=whole(p, b)) for p, a, b in zip(prompts, chosen, rejected, strict=True)
    ]
    model: Any = model_of(job)
    if masked:  # as a model is whose attention is not in transformers' registry
        model._supports_attention_backend = False
    settings = settings_of(job, sharded, recompute)
    trainer = DPO(model, pairs, batch_size=rows, shared_prompt=shared, compile=compiled, **settings)
    job["said"] = lambda: dict(shared=str(trainer.shared_prompt))
    return stepped(trainer)


class _Words:
    """A tokenizer of whom only the end is asked for, a word that random prompts leave out."""

    def __init__(self, end: int) -> None:
        self.end = end

    def encode(self, text: str) -> list[int]:
        """Return no ids."""
        return []

    def decode(self, ids: Any) -> str:
        """Return no text."""
        return ""


def _even(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Return the share of even words."""
    return [sum(word % 2 == 0 for word in ids) / max(len(ids), 1) for ids in completion_ids]


def our_grpo(job: dict[str, Any], *, shared: object) -> Step:
    """Return a step of our GRPO: samples, rewards, and training on them."""
    from meshfold.align import GRPO, EngineRollouts, Prompt
    from meshfold.inference import Sampling

    prompts = [Prompt(ids=tuple(ids), given="") for ids in random_ids(job, job["rows"], job["prompt"], 0)]
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = GRPO(
        model_of(job),
        prompts,
        [_even],
        _Words(job["model"]["vocab_size"] - 1),
        group=job["group"],
        batch_size=job["rows"],
        sampling=Sampling(max_new_tokens=job["completion"]),
        rollout=partial(EngineRollouts, rows=max(1, job["rows"] * job["group"] // ranks)),
        shared_prompt=shared,
        **settings_of(job),
    )
    job["said"] = lambda: dict(shared=str(trainer.shared_prompt))
    return stepped(trainer)


def our_ppo(job: dict[str, Any]) -> Step:
    """Return a step of our PPO with actor, critic and reference of one size, under limits of memory: GPU and host in GiB."""
    from meshfold.align import PPO, Prompt, scorer
    from meshfold.inference import Sampling
    from meshfold.models import Llama, LlamaConfig

    sizes = job["model"]
    config = LlamaConfig(
        vocab_size=sizes["vocab_size"],
        hidden=sizes["hidden_size"],
        layers=sizes["num_hidden_layers"],
        heads=sizes["num_attention_heads"],
        kv_heads=sizes["num_key_value_heads"],
        ffn=sizes["intermediate_size"],
        max_positions=job["prompt"] + job["completion"] + 1,
        tie=False,
    )
    settings = settings_of(job)
    settings["parallel"]["zero"] = dict(stage=3, regime=job["regime"])
    trainer = PPO(
        lambda: Llama(config),
        scorer(lambda: Llama(config)),
        [Prompt(ids=tuple(ids), given="") for ids in random_ids(job, job["rows"], job["prompt"], 0)],
        [_even],
        _Words(sizes["vocab_size"] - 1),
        batch_size=job["rows"],
        epochs=1,
        sampling=Sampling(max_new_tokens=job["completion"]),
        memory=dict(gpu=job["gpu_gib"] * 2**30, host=job["host_gib"] * 2**30),
        **settings,
    )
    print(trainer.phases, flush=True)
    job["said"] = lambda: dict(phases=str(trainer.phases))
    return stepped(trainer)


def stepped(trainer: Any) -> Step:
    """Return a function that makes the next step of a trainer."""
    number, device = 0, next(iter(trainer.engines.values())).device

    def step() -> Tensor:
        nonlocal number
        metrics = trainer.step(number)
        number += 1
        return torch.tensor(metrics["loss"], device=device)

    return step


CONTESTANTS: dict[str, dict[str, Callable[[dict[str, Any]], Step]]] = {
    "dpo": {
        "ours, shared prompts": partial(our_dpo, shared=True),
        "ours, shared prompts, compiled": partial(our_dpo, shared=True, compiled=True),
        "ours, shared prompts, by a mask": partial(our_dpo, shared=True, masked=True),
        "ours, shared prompts, pushed": partial(our_dpo, shared=True, sharded=PUSHED),
        "ours, shared prompts, kept whole, pushed": partial(our_dpo, shared=True, sharded=KEPT_WHOLE),
        "ours, shared prompts, activations kept, pushed": partial(our_dpo, shared=True, sharded=PUSHED, recompute=None),
        "ours": partial(our_dpo, shared=False),
        "ours, compiled": partial(our_dpo, shared=False, compiled=True),
        "ours, pushed": partial(our_dpo, shared=False, sharded=PUSHED),
        "ours, kept whole, pushed": partial(our_dpo, shared=False, sharded=KEPT_WHOLE),
        "ours, activations kept, pushed": partial(our_dpo, shared=False, sharded=PUSHED, recompute=None),
        "by hand": lambda job: dpo_by_hand(job, model_of, random_ids),
        "TRL": lambda job: trl_trainers.dpo(job, model_of, random_ids),
        "TRL, activations kept": lambda job: trl_trainers.dpo(job, model_of, random_ids, recompute=False),
        "TRL, DeepSpeed ZeRO 2": lambda job: trl_trainers.dpo(job, model_of, random_ids, zero=2),
        "TRL, DeepSpeed ZeRO 3": lambda job: trl_trainers.dpo(job, model_of, random_ids, zero=3),
    },
    "grpo": {
        "ours": partial(our_grpo, shared="auto"),
        "ours, shared prompts": partial(our_grpo, shared=True),
        "ours, unshared": partial(our_grpo, shared=False),
        "by hand, generate": lambda job: grpo_by_hand(job, model_of, random_ids, "generate"),
        "by hand, generate_batch": lambda job: grpo_by_hand(job, model_of, random_ids, "generate_batch"),
        "TRL": lambda job: trl_trainers.grpo(job, model_of, random_ids),
        "TRL, static cache": lambda job: trl_trainers.grpo(job, model_of, random_ids, cache_implementation="static"),
        "TRL, continuous batching": lambda job: trl_trainers.grpo(
            job, model_of, random_ids, use_transformers_continuous_batching=True
        ),
    },
    "ppo": {"ours": our_ppo},
}


if __name__ == "__main__":
    from benchmarks.timed_training import train_or_absent

    job = json.loads(sys.argv[1])
    train_or_absent(job, CONTESTANTS[job["method"]][job["contestant"]])
