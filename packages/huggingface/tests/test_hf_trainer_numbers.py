"""EngineTrainer's losses and metrics are those of the Trainer alone, as run_clm.py asks for them, under specs too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from meshfold.engine import Engine
from meshfold.huggingface import EngineTrainer
from meshfold.mesh import SpecError
from meshfold.mesh.testing import run_on_ranks

ROWS = torch.randint(64, (14, 8), generator=torch.Generator().manual_seed(0))


def dataset() -> list[dict[str, Tensor]]:
    """Rows of which some have more targets than others."""
    return [
        dict(input_ids=row, labels=torch.where(torch.arange(8) < 3 + number % 6, row, -100))
        for number, row in enumerate(ROWS)
    ]


def model(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "llama":
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=64,
                hidden_size=16,
                intermediate_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
            )
        )
    drop = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=8, **drop))


def arguments(out: str, each: int, steps: int) -> TrainingArguments:
    return TrainingArguments(
        output_dir=out,
        num_train_epochs=1,
        per_device_train_batch_size=each,
        per_device_eval_batch_size=each,
        gradient_accumulation_steps=steps,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
        seed=3,
        max_grad_norm=0.1,
        lr_scheduler_type="linear",
        train_sampling_strategy="sequential",
    )


def chosen(logits: Any, labels: Any) -> Tensor:
    """As run_clm.py makes them smaller."""
    first: Tensor = logits[0] if isinstance(logits, tuple) else logits
    return first.argmax(dim=-1)


def accuracy(given: Any) -> dict[str, float]:
    """As run_clm.py counts, beside the number of rows."""
    predictions, labels = given
    labels, predictions = labels[:, 1:].reshape(-1), predictions[:, :-1].reshape(-1)
    return {
        "accuracy": float(np.mean(labels == predictions)),
        "hits": int((labels == predictions).sum()),
        "all": labels.size,
    }


def figures(trainer: Trainer) -> dict[str, list[float]]:
    before = trainer.evaluate()
    trainer.train()
    rows = [row for row in trainer.state.log_history if "grad_norm" in row]
    found = trainer.evaluate()
    names = ("eval_loss", "eval_accuracy", "eval_hits", "eval_all")
    return {
        "loss": [float(row["loss"]) for row in rows],
        "norm": [float(row["grad_norm"]) for row in rows],
        "eval": [float(found[name]) for name in names],
        "before": [float(before[name]) for name in names],
    }


METRICS: dict[str, Any] = dict(compute_metrics=accuracy, preprocess_logits_for_metrics=chosen)


def ours(kind: str, parallel: dict[str, Any], out: str, each: int, steps: int) -> dict[str, list[float]]:
    optimizer = dict(name="adamw", lr=1e-2, weight_decay=0.0, eps=1e-8)
    with Engine(model(kind), parallel, optimizer=optimizer, clip_grad_norm=0.1, gradient_accumulation=steps) as engine:
        data = dataset()
        return figures(
            EngineTrainer(
                engine,
                args=arguments(out, each, steps),
                train_dataset=data,
                eval_dataset=data[:12],
                **METRICS,
            )
        )


def alone(kind: str, out: str, steps: int) -> dict[str, list[float]]:
    data = dataset()
    return figures(
        Trainer(model(kind), args=arguments(out, 4, steps), train_dataset=data, eval_dataset=data[:12], **METRICS)
    )


SPECS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "one": (1, 4, {}),
    "data": (2, 2, dict(data=2)),
    "tensor": (2, 4, dict(tensor=2)),
    "pipeline": (2, 4, dict(pipeline=dict(size=2, microbatches=2))),
    "zero 3": (2, 2, dict(data=2, zero=dict(stage=3))),
}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("spec", "kind", "steps"),
    [
        ("zero 3", "gpt2", 2),
        ("one", "gpt2", 1),
        ("one", "gpt2", 2),
        ("one", "llama", 2),
        ("data", "gpt2", 2),
        ("tensor", "gpt2", 1),
        ("pipeline", "llama", 2),
    ],
)
def test_losses_and_metrics_are_the_trainers(spec: str, kind: str, steps: int, tmp_path: Path) -> None:
    ranks, each, parallel = SPECS[spec]
    wanted = alone(kind, str(tmp_path / "alone"), steps)
    mine = (
        [ours(kind, parallel, str(tmp_path / "ours"), each, steps)]
        if ranks == 1
        else run_on_ranks(ranks, ours, kind, parallel, str(tmp_path / "ours"), each, steps)
    )
    for found in mine:
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-3)
        assert found["norm"] == pytest.approx(wanted["norm"], rel=1e-2)
        # The Trainer averages the losses of batches, and EngineTrainer those of targets.
        assert found["eval"][0] == pytest.approx(wanted["eval"][0], rel=1e-2)
        assert found["before"][1:] == wanted["before"][1:]


def uneven(parallel: dict[str, Any], out: str) -> tuple[list[Any], list[Any]]:
    """What ``compute_metrics`` is given of 5 rows in batches of 4, of different lengths on the two ranks."""
    seen: list[Any] = []

    def keep(given: Any) -> dict[str, float]:
        seen.append((given.predictions, given.label_ids, given.inputs))
        return {"eval_seen": 1.0, "rows": len(given.label_ids)}

    def collate(rows: list[Any]) -> dict[str, Tensor]:
        longest = max(len(row["labels"]) for row in rows)
        padded = [torch.nn.functional.pad(row["labels"], (0, longest - len(row["labels"])), value=-100) for row in rows]
        return dict(labels=torch.stack(padded), input_ids=torch.stack(padded).clamp(min=0))

    data = [dict(labels=row[: 4 + number % 4]) for number, row in enumerate(ROWS[:5])]
    args = arguments(out, 4 if not parallel else 2, 1)
    args.include_for_metrics = ["inputs"]
    with Engine(model("llama"), parallel, optimizer=dict(name="sgd", lr=0.1), clip_grad_norm=0.1) as engine:
        trainer = EngineTrainer(
            engine,
            args=args,
            eval_dataset=data,
            data_collator=collate,
            compute_metrics=keep,
            preprocess_logits_for_metrics=chosen,
        )
        found = trainer.evaluate()
        assert found["eval_seen"] == 1.0 and found["eval_rows"] == 5
    [(predictions, labels, inputs)] = seen
    assert inputs.shape == labels.shape
    kept = labels != -100
    return labels[kept].tolist(), predictions[kept].tolist()


def test_rows_of_all_coordinates_come_in_order(tmp_path: Path) -> None:
    wanted = uneven({}, str(tmp_path))
    assert wanted[0] == torch.cat([row[: 4 + number % 4] for number, row in enumerate(ROWS[:5])]).tolist()
    assert run_on_ranks(2, uneven, dict(data=2), str(tmp_path)) == [wanted] * 2


def test_metrics_of_each_batch_are_refused(tmp_path: Path) -> None:
    args = arguments(str(tmp_path), 4, 1)
    args.include_for_metrics = ["loss"]
    engine = Engine(model("llama"), optimizer=dict(name="sgd", lr=0.1), clip_grad_norm=0.1)
    with pytest.raises(SpecError, match=r"include_for_metrics=\['loss'\]: EngineTrainer calls compute_metrics once"):
        EngineTrainer(engine, args=args, train_dataset=dataset(), compute_metrics=accuracy)
