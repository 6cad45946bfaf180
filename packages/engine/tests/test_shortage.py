"""An out-of-memory error says which tensor did not fit, and what to change."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.engine import Engine
from meshfold.engine.zero.memory import bytes_asked, describe_shortage, largest_output
from meshfold.mesh.testing import ranks
from meshfold.zero_gemini import MemoryPlanError

WORDS, WIDTH, ROWS, LENGTH = 40_000, 8, 4, 16
MESSAGE = "CUDA out of memory. Tried to allocate {} MiB. GPU 0 has a total capacity of 12.00 GiB."


class Model(nn.Module):
    """A large vocabulary: the logits take most of the memory."""

    def __init__(self, *, runs_out: bool = True) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.runs_out = runs_out

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embed(ids))
        return self.upcast(logits) if self.runs_out else logits

    def upcast(self, logits: Tensor) -> Tensor:
        raise torch.OutOfMemoryError(MESSAGE.format(f"{4 * logits.numel() / 2**20:.2f}"))


def loss_fn(logits: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


def test_the_bytes_asked_for_are_read_off_the_message() -> None:
    assert bytes_asked(torch.OutOfMemoryError(MESSAGE.format("20.50"))) == int(20.5 * 2**20)
    assert bytes_asked(torch.OutOfMemoryError("Tried to allocate 3.91 GiB.")) == round(3.91 * 2**30)
    assert bytes_asked(torch.OutOfMemoryError("no numbers")) == 0


def test_the_tensor_the_line_and_what_was_alive_are_named() -> None:
    model, ids = Model(), torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        model(ids)
    said = describe_shortage(raised.value, model, ids.numel())
    assert "64 tokens × 40,000 outputs of 'head' in float32" in said
    assert "raise torch.OutOfMemoryError" in said
    assert f"{__name__.rsplit('.', 1)[-1]}.py:" in said
    assert "logits (4 × 16 × 40,000, float32, 9.77 MiB)" in said
    assert describe_shortage(torch.OutOfMemoryError("no numbers"), model, 0) == ""


@ranks(2)
def test_an_error_under_zero_names_the_tensor_and_no_parameters() -> None:
    """Of two ranks, where one cannot make room while the other waits."""
    engine = Engine(Model(), dict(data=2, zero=dict(stage=3)), optimizer="sgd", loss_fn=loss_fn)
    ids = torch.zeros(2 * ROWS, LENGTH, dtype=torch.int64)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        engine.train_step(engine.shard_batch((ids, ids)))
    notes = "\n".join(raised.value.__notes__)
    assert "logits (4 × 16 × 40,000, float32, 9.77 MiB)" in notes
    assert "exists only while its module runs" not in notes
    engine.close()


def train(engine: Engine, ids: Tensor) -> None:
    for _ in range(4):
        engine.train_step((ids, ids))


@ranks(1)
def test_a_plan_that_does_not_fit_names_the_timestep() -> None:
    engine = Engine(
        Model(runs_out=False),
        dict(zero=dict(stage=3, gpu_memory_limit="12MiB")),
        optimizer="sgd",
        loss_fn=loss_fn,
    )
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    with pytest.raises(
        MemoryPlanError, match=r"take [\d,]+ bytes \([\d.]+ MiB\) in the (for|back)ward of 'head'"
    ) as refused:
        train(engine, ids)
    said = str(refused.value)
    assert "logits of 'head': 64 tokens × 40,000 = 2,560,000 elements, 9.77 MiB in float32" in said
    assert "kernels='auto'" in said
    engine.close()


@ranks(1)
def test_logits_that_are_left_out_are_not_named() -> None:
    engine = Engine(Model(runs_out=False), optimizer="sgd", loss_fn=loss_fn, kernels=dict(loss=True))
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    assert largest_output(engine.model, 64)["whole_logits"]
    train(engine, ids)
    assert largest_output(engine.model, 64) == {}  # no other layer
    engine.close()
    engine = Engine(
        Model(runs_out=False),
        optimizer="sgd",
        kernels=dict(loss=True),
        loss_fn=lambda logits, batch: loss_fn(logits, batch) + 1e-3 * logits.square().mean(),
    )
    train(engine, ids)
    assert largest_output(engine.model, 64)["whole_logits"]  # they were read
    engine.close()


@pytest.mark.parametrize("error", [RuntimeError("Triton Error [CUDA]: out of memory"), torch.OutOfMemoryError(MESSAGE)])
@ranks(1)
def test_errors_of_others_and_own_loops_name_no_parameters(error: RuntimeError) -> None:
    """Memory that cuBLAS, Triton or NCCL asked for, perhaps inside of an error of compiled code."""

    class Raises(Model):
        def upcast(self, logits: Tensor) -> Tensor:
            raise RuntimeError("the compiled graph failed") from error

    engine = Engine(Raises(), dict(zero=dict(stage=3)), optimizer="sgd", loss_fn=loss_fn)
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    for call in (lambda: engine.train_step((ids, ids)), lambda: engine(ids)):
        with pytest.raises(RuntimeError) as raised:
            call()
        notes = "\n".join(raised.value.__notes__)
        assert "exists only while its module runs" not in notes
        assert "logits (4 × 16 × 40,000, float32, 9.77 MiB)" in notes and notes.count("fewer tokens at once") == 1
    engine.close()


class Deep(Model):
    """With blocks, and the switch of transformers' models."""

    def __init__(self, *, runs_out: bool, checkpointing: bool = False) -> None:
        super().__init__(runs_out=runs_out)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.gradient_checkpointing = checkpointing

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return self.upcast(logits) if self.runs_out else logits


@pytest.mark.parametrize(
    ("recompute", "itself", "told"),
    [(None, False, True), ("blocks", False, False), ("auto", False, False), (None, True, False)],
)
@ranks(1)
def test_who_recomputes_is_not_told_to(recompute: str | None, itself: bool, told: bool) -> None:
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    settings = dict(optimizer="sgd", loss_fn=loss_fn, recompute=recompute)
    small = dict(zero=dict(stage=3, gpu_memory_limit="12MiB"))
    engine = Engine(Deep(runs_out=False, checkpointing=itself), small, **settings)  # type: ignore[arg-type]
    with pytest.raises(MemoryPlanError, match="fewer tokens at once") as refused:
        train(engine, ids)
    assert ("recompute='blocks'" in str(refused.value)) == told
    engine.close()
    if recompute == "auto":
        return  # goes with no placement but auto, under which one process makes room
    there = dict(zero=dict(stage=3, placement="cpu"))
    engine = Engine(Deep(runs_out=True, checkpointing=itself), there, **settings)  # type: ignore[arg-type]
    with pytest.raises(torch.OutOfMemoryError) as raised:
        train(engine, ids)
    note = "\n".join(raised.value.__notes__)
    assert "Take fewer tokens at once" in note and ("recompute='blocks'" in note) == told
    engine.close()
