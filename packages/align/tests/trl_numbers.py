"""Numbers of TRL 1.16 for ``test_trl.py``: losses of three steps of SGD in float32, and how far they moved each weight.

``python trl_numbers.py trl_numbers.json`` writes them with TRL's own trainers, of ``pip install trl==1.16.0``.
The model and the examples below are those of the tests.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

WORDS, END, LR, STEPS = 29, 1, 0.04, 3
PAIRS = [  # prompt, chosen, rejected; every completion ends
    ([5, 9, 2, 6], [7, 3, END], [8, END]),
    ([4, 4], [11, 12, 13, 14, END], [10, 3, END]),
    ([20, 21, 22, 23, 24, 25], [2, END], [3, 5, 7, 9, END]),
    ([8, 6, 7], [15, END], [16, 17, END]),
]
GROUPS = [  # prompt, completions, rewards
    ([5, 9, 2, 6], [[7, 3, 4, END], [8, END], [9, 9, 2, 10, END]], [1.0, 0.25, 0.5]),
    ([4, 4], [[11, END], [10, 3, 5, END], [6, 18, END]], [0.0, 1.0, 0.5]),
]
DPO_KINDS: dict[str, dict[str, Any]] = dict(
    sigmoid=dict(beta=0.5), hinge=dict(beta=0.5), ipo=dict(beta=0.5), robust=dict(beta=0.5, label_smoothing=0.1)
)
GRPO_KINDS: dict[str, dict[str, Any]] = {
    "grpo": dict(beta=0.25),
    "grpo, unbiased KL": dict(beta=0.25, unbiased_kl=True),
    "dr_grpo": dict(beta=0.0),
    "dapo": dict(beta=0.25),
}
GOOD = [True, False, True, False]
"""of each pair, whether its chosen completion is good: examples of KTO"""
OTHERS: dict[str, dict[str, Any]] = dict(sft={}, reward=dict(centering=0.1), kto=dict(beta=0.5))
MOST = 6
"""tokens of a completion, by which dr_grpo divides"""


def tiny_llama(*, scores: bool = False) -> Any:
    """The same weights in every version of torch; ``scores``: with a head of one output."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        attn_implementation="sdpa",
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config)
    if scores:
        model.lm_head = nn.Linear(config.hidden_size, 1, bias=False)
    fill(model)
    return model


def fill(model: nn.Module) -> None:
    """Give a model the same weights in every version of torch."""
    with torch.no_grad():
        for number, weight in enumerate(model.parameters()):
            if weight.dim() > 1:
                places = torch.arange(weight.numel(), dtype=torch.float64)
                weight.copy_((torch.sin(places * 0.7311 + number) * 0.35).view(weight.shape))


def moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, list[float]]:
    """The sum of the gradients of all steps, of each weight: its norm, and what it is along two fixed directions."""
    found = {}
    for name, old in before.items():
        change = ((old.double() - after[name].double()) / LR).flatten()
        places = torch.arange(change.numel(), dtype=torch.float64)
        found[name] = [float(x) for x in (change.norm(), change @ torch.cos(places), change @ torch.sin(2.3 * places))]
    return found


def by_sgd(model: nn.Module, loss_of: Callable[[int], Tensor]) -> dict[str, Any]:
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    losses = []
    for step in range(STEPS):
        model.zero_grad()
        loss = loss_of(step)
        loss.backward()
        losses.append(float(loss.detach()))
        with torch.no_grad():
            for weight in model.parameters():
                weight -= LR * weight.grad
    return dict(losses=losses, moved=moved(before, dict(model.named_parameters())))


