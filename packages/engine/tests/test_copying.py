"""The order of a save beside the training: copies as late as a GPU could make them, and who waits for them."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshfold.checkpoint import staging
from meshfold.checkpoint.staging import BackgroundCopies, CopyPair, HostCopyQueue
from meshfold.engine import Engine
from meshfold.engine.checkpoints import saving
from meshfold.engine.checkpoints.checkpoint import Checkpoint
from meshfold.engine.checkpoints.rank_file import RankFile
from meshfold.engine.checkpoints.saving import BackgroundSave
from meshfold.models import GPT, GPTConfig


class LateLane:
    """A stream that does nothing before it must: when somebody waits for it, or at the end of the test.

    Attributes:
        log: what happened, in order.
    """

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self._queued: list[CopyPair] = []
        self._done = threading.Event()
        self.copied = 0

    def takes(self, tensor: Tensor) -> bool:
        return True

    def begin(self) -> None:
        self.log.append("begin")

    def queue(self, pairs: Sequence[CopyPair]) -> Callable[[], None]:
        assert not self._done.is_set(), "queued after somebody had waited for all"
        self._queued += pairs
        return self._wait

    def _wait(self) -> None:
        assert self._done.wait(60), "nobody waited for the copies, and the test did not end them"

    def settle(self) -> None:
        raise AssertionError("all tensors are taken")

    def hold(self) -> None:
        self.log.append("hold")
        self.run()

    @torch.no_grad()
    def run(self) -> None:
        """Make the copies now, of what is there now."""
        for to, of in self._queued:
            to.copy_(of)
        self.copied += len(self._queued)
        self._queued.clear()
        self._done.set()


def late(lanes: list[LateLane], log: list[str]) -> Callable[[torch.device], LateLane]:
    """Makes the lane of a device."""

    def lane_of(device: torch.device) -> LateLane:
        lanes.append(LateLane(log))
        return lanes[-1]

    return lane_of


def release(save: BackgroundSave, lane: LateLane) -> None:
    """Let copies be made once all are queued."""
    assert save.copying is not None
    save.copying._queued.wait()
    lane.run()


def model() -> GPT:
    return GPT(GPTConfig(vocab_size=37, hidden=16, layers=2, heads=2, max_positions=8))


def tensors_of(path: Path) -> dict[str, Tensor]:
    stored = Checkpoint(path)
    return {
        f"{part}/{name}": value[...]
        for part, found in (("model", stored.model), ("optimizer", stored.optimizer))
        for name, value in found.items()
    }


HOST, DEVICE = dict(zero=dict(stage=3, placement="cpu")), dict(zero=dict(stage=3))
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "plain": ({}, dict(precision="fp32"), ["begin", "forward", "backward", "hold", "step"]),
    "masters": ({}, dict(precision="bf16"), ["begin", "forward", "backward", "hold", "step"]),
    "chunks": (DEVICE, dict(precision="bf16"), ["begin", "forward", "backward", "hold", "step"]),
    "chunks on the host": (HOST, dict(precision="bf16"), ["begin", "forward", "backward", "hold", "step"]),
    "chunks that step in backward": (
        DEVICE,
        dict(precision="bf16", clip_grad_norm=None),
        ["begin", "forward", "hold", "backward", "step"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_forward_and_backward_run_beside_the_copies_and_the_step_waits(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    lanes: list[LateLane] = []
    monkeypatch.setattr(saving, "copy_queue", late(lanes, log))
    monkeypatch.setattr(staging, "AT_ONCE", 10**6)  # so that the whole save is late
    parallel, settings, order = CASES[case]
    rows = list(torch.randint(37, (3, 2, 6), generator=torch.Generator().manual_seed(0)))
    arguments: dict[str, Any] = dict(optimizer=dict(name="adamw", lr=1e-2), clip_grad_norm=1.0)
    with Engine(model, parallel, **{**arguments, **settings}) as engine:
        engine.train_step(rows[0])
        engine.save(tmp_path / "at once")
        _noted(engine, log, monkeypatch)
        save = engine.save(tmp_path / "beside", asynchronous=True)
        assert save is not None and not save.done
        assert lanes[0].copied == 0  # it has returned, and nothing was copied
        engine.train_step(rows[1])
        if "hold" not in log:  # then what is copied is wrong, and the test ends
            lanes[0].run()
        save.wait()
        assert log == order
        engine.train_step(rows[2])  # nobody waits any more
        assert log.count("hold") == 1
    there, here = tensors_of(tmp_path / "at once"), tensors_of(tmp_path / "beside")
    assert there.keys() == here.keys() and len(there) == 4 * 28
    assert all(torch.equal(there[name], here[name]) for name in there)


def _noted(engine: Engine, log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Write down when the training does what."""
    states = engine.states
    step, backward = states.step, states.backward
    engine.model.register_forward_pre_hook(lambda module, args: log.append("forward"))

    def noted_step() -> None:
        log.append("step")
        step()

    def noted_backward(kind: Any) -> Any:
        log.append("backward")
        return backward(kind)

    monkeypatch.setattr(states, "step", noted_step)
    monkeypatch.setattr(states, "backward", noted_backward)


