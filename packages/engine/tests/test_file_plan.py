"""What a save beside the training takes of the interpreter: a plan made once, copies begun at once, and turns for the training."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshfold.checkpoint import staging
from meshfold.checkpoint.staging import (
    BackgroundCopies,
    CopyPair,
    HostCopyQueue,
    StreamCopyQueue,
)
from meshfold.engine import Engine
from meshfold.engine.checkpoints import rank_file
from meshfold.engine.checkpoints.checkpoint import Checkpoint
from meshfold.engine.checkpoints.rank_file import FilePlan
from meshfold.engine.checkpoints.saving import BackgroundSave
from meshfold.engine.states.protocols import Source
from meshfold.models import GPT, GPTConfig


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[FilePlan]:
    """The plans that are made."""
    found: list[FilePlan] = []

    class Noted(FilePlan):
        def __init__(self, tensors: rank_file.Tensors) -> None:
            super().__init__(tensors)
            found.append(self)

    monkeypatch.setattr(rank_file, "FilePlan", Noted)
    return found


def gpt() -> GPT:
    return GPT(GPTConfig(vocab_size=37, hidden=16, layers=2, heads=2, max_positions=8))


def tensors_of(path: Path) -> dict[str, Tensor]:
    stored = Checkpoint(path)
    stored.verify()
    found = {f"model/{name}": value[...] for name, value in stored.model.items()}
    return found | {f"optimizer/{name}": value[...] for name, value in stored.optimizer.items()}


@pytest.mark.few(2)
@pytest.mark.parametrize("zero", [None, 1, 3], ids=["plain", "zero 1", "zero 3"])
def test_later_saves_take_the_plan_of_the_first(zero: int | None, tmp_path: Path, made: list[FilePlan]) -> None:
    parallel = {} if zero is None else dict(zero=dict(stage=zero, placement="cpu"))
    batch = torch.randint(37, (2, 6), generator=torch.Generator().manual_seed(0))
    with Engine(gpt, parallel, optimizer="adamw", precision="bf16") as engine:
        for number in range(3):
            engine.train_step(batch)
            engine.save(tmp_path / "beside", asynchronous=True)
            engine.save(tmp_path / "at once")
            there, here = tensors_of(tmp_path / "at once"), tensors_of(tmp_path / "beside")
            assert there.keys() == here.keys()
            assert all(torch.equal(there[name], here[name]) for name in there)
            assert len(made) == 2, number  # the model's and the optimizer's


def test_a_file_is_written_in_one_call_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, tensors = os.writev, []

    def writev(file: int, data: Sequence[memoryview]) -> int:
        tensors.append(len(data))
        return original(file, data)

    monkeypatch.setattr(os, "writev", writev)
    with Engine(gpt, optimizer="adamw", precision="bf16") as engine:
        engine.train_step(torch.randint(37, (2, 6)))
        engine.save(tmp_path / "ckpt", asynchronous=True)
    parameters = len([*gpt().parameters()])
    assert tensors == [parameters, 3 * parameters]  # of the model; two moments and a step of each


def test_sources_go_when_what_is_kept_of_them_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, alive = BackgroundCopies.run, []

    def run(self: BackgroundCopies, pairs: Iterable[CopyPair]) -> None:
        alive.append(sum(type(one) is Source for one in gc.get_objects()))
        original(self, pairs)

    monkeypatch.setattr(BackgroundCopies, "run", run)
    gc.collect()  # what earlier tests have left
    with Engine(gpt, optimizer="adamw", precision="bf16") as engine:
        engine.train_step(torch.randint(37, (2, 6)))
        engine.save(tmp_path / "ckpt", asynchronous=True)
    assert alive == [0]


class Growing(nn.Module):
    """With a buffer that may become another one."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(x)
        return found


@pytest.mark.parametrize("other", [torch.arange(5.0), torch.arange(2, dtype=torch.int64)], ids=["shape", "dtype"])
def test_tensors_that_became_others_are_planned_anew(other: Tensor, tmp_path: Path, made: list[FilePlan]) -> None:
    model = Growing()
    with Engine(model, optimizer="sgd", loss_fn=lambda output, batch: output.mean()) as engine:
        engine.save(tmp_path / "before", asynchronous=True)
        model.seen = other.clone()
        engine.save(tmp_path / "after", asynchronous=True)
    assert len(made) == 3  # the optimizer has nothing, twice
    assert torch.equal(tensors_of(tmp_path / "before")["model/seen"], torch.zeros(2))
    found = tensors_of(tmp_path / "after")["model/seen"]
    assert found.dtype == other.dtype and torch.equal(found, other)


