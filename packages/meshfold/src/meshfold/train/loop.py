"""The training loop of ``meshfold train`` and ``meshfold demo``, to be read from top to bottom.

Every rank runs :func:`train` with the same settings. The engine handles parallelism; the rest is a
loop as for a single device. What rank 0 writes into the folder ``out``::

    checkpoint/      the model, the optimizer and the step, loadable under any other spec; where several are kept
                     checkpoints/step-00000120/ and its like
    metrics.jsonl    a line a step, and a line an evaluation
    settings.json    the settings, for a run that resumes
    loss.png         the curves, if matplotlib is installed
    sample.txt       text that the trained model wrote, if asked for
"""

from __future__ import annotations

import math
import time
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from meshfold.checkpoint.files import write_atomically
from meshfold.data.corpus import Corpus, largest_id, open_corpus
from meshfold.data.rows import Batches
from meshfold.data.tokenizers import Tokenizer, load_tokenizer, tokenizer_of_model
from meshfold.engine import Engine
from meshfold.engine.long_runs import GracefulStop
from meshfold.experts import update_selection_bias
from meshfold.mesh import SpecError
from meshfold.mesh.spec import format_value
from meshfold.mesh.watchdog import report_errors
from meshfold.train.metrics import MetricsFile, flops_per_token, open_trackers, peak_flops, read_metrics
from meshfold.train.model_choice import ModelChoice, check_name, choose_model
from meshfold.train.optimizers import optimizer_settings
from meshfold.train.plots import can_plot, plot_loss
from meshfold.train.progress import Progress
from meshfold.train.run_folder import hold_folder, write_settings
from meshfold.train.saves import Saves
from meshfold.train.schedule import lr_schedule
from meshfold.train.settings import TrainSettings


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The checked inputs of a run; ``notes`` are remarks to print."""

    tokenizer: Tokenizer | None
    corpus: Corpus
    batches: Batches
    model: ModelChoice
    notes: tuple[str, ...] = ()


def open_inputs(settings: TrainSettings, progress: Progress) -> Inputs:
    """Open data, tokenizer and model, and check that they fit each other.

    Raises:
        SpecError: if one of them cannot be used, or they do not fit.
    """
    if settings.batch_size % settings.accumulate:
        more = -(-settings.batch_size // settings.accumulate) * settings.accumulate
        raise SpecError(
            f"accumulate={settings.accumulate} does not divide batch_size={settings.batch_size}, the sequences of one "
            f"optimizer step: each micro-step has the same number. Write --batch-size {more} or --accumulate "
            f"{math.gcd(settings.batch_size, settings.accumulate)}"
        )
    if settings.hf is not None:
        from meshfold.huggingface import require_config

        require_config(settings.hf)  # first, so that the error is not about the tokenizer
    else:
        check_name(settings.model, settings.changes)  # before tokenising for minutes
    is_text = not settings.data.endswith((".bin", ".npy"))
    tokenizer, note = _tokenizer(settings, is_text)
    corpus = open_corpus(
        settings.data,
        tokenizer,
        cache=Path(settings.out) / "tokens",
        validation=settings.validation,
        extensions=settings.extensions,
        exclude=settings.exclude,
        token_dtype=settings.token_dtype,
        max_bytes=settings.max_bytes,
        text_column=settings.text_column,
        say=progress.say,
    )
    batches = Batches(corpus, batch_size=settings.batch_size, seq_len=settings.seq_len, seed=settings.seed)
    needed = None if tokenizer is None else tokenizer.vocab_size
    model = choose_model(settings.model, settings.hf, settings.changes, vocab_size=needed, seq_len=settings.seq_len)
    if not is_text and (largest := largest_id(corpus)) >= model.vocab_size:
        raise SpecError(
            f"{settings.data!r} holds the token id {largest}, and model {model.name!r} has a vocabulary of "
            f"{model.vocab_size}: use the model or the --token-dtype that the file was made for, or --set vocab_size"
        )
    notes = (*((note,) if note else ()), *corpus.notes)
    return Inputs(tokenizer=tokenizer, corpus=corpus, batches=batches, model=model, notes=notes)


def _tokenizer(settings: TrainSettings, is_text: bool) -> tuple[Tokenizer | None, str]:
    """Return the tokenizer and a note on it: the given one, else the Hugging Face model's, else bytes; None for token ids."""
    if settings.tokenizer is not None:
        return load_tokenizer(settings.tokenizer), ""
    if not is_text:
        return None, ""
    return (load_tokenizer("byte"), "") if settings.hf is None else tokenizer_of_model(settings.hf)


