"""TRL's own trainers as contestants: each step is one of ``DPOTrainer.train()`` or ``GRPOTrainer.train()``, callbacks and all.

``train()`` runs in a thread that waits before each step. Weights are float32; products are in bfloat16 by autocast, as TRL's users
train with ``bf16=True``. On several GPUs layers are sharded by FSDP2, or by DeepSpeed's ZeRO; on CPUs accelerate has plain data
parallelism in place of FSDP2.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers import absent
from benchmarks.peers.absent import AbsentError

VERSION = "1.16.0"
MakeModel = Callable[..., Any]
Ids = Callable[[dict[str, Any], int, int, int], list[list[int]]]


class Steps:
    """Lets a trainer of transformers make one step at a time.

    >>> step = Steps(trainer)  # doctest: +SKIP
    >>> loss = step()          # doctest: +SKIP
    """

    def __init__(self, trainer: Any) -> None:
        from transformers import TrainerCallback

        several = int(os.environ.get("WORLD_SIZE", "1")) > 1
        sharded = trainer.accelerator.is_fsdp2 or trainer.is_deepspeed_enabled
        if several and torch.cuda.is_available() and not sharded:
            raise RuntimeError("accelerate took neither FSDP2 nor DeepSpeed: each rank would hold the whole model")
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None
        self._device: torch.device = trainer.args.device
        steps = self

        class OneByOne(TrainerCallback):  # type: ignore[misc]
            def on_step_begin(self, *given: Any, **named: Any) -> None:
                # Only here has the last step sent everything, the sum of its logged loss too: the caller may send meanwhile.
                steps._done.release()
                steps._go.acquire()

        trainer.add_callback(OneByOne())
        self._trainer = trainer
        threading.Thread(target=self._run, daemon=True).start()
        self._wait()

    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # threads have one each
        try:
            self._trainer.train()
            self._error = RuntimeError("TRL's training ended before the benchmark")
        except BaseException as error:
            self._error = error
        self._done.release()

    def __call__(self) -> Tensor:
        """Make a step; return its loss where the trainer logs it, else nan.

        Raises:
            RuntimeError: if training ended.
        """
        self._go.release()
        self._wait()
        logged = [row["loss"] for row in self._trainer.state.log_history if "loss" in row]
        return torch.tensor(logged[-1] if logged else float("nan"), device=self._device)

    def _wait(self) -> None:
        """Wait until the trainer is about to begin a step."""
        self._done.acquire()
        if self._error is not None:
            raise RuntimeError(str(self._error)) from self._error


def tokenizer(words: int) -> Any:
    """Return a tokenizer whose words are numbers; the last one ends texts."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({f"<{word}>": word for word in range(words)}, unk_token="<0>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<0>", eos_token=f"<{words - 1}>", pad_token="<0>", padding_side="left"
    )


def text(ids: list[int]) -> str:
    """Return ids as text of that tokenizer."""
    return " ".join(f"<{word}>" for word in ids)


def settings_of(job: dict[str, Any], rows: int, zero: int | None = None, *, recompute: bool = True) -> dict[str, Any]:
    """Return the arguments that trainers of transformers share.

    Args:
        job: of the contestant.
        rows: of all ranks in a step.
        zero: stage of DeepSpeed's ZeRO, which shards state and parameters; None: FSDP2 does, where there are several ranks.
        recompute: blocks are recomputed in backward.

    Raises:
        AbsentError: for a stage without DeepSpeed.
    """
    ranks, gpu = int(os.environ.get("WORLD_SIZE", "1")), torch.cuda.is_available()
    sharded: dict[str, Any] = {}
    if zero is not None:
        sharded = dict(deepspeed=_deepspeed(zero))
    elif ranks > 1:
        sharded = dict(
            fsdp="full_shard auto_wrap",
            fsdp_config=dict(
                version=2, transformer_layer_cls_to_wrap=["LlamaDecoderLayer"], reshard_after_forward=True
            ),
        )
    return dict(
        output_dir=tempfile.mkdtemp(prefix="trl-"),
        per_device_train_batch_size=rows // ranks // job["micro_steps"],
        gradient_accumulation_steps=job["micro_steps"],
        max_steps=1_000_000,
        learning_rate=1e-6,
        weight_decay=0.01,
        max_grad_norm=1.0,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused" if gpu else "adamw_torch",
        bf16=job["dtype"] == "bfloat16",
        use_cpu=not gpu,
        gradient_checkpointing=recompute,
        gradient_checkpointing_kwargs=dict(use_reentrant=False),
        report_to="none",
        save_strategy="no",
        logging_strategy="steps",
        logging_steps=1,
        disable_tqdm=True,
        **sharded,
    )