@pytest.mark.parametrize("change", ["load", "load_state_dict", "by hand"])
def test_other_changes_wait_too(change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    lanes: list[LateLane] = []
    monkeypatch.setattr(saving, "copy_queue", late(lanes, log))
    engine = Engine(model, optimizer=dict(name="sgd", lr=1e-2))
    engine.save(tmp_path / "at once")
    wanted = tensors_of(tmp_path / "at once")
    other = {name: value + 1 for name, value in engine.full_state_dict().items()}
    save = engine.save(tmp_path / "beside", asynchronous=True)
    assert save is not None
    if change == "load_state_dict":
        engine.load_state_dict(other)
    elif change == "load":  # waits for the whole save, which another thread lets go on
        threading.Thread(target=lambda: release(save, lanes[0])).start()
        engine.load(tmp_path / "at once")
        assert save.done
    else:
        save.wait_until_copied()
        with torch.no_grad():
            for parameter in engine.model.parameters():
                parameter.fill_(7.0)
    save.wait()
    found = tensors_of(tmp_path / "beside")
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    engine.close()


class Counting(nn.Module):
    """Its forward changes a buffer."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        found: Tensor = self.linear(x)
        return found


def test_a_forward_may_change_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lanes: list[LateLane] = []
    monkeypatch.setattr(saving, "copy_queue", late(lanes, []))
    engine = Engine(Counting(), optimizer=dict(name="sgd", lr=1e-2), loss_fn=lambda output, batch: output.mean())
    for _ in range(3):
        engine.train_step(torch.ones(2, 2))
    save = engine.save(tmp_path / "beside", asynchronous=True)
    assert save is not None
    engine.train_step(torch.ones(2, 2))
    save.wait()
    assert float(Checkpoint(tmp_path / "beside").model["calls"]) == 3.0
    engine.close()


class Normed(nn.Module):
    """Its forward changes two buffers, and puts another tensor in the place of a third one."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.linear = nn.Linear(2, 1)
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + x.mean().detach()
        found: Tensor = self.linear(self.norm(x))
        return found


class Replacing(torch.optim.Optimizer):
    """Momentum, in a new tensor at every step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, dict(lr=1e-2))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["momentum"] = 0.9 * state.get("momentum", 0.0) + parameter.grad
                    parameter -= group["lr"] * state["momentum"]


def normed() -> Engine:
    rows = torch.randn(4, 2, generator=torch.Generator().manual_seed(1))
    engine = Engine(Normed(), optimizer=Replacing, loss_fn=lambda output, batch: output.square().mean())
    engine.train_step(rows)
    return engine


def by_hand(engine: Engine) -> None:
    """Put other tensors in the place of the model's and of the optimizer's, without asking."""
    assert engine.optimizer is not None
    state = engine.optimizer.state_dict()
    for one in state["state"].values():
        one["momentum"] = one["momentum"] + 1
    engine.optimizer.load_state_dict(state)
    engine.optimizer.param_groups[0]["lr"] = 7.0
    engine.model.linear.weight = nn.Parameter(torch.full((1, 2), 7.0))  # type: ignore[union-attr]


AFTER: dict[str, Callable[[Engine, Path], object]] = {
    "nothing": lambda engine, path: None,
    "a forward": lambda engine, path: engine.model(torch.ones(3, 2)),
    "a step": lambda engine, path: engine.train_step(torch.ones(3, 2)),
    "a load": lambda engine, path: engine.load(path / "first"),
    "a state dict": lambda engine, path: engine.load_state_dict(
        {name: value + 1 for name, value in engine.full_state_dict().items()}
    ),
    "by hand": lambda engine, path: by_hand(engine),
    "a save": lambda engine, path: engine.save(path / "next", asynchronous=True),
    "a save at once": lambda engine, path: engine.save(path / "next"),
    "the end": lambda engine, path: engine.close(),
}


@pytest.mark.parametrize("after", AFTER)
def test_a_save_is_of_the_moment_of_its_call_though_its_thread_begins_later(
    after: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for the head start: who waits for the thread lets it begin."""
    engine = normed()
    engine.save(tmp_path / "first")
    engine.train_step(torch.eye(2))
    engine.save(tmp_path / "at once")
    monkeypatch.setattr(saving, "HEAD_START_S", 3600.0)
    made: list[str] = []
    original = RankFile.lay_out

    def lay_out(self: RankFile, *args: Any) -> Any:
        made.append(self.path.name)
        return original(self, *args)

    monkeypatch.setattr(RankFile, "lay_out", lay_out)
    save = engine.save(tmp_path / "beside", asynchronous=True)
    assert save is not None
    time.sleep(0.05)
    assert not made and not save.done  # the thread leaves the interpreter to the training
    AFTER[after](engine, tmp_path)
    save.wait()
    engine.close()
    there, here = tensors_of(tmp_path / "at once"), tensors_of(tmp_path / "beside")
    assert there.keys() == here.keys() and "optimizer/linear.weight/momentum" in here and "model/mean" in here
    assert all(torch.equal(there[name], here[name]) for name in there)
    groups = [Checkpoint(tmp_path / name).state["optimizer"]["groups"] for name in ("at once", "beside")]
    assert groups[0] == groups[1]


def test_what_is_copied_is_not_kept_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied, original = threading.Event(), saving.Saver._write

    def late_write(self: saving.Saver, *arguments: Any) -> None:
        copied.wait(250.0)
        original(self, *arguments)

    monkeypatch.setattr(saving.Saver, "_write", late_write)
    with normed() as engine:
        assert engine.optimizer is not None
        kept = [weakref.ref(state["momentum"]) for state in engine.optimizer.state.values()]
        save = engine.save(tmp_path / "beside", asynchronous=True)
        assert save is not None
        engine.train_step(torch.eye(2))  # puts others in their place
        until = time.monotonic() + 120.0
        while any(one() is not None for one in kept) and time.monotonic() < until:
            time.sleep(0.01)
        assert not save.done and len(kept) == 4
        found = [one() for one in kept]
        copied.set()
    assert found == [None] * 4


def test_a_bus_is_never_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "SLICE_BYTES", 64)
    waits: list[int] = []
    sizes: list[int] = []

    class Bus(HostCopyQueue):
        def takes(self, tensor: Tensor) -> bool:
            return True

        def queue(self, pairs: Sequence[CopyPair]) -> Callable[[], None]:
            assert len(sizes) - len(waits) < staging.AT_ONCE
            number = len(sizes)
            sizes.append(sum(of.nbytes for _, of in pairs))
            for to, of in pairs:
                to.copy_(of)
            return lambda: waits.append(number)

    sources = [
        torch.arange(100.0),
        torch.arange(3.0),
        torch.arange(4.0),
        torch.tensor(5.0),
        torch.zeros(0, 4),
        torch.arange(60.0).view(6, 10).t(),
        torch.arange(128).to(torch.uint8),
    ]
    pairs = [(torch.full_like(of, 99).contiguous(), of) for of in sources]
    BackgroundCopies(Bus()).run(pairs)
    assert all(torch.equal(to, of) for to, of in pairs)
    assert max(sizes) <= 64 and sum(sizes) == sum(of.nbytes for of in sources)
    assert len(sizes) < 20  # small ones travel together
    assert waits == [*range(len(sizes))]


def test_who_waits_is_let_go_when_copying_fails() -> None:
    class Broken(HostCopyQueue):
        def takes(self, tensor: Tensor) -> bool:
            return True

        def queue(self, pairs: Sequence[CopyPair]) -> Callable[[], None]:
            raise RuntimeError("the device is gone")

    beside = BackgroundCopies(Broken())
    with pytest.raises(RuntimeError, match="the device is gone"):
        beside.run([(torch.zeros(1), torch.ones(1))])
    beside.hold()