def test_a_plan_keeps_no_tensor(tmp_path: Path) -> None:
    engine = Engine(gpt, optimizer="adamw", precision="bf16")
    engine.train_step(torch.randint(37, (2, 6)))
    engine.save(tmp_path / "ckpt", asynchronous=True)
    engine.close()
    plans = engine.saver._plans
    assert len(plans) == 2
    held = [weakref.ref(p) for p in engine.model.parameters()]
    assert engine.optimizer is not None
    held += [weakref.ref(state["exp_avg"]) for state in engine.optimizer.state.values()]
    del engine
    gc.collect()
    assert len(held) > 30 and all(one() is None for one in held)


def test_save_returns_before_its_thread_works(tmp_path: Path) -> None:
    save = BackgroundSave(tmp_path / "ckpt", None)  # type: ignore[arg-type]  # nobody else is asked
    seen: list[float] = []
    save.begin(lambda: seen.append(save.blocked_seconds))
    save.join()
    assert seen == [save.blocked_seconds] and seen[0] > 0.0


def test_the_first_copies_do_not_wait_for_the_last_ones_to_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "SLICE_BYTES", 32)
    found: list[int] = []
    at_queue: list[int] = []

    class Noting(HostCopyQueue):
        def takes(self, tensor: Tensor) -> bool:
            return True

        def queue(self, pairs: Sequence[CopyPair]) -> Callable[[], None]:
            at_queue.append(len(found))
            return lambda: None

    def pairs() -> Iterator[CopyPair]:
        for number in range(8):
            found.append(number)
            yield torch.zeros(4), torch.ones(4)

    BackgroundCopies(Noting()).run(pairs())
    assert at_queue == [3, 5, 7, 8]  # two fill a slice, the next one shows that it is full


class Stands:
    """In for a stream and an event of CUDA: says what was asked of it."""

    log: list[str]

    def __init__(self, *args: Any, **options: Any) -> None: ...

    def record(self, stream: Any = None) -> None:
        self.log.append("record")

    def wait_event(self, event: Any) -> None:
        self.log.append("wait")

    def synchronize(self) -> None:
        self.log.append("synchronize")


def test_a_stream_copies_tensors_of_all_kinds_between_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    class Noted(Stands):
        pass

    Noted.log = log
    monkeypatch.setattr(torch.cuda, "Stream", Noted)
    monkeypatch.setattr(torch.cuda, "Event", Noted)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Noted())
    foreach = torch._foreach_copy_

    def noted_copy(*args: Any, **options: Any) -> Any:
        log.append("copies")
        assert options == dict(non_blocking=True)
        return foreach(*args, **options)

    monkeypatch.setattr(torch, "_foreach_copy_", noted_copy)
    of = [
        torch.arange(3.0),
        torch.arange(4),
        torch.tensor(True),
        torch.zeros(0, 2),
        torch.arange(6.0).view(2, 3).t(),
    ]
    to = [torch.full_like(one, 1).contiguous() for one in of]
    lane = StreamCopyQueue(torch.device("cpu"))
    lane.begin()
    with torch.no_grad():
        waits = [
            lane.queue([*zip(to[:3], of[:3], strict=True)]),
            lane.queue([*zip(to[3:], of[3:], strict=True)]),
        ]
    assert all(torch.equal(one, other) for one, other in zip(to, of, strict=True))
    waits[0]()
    lane.hold()
    assert log == ["record", "wait", "copies", "record", "copies", "record", "synchronize", "wait"]


def test_a_thread_that_computes_lets_others_have_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    slept: list[float] = []
    monkeypatch.setattr(staging.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(staging.time, "sleep", lambda seconds: slept.append(now[0]))
    for number in staging.with_pauses(range(10)):
        assert len(slept) == number // 2
        now[0] += 0.6 * staging.BURST_S
    assert len(slept) == 5