def _deepspeed(stage: int) -> dict[str, Any]:
    """Return DeepSpeed's settings: all state on GPUs, what accelerate knows filled in by it."""
    absent.deepspeed()
    return {
        "zero_optimization": dict(stage=stage, overlap_comm=True, contiguous_gradients=True),
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": "auto"},
        "gradient_clipping": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "steps_per_print": 10**9,
    }


def dpo(
    job: dict[str, Any], model_of: MakeModel, random_ids: Ids, zero: int | None = None, *, recompute: bool = True
) -> Steps:
    """Return the steps of ``DPOTrainer``, whose reference is a copy that scores in the step.

    Args:
        job, model_of, random_ids: as of the other contestants.
        zero, recompute: as of :func:`settings_of`.

    Raises:
        AbsentError: without TRL, or without DeepSpeed where it is asked for.
    """
    trl, datasets = _installed()
    rows, completion = job["rows"], job["completion"]
    # TRL ends each completion itself: a token less.
    prompts, chosen, rejected = (
        random_ids(job, rows, n, seed) for seed, n in enumerate((job["prompt"], completion - 1, completion - 1))
    )
    data = [
        dict(prompt=text(p), chosen=" " + text(a), rejected=" " + text(b))
        for p, a, b in zip(prompts, chosen, rejected, strict=True)
    ]
    settings = trl.DPOConfig(
        beta=0.1, max_length=job["prompt"] + completion, **settings_of(job, rows, zero, recompute=recompute)
    )
    return Steps(
        trl.DPOTrainer(
            model_of(job, "float32"),
            model_of(job, "bfloat16" if settings.bf16 else "float32"),
            settings,
            train_dataset=datasets.Dataset.from_list(data),
            processing_class=tokenizer(job["model"]["vocab_size"]),
        )
    )


def grpo(job: dict[str, Any], model_of: MakeModel, random_ids: Ids, **how: Any) -> Steps:
    """Return the steps of ``GRPOTrainer`` without a reference, which samples by transformers' ``generate``.

    Args:
        job, model_of, random_ids: as of the other contestants.
        how: further settings of ``GRPOConfig``. For ``use_transformers_continuous_batching`` TRL casts the model's weights to
            bfloat16, and trains on with these.

    Raises:
        AbsentError: without TRL.
    """
    trl, datasets = _installed()
    rows, group = job["rows"], job["group"]
    settings = trl.GRPOConfig(
        num_generations=group,
        max_completion_length=job["completion"],
        beta=0.0,
        temperature=1.0,
        generation_kwargs=dict(top_k=0, top_p=1.0),
        **how,
        **settings_of(job, rows * group),
    )
    return Steps(
        trl.GRPOTrainer(
            model_of(job, "float32"),
            _even,
            settings,
            datasets.Dataset.from_list([dict(prompt=text(p)) for p in random_ids(job, rows, job["prompt"], 0)]),
            processing_class=tokenizer(job["model"]["vocab_size"]),
        )
    )


def _even(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Return the share of even words."""
    return [sum(word % 2 == 0 for word in ids) / max(len(ids), 1) for ids in completion_ids]


def _installed() -> tuple[Any, Any]:
    try:
        import datasets
        import trl  # type: ignore[import-not-found]
    except ImportError as error:
        raise AbsentError(f"{error.name} is not installed: pip install trl=={VERSION}") from error
    return trl, datasets