def train(settings: TrainSettings, inputs: Inputs, progress: Progress) -> list[dict[str, Any]]:
    """Train; every rank calls, and gets the metrics of all steps.

    Nothing is left open at any end. A checkpoint that is being written in the background is completed, or discarded if other ranks
    may not respond; the previous one stays.

    Raises:
        SpecError: for settings that the engine refuses.
        CheckpointError: if there is nothing to resume from, or it cannot be written.
    """
    with (
        Engine(
            inputs.model.source,
            parallel=settings.parallel,
            optimizer=optimizer_of(settings),
            precision=settings.precision
            if settings.fp8 is None
            else dict(name=settings.precision, matmul="fp8", recipe=settings.fp8),
            clip_grad_norm=settings.clip or None,
            gradient_accumulation=settings.accumulate,
            lr_scheduler=lr_schedule(settings.schedule, warmup=settings.warmup, steps=settings.steps),
            rules=settings.rules,
            recompute=settings.recompute,
            compile=settings.compile,
            cuda_graph=settings.cuda_graph,
            kernels=settings.kernels,
            seed=settings.seed,
            device=settings.device,
            nonfinite=settings.nonfinite,
            watchdog=settings.watchdog,
        ) as engine,
        hold_folder(settings, engine.world),
    ):
        return _train(engine, settings, inputs, progress)


@report_errors  # inside the engine, so that an error is reported before the watchdog closes
def _train(engine: Engine, settings: TrainSettings, inputs: Inputs, progress: Progress) -> list[dict[str, Any]]:
    """Run :func:`train` with a given engine."""
    _describe(engine, progress)
    saves = Saves(engine, settings, progress)
    first = saves.resume()
    if engine.mesh.rank == 0 and first < settings.last_step:
        write_settings(settings, engine.mesh.size("data"))
    metrics = MetricsFile(settings.metrics, keep=first, write=engine.mesh.rank == 0)
    if engine.mesh.rank == 0:
        metrics.trackers = open_trackers(settings.track, Path(settings.out), asdict(settings), first=first)
    peak = settings.peak_tflops * 1e12 if settings.peak_tflops else peak_flops(engine.device, settings.precision)
    work = flops_of(inputs, settings) if peak else 0.0

    stopped = False
    with closing(metrics), closing(progress):
        with GracefulStop(engine) as stop:
            for step in range(first + 1, settings.last_step + 1):
                begin = time.perf_counter()
                micro_steps = inputs.batches.batch(step - 1).chunk(settings.accumulate)
                losses = [engine.train_step(engine.shard_batch(rows)) for rows in micro_steps]
                if settings.bias_rate:
                    update_selection_bias(engine.model, settings.bias_rate)
                numbers = measured(engine, sum(losses) / len(losses), settings, time.perf_counter() - begin)
                if peak and work:
                    numbers["mfu"] = work * numbers["tokens_per_s"] / (peak * engine.mesh.world_size)
                metrics.add(step=step, **numbers)
                progress.step(step, numbers)
                if not math.isfinite(numbers["loss"]):
                    progress.say(
                        f"warning: the loss of step {step} is {numbers['loss']}; a smaller --lr or --clip may help"
                    )
                stopped = stop.now() and step < settings.last_step
                if not stopped and _due(step, settings.eval_every, settings.last_step):
                    loss = evaluate(engine, inputs, settings)
                    if loss is not None:
                        metrics.add(step=step, validation_loss=loss)
                        progress.say(f"step {step}: validation loss {loss:.4f}")
                if stopped or _due(step, settings.save_every, settings.last_step):
                    saves.save(step)
                saves.prune()
                if stopped:
                    break
        saves.finish()

    if stopped:
        progress.say(f"stopped on request after step {saves.step}, checkpoint: {saves.path}; resume with --resume")
        return metrics.rows
    if saves.step > first:
        progress.say(f"checkpoint: {saves.path}")
        if engine.mesh.rank == 0:
            _draw(settings, inputs, progress)
    else:
        progress.say(f"nothing to do: the checkpoint is at step {first}, and step {settings.last_step} is the last")
    _write_sample(engine, settings, inputs, progress)
    return metrics.rows


