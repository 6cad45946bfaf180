"""The Trainer of transformers over an engine: the same curve as the Trainer alone, and clear errors. Training on several ranks and
resuming under another spec are in docs/ray-and-trainer.md, which is run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from meshfold.engine import Engine
from meshfold.huggingface import EngineTrainer
from meshfold.mesh import SpecError
from meshfold.mesh.testing import run_on_ranks
from meshfold.optimizers import Lamb

ROWS = torch.randint(64, (32, 12), generator=torch.Generator().manual_seed(0))
DATASET = [dict(input_ids=row, labels=row) for row in ROWS]


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    )


def arguments(out: Path, **changes: Any) -> TrainingArguments:
    settings: dict[str, Any] = dict(
        output_dir=str(out),
        max_steps=6,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        lr_scheduler_type="linear",
        warmup_steps=2,
        max_grad_norm=0.5,
        logging_steps=1,
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
        weight_decay=0.0,
        seed=3,
    )
    return TrainingArguments(**{**settings, **changes})


def engine(**changes: Any) -> Engine:
    settings: dict[str, Any] = dict(
        optimizer=dict(name="adamw", lr=1e-2, weight_decay=0.0), clip_grad_norm=0.5, gradient_accumulation=2
    )
    return Engine(model(), **{**settings, **changes})


class InOrder(Trainer):  # type: ignore[misc]
    """The Trainer alone, on the batches that an EngineTrainer serves."""

    def get_train_dataloader(self) -> Any:
        return self.served  # type: ignore[attr-defined]


def curve(trainer: Any) -> list[tuple[float, float, float]]:
    trainer.train()
    rows = [row for row in trainer.state.log_history if "grad_norm" in row]
    return [(float(row["loss"]), float(row["grad_norm"]), float(row["learning_rate"])) for row in rows]


def test_the_same_curve_as_the_trainer_alone(tmp_path: Path) -> None:
    ours = EngineTrainer(engine(), args=arguments(tmp_path / "a"), train_dataset=DATASET)
    alone = InOrder(model(), args=arguments(tmp_path / "b"), train_dataset=DATASET)
    alone.served = ours.get_train_dataloader()
    mine, theirs = curve(ours), curve(alone)
    assert len(mine) == 6 and len({lr for _, _, lr in mine}) > 3
    for own, other in zip(mine, theirs, strict=True):
        assert own == pytest.approx(other, rel=1e-4)


def test_lamb_by_name_has_the_curve_of_the_trainer_with_it(tmp_path: Path) -> None:
    by_name = dict(name="lamb", lr=1e-2, weight_decay=0.1)
    ours = EngineTrainer(engine(optimizer=by_name), args=arguments(tmp_path / "a", max_steps=3), train_dataset=DATASET)
    whole = model()
    lamb = Lamb(whole.parameters(), lr=1e-2, weight_decay=0.1)
    alone = InOrder(whole, args=arguments(tmp_path / "b", max_steps=3), train_dataset=DATASET, optimizers=(lamb, None))
    alone.served = ours.get_train_dataloader()
    for own, other in zip(curve(ours), curve(alone), strict=True):
        assert own == pytest.approx(other, rel=1e-4)


def test_a_resumed_run_has_the_rest_of_the_curve(tmp_path: Path) -> None:
    whole = curve(EngineTrainer(engine(), args=arguments(tmp_path / "whole"), train_dataset=DATASET))
    saving = arguments(tmp_path / "cut", save_strategy="steps", save_steps=3)
    EngineTrainer(engine(), args=saving, train_dataset=DATASET).train()
    again = EngineTrainer(engine(), args=saving, train_dataset=DATASET, eval_dataset=DATASET[:8])
    again.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-3"))
    rest = [float(row["loss"]) for row in again.state.log_history if "grad_norm" in row and row["step"] > 3]
    assert rest == pytest.approx([loss for loss, _, _ in whole[3:]], rel=1e-4)
    found = again.evaluate()["eval_loss"]
    assert found == pytest.approx(again.engine.eval_step(dict(input_ids=ROWS[:8], labels=ROWS[:8])), rel=1e-5)


def rows_to_evaluate(count: int) -> list[dict[str, Any]]:
    """Rows of which more and more targets count, from none on."""
    labels = [torch.where(torch.arange(12) < 2 * number, row, -100) for number, row in enumerate(ROWS[:count])]
    return [dict(input_ids=row, labels=label) for row, label in zip(ROWS, labels, strict=False)]


def evaluated(parallel: dict[str, Any], out: str, count: int, each: int) -> float:
    with engine(parallel=parallel) as made:
        args = arguments(Path(out), per_device_eval_batch_size=each)
        return EngineTrainer(made, args=args, eval_dataset=rows_to_evaluate(count)).evaluate()["eval_loss"]


@pytest.mark.few(4)
@pytest.mark.parametrize(("count", "each"), [(6, 4), (5, 2), (3, 2), (1, 4)])
@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [(1, {}), (2, dict(data=2)), (4, dict(data=2, pipeline=dict(size=2, microbatches=2)))],
    ids=["alone", "data", "data and pipeline"],
)
def test_every_target_is_evaluated_once(
    ranks: int, parallel: dict[str, Any], count: int, each: int, tmp_path: Path
) -> None:
    rows = {name: torch.stack([row[name] for row in rows_to_evaluate(count)]) for name in ("input_ids", "labels")}
    wanted = engine().eval_step(rows)
    found = (
        run_on_ranks(ranks, evaluated, parallel, str(tmp_path), count, each)
        if ranks > 1
        else [evaluated(parallel, str(tmp_path), count, each)]
    )
    assert found == pytest.approx([wanted] * ranks, rel=1e-5, nan_ok=count == 1)  # of the first row nothing counts
    assert math.isnan(wanted) == (count == 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            dict(gradient_accumulation=1),
            r"gradient_accumulation=1\) and TrainingArguments\(gradient_accumulation_steps=2",
        ),
        (dict(clip_grad_norm=None), r"clip_grad_norm=None\) and TrainingArguments\(max_grad_norm=0.5"),
        (dict(optimizer=None), "needs an engine with an optimizer"),
    ],
    ids=["accumulation", "clipping", "optimizer"],
)
def test_two_that_disagree(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=message):
        EngineTrainer(engine(**changes), args=arguments(tmp_path), train_dataset=DATASET)


def test_what_would_be_left_out_is_refused(tmp_path: Path) -> None:
    half = arguments(tmp_path, bf16=True)
    with pytest.raises(SpecError, match=r"bf16=True\), and the engine computes in fp32: write .*precision='bf16'"):
        EngineTrainer(engine(), args=half, train_dataset=DATASET)
    EngineTrainer(engine(precision="bf16"), args=half, train_dataset=DATASET)


def test_a_dataset_without_a_batch(tmp_path: Path) -> None:
    args = arguments(tmp_path, dataloader_drop_last=True)
    trainer = EngineTrainer(engine(), args=args, train_dataset=DATASET[:3])
    with pytest.raises(SpecError, match="a dataset of 3 rows has no global batch of 4 × 1 rows"):
        trainer.get_train_dataloader()


def odd_rows(count: int) -> list[dict[str, Any]]:
    """Rows of which some have more targets than others, and a column that the model does not take."""
    return [
        dict(input_ids=row, labels=torch.where(torch.arange(12) < 2 + number % 9, row, -100), weight=1.0)
        for number, row in enumerate(ROWS[:count])
    ]


@pytest.mark.parametrize("each", [1, 2], ids=["each", "two"])
def test_epochs_that_do_not_divide_are_the_trainers(each: int, tmp_path: Path) -> None:
    """A last batch of fewer rows, and a last step of fewer micro-steps: loss, gradient and rate of every step."""
    # 23 rows are 6 batches of 4, the last of 3; those are 4 + 2 micro-steps, or 3 steps of two.
    steps = dict(max_steps=-1, num_train_epochs=2, gradient_accumulation_steps=4 if each == 1 else 2)
    made = engine(gradient_accumulation=steps["gradient_accumulation_steps"])
    ours = EngineTrainer(made, args=arguments(tmp_path / "a", **steps), train_dataset=odd_rows(23))
    alone = Trainer(model(), args=arguments(tmp_path / "b", **steps), train_dataset=odd_rows(23))
    mine, theirs = curve(ours), curve(alone)
    assert len(mine) == made.steps == (4 if each == 1 else 6)
    for own, other in zip(mine, theirs, strict=True):
        assert own == pytest.approx(other, rel=1e-3)


def trained(parallel: dict[str, Any], out: str, count: int, each: int) -> list[tuple[float, float, float]]:
    with engine(parallel=parallel, gradient_accumulation=1) as made:
        args = arguments(
            Path(out), per_device_train_batch_size=each, gradient_accumulation_steps=1, max_steps=-1, num_train_epochs=2
        )
        return curve(EngineTrainer(made, args=args, train_dataset=odd_rows(count)))


@pytest.mark.parametrize("count", [9, 10], ids=["a rank without a row", "one row each"])
def test_every_row_is_trained_on_once_on_two_ranks(count: int, tmp_path: Path) -> None:
    alone = trained({}, str(tmp_path / "a"), count, 4)
    assert len(alone) == 6
    for found in run_on_ranks(2, trained, dict(data=2), str(tmp_path / "b"), count, 2):
        for own, other in zip(found, alone, strict=True):
            assert own == pytest.approx(other, rel=1e-3)


def test_a_run_resumed_in_its_second_epoch_goes_on_in_its_order(tmp_path: Path) -> None:
    long = dict(max_steps=8, save_strategy="steps", save_steps=6)  # 4 steps an epoch
    whole = curve(EngineTrainer(engine(), args=arguments(tmp_path, **long), train_dataset=DATASET))
    again = EngineTrainer(engine(), args=arguments(tmp_path, **long), train_dataset=DATASET)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    rest = [float(row["loss"]) for row in again.state.log_history if "grad_norm" in row and row["step"] > 6]
    assert rest == pytest.approx([loss for loss, _, _ in whole[6:]], rel=1e-4)


def test_several_datasets_are_evaluated_by_their_names(tmp_path: Path) -> None:
    sets = dict(first=DATASET[:5], second=DATASET[5:6])
    args = arguments(tmp_path, max_steps=1, eval_strategy="steps", eval_steps=1)
    trainer = EngineTrainer(engine(), args=args, train_dataset=DATASET, eval_dataset=sets)
    trainer.train()
    logged = {name: value for row in trainer.state.log_history for name, value in row.items()}
    found = trainer.evaluate()
    for name, rows in sets.items():
        wanted = trainer.engine.eval_step(torch.stack([row["input_ids"] for row in rows]))
        assert found[f"eval_{name}_loss"] == logged[f"eval_{name}_loss"] == pytest.approx(wanted, rel=1e-5)
        assert found[f"eval_{name}_samples_per_second"] > 0
        assert trainer.evaluate(name)["eval_loss"] == found[f"eval_{name}_loss"]
    with pytest.raises(SpecError, match=r"has \['first', 'second'\]: give one of them"):
        trainer.evaluate("third")


def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    args = arguments(
        tmp_path,
        max_steps=4,
        learning_rate=0.3,
        lr_scheduler_type="constant",
        warmup_steps=0,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=True,
    )
    trainer = EngineTrainer(engine(), args=args, train_dataset=DATASET, eval_dataset=DATASET[:5])
    trainer.train()
    losses = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
    assert losses[0] != pytest.approx(losses[1], rel=1e-2)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(max(losses), rel=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(weight_decay=0.1), r"weight_decay=0.1\) would not be used.*weight_decay=0.1\)\)"),
        (dict(label_smoothing_factor=0.1), r"label_smoothing_factor=0.1\) would not be used.*loss_fn"),
        (dict(train_sampling_strategy="group_by_length"), "has 'random' and 'sequential'"),
    ],
    ids=["decay", "smoothing", "sampling"],
)
def test_arguments_that_nobody_would_follow(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=message):
        EngineTrainer(engine(), args=arguments(tmp_path, **changes), train_dataset=DATASET)


class Stream(torch.utils.data.IterableDataset[Any]):
    """Rows without numbers."""

    def __iter__(self) -> Any:
        return iter(DATASET)


def test_data_that_cannot_be_sharded(tmp_path: Path) -> None:
    trainer = EngineTrainer(engine(), args=arguments(tmp_path), train_dataset=Stream())
    with pytest.raises(SpecError, match="is Stream, a stream"):
        trainer.train()
    with pytest.raises(SpecError, match=r"no data: give .*eval_dataset"):
        trainer.evaluate()
    with pytest.raises(SpecError, match="has 0 rows"):
        trainer.evaluate([])
    with pytest.raises(SpecError, match="has no predict: evaluate"):
        trainer.predict(DATASET[:4])


def test_without_labels_padding_is_not_predicted() -> None:
    seen = (torch.arange(12)[None] < torch.tensor([12, 7, 3])[:, None]).long()
    ids = ROWS[:3] * seen
    wanted = engine().eval_step(dict(input_ids=ids, attention_mask=seen, labels=ids.masked_fill(seen == 0, -100)))
    assert engine().eval_step(dict(input_ids=ids, attention_mask=seen)) == pytest.approx(wanted, rel=1e-6)
    assert engine().eval_step(dict(input_ids=ids, attention_mask=seen, labels=ids)) != pytest.approx(wanted, rel=1e-3)