def tokenizer() -> Any:
    """Words are numbers."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({f"<{word}>": word for word in range(WORDS)}, unk_token="<0>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<0>", eos_token=f"<{END}>", pad_token="<0>")


def text(ids: list[int]) -> str:
    return " ".join(f"<{word}>" for word in ids)


def dpo(kind: str, options: dict[str, Any], folder: str) -> dict[str, Any]:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    # TRL puts the end behind each completion itself.
    rows = [dict(prompt=text(p), chosen=" " + text(a[:-1]), rejected=" " + text(b[:-1])) for p, a, b in PAIRS]
    settings = DPOConfig(
        folder,
        loss_type=[kind],
        per_device_train_batch_size=len(PAIRS),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        **options,
    )
    model = tiny_llama()
    trainer = DPOTrainer(
        model, tiny_llama(), settings, train_dataset=Dataset.from_list(rows), processing_class=tokenizer()
    )
    inputs = next(iter(trainer.get_train_dataloader()))
    ids = [row[mask.bool()].tolist() for row, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]
    assert sorted(ids) == sorted(p + c for p, a, b in PAIRS for c in (a, b)), ids
    return by_sgd(trainer.model, lambda step: trainer.compute_loss(trainer.model, inputs))


def sft(folder: str) -> dict[str, Any]:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = [dict(prompt=text(p), completion=" " + text(a[:-1])) for p, a, _ in PAIRS]
    trainer = SFTTrainer(
        tiny_llama(), SFTConfig(folder, **plain()), train_dataset=Dataset.from_list(rows), processing_class=tokenizer()
    )
    inputs = next(iter(trainer.get_train_dataloader()))
    counted = sorted(row[row != -100].tolist() for row in inputs["labels"])
    assert counted == sorted(a for _, a, _ in PAIRS), counted
    return by_sgd(trainer.model, lambda step: trainer.compute_loss(trainer.model, dict(inputs)))


def reward(folder: str) -> dict[str, Any]:
    import transformers
    from datasets import Dataset
    from trl import RewardConfig, RewardTrainer

    config = tiny_llama().config
    config.num_labels, config.pad_token_id = 1, 0
    model = transformers.LlamaForSequenceClassification(config)
    fill(model)
    settings = RewardConfig(folder, center_rewards_coefficient=OTHERS["reward"]["centering"], **plain())
    rows = [dict(chosen=text(p + a), rejected=text(p + b)) for p, a, b in PAIRS]
    trainer = RewardTrainer(model, settings, train_dataset=Dataset.from_list(rows), processing_class=tokenizer())
    given = [dict(chosen_ids=p + a, rejected_ids=p + b, margin=n / 10) for n, (p, a, b) in enumerate(PAIRS)]
    inputs = trainer.data_collator(given)
    found = by_sgd(trainer.model, lambda step: trainer.compute_loss(trainer.model, dict(inputs)))
    found["moved"] = {name.replace("score.", "lm_head."): value for name, value in found["moved"].items()}
    return found


def kto(folder: str) -> dict[str, Any]:
    from datasets import Dataset
    from trl import KTOConfig, KTOTrainer

    rows = [
        dict(prompt=text(p), completion=" " + text(a[:-1]), label=good)
        for (p, a, _), good in zip(PAIRS, GOOD, strict=True)
    ]
    settings = KTOConfig(folder, beta=OTHERS["kto"]["beta"], train_sampling_strategy="sequential", **plain())
    trainer = KTOTrainer(
        tiny_llama(), tiny_llama(), settings, train_dataset=Dataset.from_list(rows), processing_class=tokenizer()
    )
    # Our pairs of the baseline have the next example's completion, TRL's the last one's.
    following = [*PAIRS[1:], PAIRS[0]]
    given = [
        dict(prompt_ids=p, completion_ids=a, KL_completion_ids=other[1], label=good)
        for (p, a, _), other, good in zip(PAIRS, following, GOOD, strict=True)
    ]
    inputs = trainer.data_collator(given)
    return by_sgd(trainer.model, lambda step: trainer.compute_loss(trainer.model, dict(inputs)))


def plain() -> dict[str, Any]:
    """Arguments of trainers of transformers: all examples in a step, in float32 on the CPU."""
    return dict(
        per_device_train_batch_size=len(PAIRS), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none"
    )


def grpo(kind: str, options: dict[str, Any], folder: str) -> dict[str, Any]:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    kind, options = kind.split(",")[0], dict(options)
    unbiased = options.pop("unbiased_kl", False)
    tiny_llama().save_pretrained(f"{folder}/model")
    tokenizer().save_pretrained(f"{folder}/model")
    rows = [(p, c, r) for p, completions, rewards in GROUPS for c, r in zip(completions, rewards, strict=True)]
    settings = GRPOConfig(
        folder,
        loss_type=kind,
        num_generations=3,
        per_device_train_batch_size=len(rows),
        max_completion_length=MOST,
        use_bias_correction_kl=unbiased,
        scale_rewards="none" if kind == "dr_grpo" else "group",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        **options,
    )
    trainer = GRPOTrainer(
        f"{folder}/model",
        lambda completions, **columns: [0.0] * len(completions),
        settings,
        Dataset.from_list([dict(prompt=text(p)) for p, *_ in GROUPS]),
        processing_class=tokenizer(),
    )
    trainer.current_gradient_accumulation_steps = 1
    inputs = padded(rows)
    rewards = torch.tensor([r for *_, r in rows]).view(len(GROUPS), -1)
    advantages = rewards - rewards.mean(1, keepdim=True)
    if kind != "dr_grpo":
        advantages = advantages / (rewards.std(1, keepdim=True) + 1e-4)
    inputs["advantages"] = advantages.flatten()
    inputs["num_items_in_batch"] = inputs["completion_mask"].sum()
    if options["beta"]:
        ids = torch.cat((inputs["prompt_ids"], inputs["completion_ids"]), 1)
        seen = torch.cat((inputs["prompt_mask"], inputs["completion_mask"]), 1)
        with torch.no_grad():
            given = (trainer.model, ids, seen, inputs["completion_ids"].shape[1])
            inputs["ref_per_token_logps"] = trainer._get_per_token_logps_and_entropies(*given)[0]
    model = trainer.model.train()
    return by_sgd(model, lambda step: trainer._compute_loss(model, inputs))


def padded(rows: list[Any]) -> dict[str, Tensor]:
    """Prompts filled up on the left, completions on the right, as in TRL."""
    widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
    found = {}
    for i, name in enumerate(("prompt", "completion")):
        more = [[0] * (widths[i] - len(row[i])) for row in rows]
        ids, mask = ([*row[i]] for row in rows), ([1] * len(row[i]) for row in rows)
        for suffix, listed in (("ids", ids), ("mask", mask)):
            joined = [[*m, *x] if i == 0 else [*x, *m] for m, x in zip(more, listed, strict=True)]
            found[f"{name}_{suffix}"] = torch.tensor(joined)
    return found


def main() -> None:
    found: dict[str, Any] = {}
    for make, kinds in ((dpo, DPO_KINDS), (grpo, GRPO_KINDS)):
        for kind, options in kinds.items():
            with tempfile.TemporaryDirectory() as folder:
                found[f"{make.__name__} {kind}"] = make(kind, options, folder)
    for other in (sft, reward, kto):
        with tempfile.TemporaryDirectory() as folder:
            found[other.__name__] = other(folder)
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