def _describe(engine: Engine, progress: Progress) -> None:
    """Say what was loaded, compiled and put into fp8."""
    if engine.loaded is not None:
        progress.say(str(engine.loaded).partition("\n")[0])
    if engine.compiled_blocks is not None:
        progress.say(str(engine.compiled_blocks))
    if engine.fp8_layers is not None:
        progress.say(str(engine.fp8_layers))


def _write_sample(engine: Engine, settings: TrainSettings, inputs: Inputs, progress: Progress) -> None:
    """Generate a text after the prompt of the settings, if there is one, show it and write it to a file."""
    if settings.prompt is not None and inputs.tokenizer is not None:
        text = sample(engine, inputs.tokenizer, settings)
        if engine.mesh.rank == 0:
            write_atomically(Path(settings.out) / "sample.txt", lambda path: path.write_text(text, encoding="utf-8"))
        progress.say(f"\na sample of what it writes after {settings.prompt!r}:\n\n{text}\n")


def optimizer_of(settings: TrainSettings) -> dict[str, Any]:
    """Return the optimizer as the engine takes it."""
    chosen = optimizer_settings(settings.optimizer, lr=settings.lr, weight_decay=settings.weight_decay)
    return {**chosen, "no_decay": "norms_and_biases"}


def measured(engine: Engine, loss: float, settings: TrainSettings, seconds: float) -> dict[str, Any]:
    """Return the numbers of an optimizer step."""
    last = engine.last
    assert last is not None
    return dict(
        loss=loss,
        lr=last.lr,
        grad_norm=last.grad_norm,
        tokens_per_s=settings.batch_size * settings.seq_len / seconds,
        seconds=seconds,
        memory_bytes=memory_bytes(engine.device),
        **(dict(loss_scale=last.loss_scale, skipped=last.skipped) if settings.precision == "fp16" else {}),
    )


def flops_of(inputs: Inputs, settings: TrainSettings) -> float:
    """Return the operations of a token; 0 for a model whose code cannot run on meta tensors."""
    try:
        return flops_per_token(inputs.model.build, settings.seq_len)
    except Exception:
        return 0.0


def memory_bytes(device: torch.device) -> int:
    """Return this rank's peak memory so far: the GPU's, as counted by torch, or the process's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def evaluate(engine: Engine, inputs: Inputs, settings: TrainSettings) -> float | None:
    """Return the mean loss over a fixed part of the validation data; None if that is less than a sequence."""
    total, rows = 0.0, 0
    for batch in inputs.batches.validation(settings.eval_batches):
        for part in batch.split(settings.batch_size // settings.accumulate):
            total += engine.eval_step(engine.shard_batch(part)) * len(part)
            rows += len(part)
    return total / rows if rows else None


def sample(engine: Engine, tokenizer: Tokenizer, settings: TrainSettings) -> str:
    """Return text from the model; all ranks must call."""
    from meshfold.models import generate

    ids = [int(token) for token in tokenizer.encode(settings.prompt or "")] or [tokenizer.end]
    found = generate(
        engine.generator,
        torch.tensor([ids], device=engine.device),
        settings.sample_tokens,
        temperature=0.8,
        top_k=40,
        generator=settings.seed,
    )
    return tokenizer.decode(found[0].tolist())


def _due(step: int, every: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)


def _draw(settings: TrainSettings, inputs: Inputs, progress: Progress) -> None:
    if not can_plot():
        progress.say("no loss.png: pip install meshfold[plot]")
        return
    rows = read_metrics(settings.metrics)
    path = Path(settings.out) / "loss.png"
    curves = {
        name: [(row["step"], row[key]) for row in rows if row.get(key) is not None]
        for name, key in (("training", "loss"), ("validation", "validation_loss"))
    }
    plot_loss(path, curves, f"{inputs.model.name}, parallel={format_value(settings.parallel)}")
    progress.say(f"loss curve: {path}")
