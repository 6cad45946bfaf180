"""Settings of a training run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshfold.train.run_folder import KeptCheckpoints


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Options of ``meshfold train``, under the same names.

    Attributes:
        data: a folder of text, a file of text, records, or a file of token ids.
        out: the folder to write to.
        parallel: the spec.
        model: one of our own by name; ``hf`` goes before it.
        hf: folder of a Hugging Face model.
        changes: to the model of our own.
        rules: roles of submodules, by pattern of their names, that tensor parallelism cannot infer.
        tokenizer: ``"byte"`` or a folder; None for ``hf`` if that has one, else bytes.
        extensions: of the files to read; none for all text.
        token_dtype: of a ``.bin`` file.
        max_bytes: of text to read.
        text_column: of records, the field that holds the text; None for ``text``, or the only one.
        validation: share of the data to set aside.
        exclude: names of folders to leave out.
        steps: optimizer steps, from the very first on.
        stop_after: stop at this step, with the schedule of all steps; None for the last.
        batch_size: sequences of a global batch: what one optimizer step sees.
        seq_len: tokens of a sequence.
        accumulate: micro-steps that a global batch is split into.
        optimizer: adamw, adam, sgd, lion, lamb, lars, adafactor, adafactor_hf, came, muon, galore_adamw or
            galore_adafactor.
        lr: the highest learning rate.
        warmup: steps on the way up to it.
        schedule: ``"cosine"``, ``"linear"`` or ``"constant"``, after that.
        weight_decay: of matrices.
        bias_rate: how far a step moves the biases that balance sigmoid routers; 0 leaves them where they are.
        clip: largest norm of the gradient; 0 for no clipping.
        precision: fp32, bf16, fp16 or fp64.
        fp8: recipe of linear layers in fp8, in a model in bf16; None for none.
        recompute: ``"blocks"``, ``"but-attention"`` or ``"auto"``: which activations backward recomputes; None: as the model itself
            does.
        compile: every block is compiled.
        cuda_graph: forward and backward are replayed as one CUDA graph.
        seed: of weights, dropout and the order of data.
        device: ``"cpu"`` or ``"cuda"``; None for GPUs if there is one for each rank.
        nonfinite: what to do about a loss or a gradient that is nan or infinite: ``"error"``, ``"skip"``, ``"report"``.
        watchdog: seconds after which a collective that does not finish ends the run; None for the engine's default.
        track: ``"tensorboard"``, ``"wandb"``: receivers of metrics besides ``metrics.jsonl``.
        peak_tflops: of a device, for MFU; None for the table's.
        resume: from the checkpoint in ``out``; ``"auto"``: if there is one.
        eval_every: steps between evaluations; 0 for one at the end.
        eval_batches: global batches of an evaluation.
        save_every: steps between checkpoints; 0 for one at the end.
        keep: number of newest checkpoints to keep; 1 is one that the next one replaces.
        save_asynchronously: write them during training.
        prompt: start of the sample; None for no sample.
        sample_tokens: its length.
    """

    data: str
    out: str
    parallel: dict[str, Any] = field(default_factory=dict)
    model: str | None = None
    hf: str | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    rules: dict[str, str] = field(default_factory=dict)
    tokenizer: str | None = None
    extensions: tuple[str, ...] = ()
    token_dtype: str = "uint16"
    max_bytes: int | None = None
    text_column: str | None = None
    validation: float = 0.05
    exclude: tuple[str, ...] = ()
    steps: int = 100
    stop_after: int | None = None
    batch_size: int = 8
    seq_len: int = 128
    accumulate: int = 1
    optimizer: str = "adamw"
    lr: float = 3e-4
    warmup: int = 0
    schedule: str = "cosine"
    weight_decay: float = 0.1
    bias_rate: float = 0.001
    clip: float = 1.0
    precision: str = "fp32"
    fp8: str | None = None
    recompute: str | None = None
    compile: bool = False
    cuda_graph: bool = False
    kernels: str = "auto"
    seed: int = 0
    device: str | None = None
    nonfinite: str = "report"
    watchdog: float | None = None
    track: tuple[str, ...] = ()
    peak_tflops: float | None = None
    resume: bool | str = False
    eval_every: int = 0
    eval_batches: int = 8
    save_every: int = 0
    keep: int = 1
    save_asynchronously: bool = False
    prompt: str | None = None
    sample_tokens: int = 200

    @property
    def last_step(self) -> int:
        """The number of the last step to make."""
        return self.steps if self.stop_after is None else min(self.stop_after, self.steps)

    @property
    def checkpoints(self) -> KeptCheckpoints:
        """The folder of checkpoints."""
        from meshfold.train.run_folder import KeptCheckpoints

        return KeptCheckpoints(self.out, self.keep)

    @property
    def metrics(self) -> Path:
        """The file of the metrics."""
        return Path(self.out) / "metrics.jsonl"
