"""The engine's optimizer is stepped by the engine: by hand it would find no gradients, so it says what to call."""

from __future__ import annotations

import gc
import warnings
from contextlib import nullcontext
from typing import Any
from weakref import proxy, ref

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from meshfold.engine import Engine, TrainingError
from meshfold.mesh.testing import ranks
from meshfold.models import GPT, GPTConfig

IDS = torch.arange(16).view(2, 8)
SPECS: dict[str, dict[str, Any]] = {
    "data": dict(data=2),
    "tensor": dict(tensor=2),
    "pipeline": dict(pipeline=dict(size=2, microbatches=2)),
    "zero 1": dict(data=2, zero=dict(stage=1)),
    "zero 3": dict(data=2, zero=dict(stage=3)),
}
OPTIMIZERS: dict[str, Any] = {
    "our kernels under zero": dict(name="adamw", lr=0.1),
    "torch's own": dict(name=torch.optim.RMSprop, lr=0.1),
    "state from the start": dict(name=torch.optim.Adagrad, lr=0.1),
}


def gpt() -> GPT:
    return GPT(GPTConfig(vocab_size=37, hidden=16, layers=2, heads=2, max_positions=16))


def backward(engine: Engine) -> None:
    """A backward without a step."""
    mine = engine.shard_batch(IDS)
    if engine.pipeline is None:
        engine.backward(engine(mine, labels=mine).loss)
    else:
        engine.train_step(mine)


def unchanged(before: dict[str, Tensor], engine: Engine) -> bool:
    return all(torch.equal(value, before[name]) for name, value in engine.full_state_dict().items())


@pytest.mark.few(3)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("spec", SPECS)
@ranks(2)
def test_a_step_by_hand_says_what_to_call(spec: str, optimizer: str, precision: str) -> None:
    engine = Engine(gpt, SPECS[spec], optimizer=OPTIMIZERS[optimizer], precision=precision, gradient_accumulation=2)
    before = engine.full_state_dict()
    backward(engine)
    assert engine.optimizer is not None
    with pytest.raises(TrainingError, match=r"\.step\(\) was called by hand.* call engine\.step\(\)"):
        engine.optimizer.step()
    assert unchanged(before, engine)
    assert engine.step() and not unchanged(before, engine)  # the gradients are still there
    engine.close()


@pytest.mark.few(2)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("spec", ["data", "zero 1", "zero 3"])
@ranks(2)
def test_a_scaler_of_ones_own_says_what_to_write(spec: str, optimizer: str) -> None:
    engine = Engine(gpt, SPECS[spec], optimizer=OPTIMIZERS[optimizer])
    scaler, mine = torch.amp.GradScaler("cpu", init_scale=8.0), engine.shard_batch(IDS)
    engine.backward(scaler.scale(engine(mine, labels=mine).loss))
    assert engine.optimizer is not None
    with pytest.raises(
        TrainingError, match=r"by hand.*Leave the GradScaler out: with Engine\(\.\.\., precision='fp16'\)"
    ):
        scaler.step(engine.optimizer)
    assert not {"grad_scale", "found_inf"} & set(vars(engine.optimizer))
    engine.close()


def after_a_step(spec: str, optimizer: str, precision: str, *, unscales: bool) -> dict[str, Tensor]:
    """Return the model after a step of a loop with a scaler, that unscales before ``engine.step()``, or without one."""
    settings: dict[str, Any] = dict(optimizer=OPTIMIZERS[optimizer], precision=precision, clip_grad_norm=0.5)
    with Engine(gpt, SPECS[spec], **settings) as engine:
        scaler, mine = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=unscales), engine.shard_batch(IDS)
        assert engine.optimizer is not None
        for _ in range(2):  # the second time after a step
            engine.backward(scaler.scale(engine(mine, labels=mine).loss))
            scaler.unscale_(engine.optimizer)
            engine.step()
            scaler.update()
        return engine.full_state_dict()


@pytest.mark.few(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("spec", ["data", "tensor", "zero 1", "zero 3"])
@ranks(2)
def test_gradients_that_are_unscaled_by_hand_are_right_or_refused(spec: str, optimizer: str, precision: str) -> None:
    if precision == "fp32" and "zero" not in spec:  # the optimizer has the parameters themselves
        wanted, found = (after_a_step(spec, optimizer, precision, unscales=own) for own in (False, True))
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
        return
    refusals = r"unscales by hand .* Leave the GradScaler out|Attempting to unscale FP16 gradients"  # torch's, of weights in fp16
    with pytest.raises((TrainingError, ValueError), match=refusals):
        after_a_step(spec, optimizer, precision, unscales=True)


@ranks(2)
def test_gradients_of_the_optimizers_own_tensors_are_refused_and_may_be_released() -> None:
    with Engine(gpt, SPECS["zero 1"], optimizer=OPTIMIZERS["torch's own"], precision="bf16") as engine:
        optimizer = engine.optimizer
        assert optimizer is not None
        optimizer.zero_grad()
        backward(engine)
        with pytest.raises(TrainingError, match=r"engine's optimizer .* which gets them in engine\.step\(\)"):
            torch.nn.utils.clip_grad_norm_([one for group in optimizer.param_groups for one in group["params"]], 1.0)
        optimizer.zero_grad()
        assert engine.step()


@pytest.mark.few(1)
@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("spec", ["data", "zero 3"])
@ranks(2)
def test_a_step_of_scaled_gradients_is_warned_of_once(spec: str, divided: bool) -> None:
    with (
        Engine(gpt, SPECS[spec], optimizer="sgd", clip_grad_norm=0.5) as engine,
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        scaler, mine = torch.amp.GradScaler("cpu", init_scale=8.0), engine.shard_batch(IDS)
        for _ in range(2):
            loss = scaler.scale(engine(mine, labels=mine).loss)
            engine.backward(loss / 2 if divided else loss)
            engine.step()
    (found,) = [str(one.message) for one in said if "GradScaler" in str(one.message)]
    assert "a GradScaler has multiplied by 8, and scaler.unscale_(engine.optimizer) was not called" in found
    assert "Leave the GradScaler out" in found


class Kept:
    """Hooks of a user's that keep each tensor that autograd saves, and give it once."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def pack(self, tensor: Tensor) -> tuple[int, Tensor]:
        self.tensors.append(tensor.clone())
        return len(self.tensors) - 1, self.tensors[-1]

    def unpack(self, kept: tuple[int, Tensor]) -> Tensor:
        found, self.tensors[kept[0]] = self.tensors[kept[0]], torch.empty(())
        return found


@pytest.mark.parametrize("spec", ["data", "zero 3"])
@ranks(2)
def test_a_scale_that_a_hook_of_saved_tensors_has_copied_is_warned_of(spec: str) -> None:
    """And the hook is not asked for it, which may give it once, nor a weak proxy for its class, whose object may be gone."""
    gone = proxy(torch.nn.Identity())
    wanted = after_a_scaled_step(spec, Kept(), init_scale=8.0, said="a GradScaler has multiplied by 8, and")
    assert all(
        torch.equal(value, wanted[name]) for name, value in after_a_scaled_step(spec, None, init_scale=8.0).items()
    )
    after_a_scaled_step(spec, Kept(), init_scale=8.0, factor=4.0)  # another number is the user's own
    del gone  # it was there until now


def after_a_scaled_step(
    spec: str, kept: Kept | None, *, init_scale: float, factor: float | None = None, said: str = "GradScaler"
) -> dict[str, Tensor]:
    """Return the model after a step whose loss a scaler has multiplied under a user's hook, or a factor beside a scaler."""
    with Engine(gpt, SPECS[spec], optimizer="sgd") as engine, warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        scaler, mine = torch.amp.GradScaler("cpu", init_scale=init_scale), engine.shard_batch(IDS)
        with nullcontext() if kept is None else saved_tensors_hooks(kept.pack, kept.unpack):
            loss = engine(mine, labels=mine).loss
            scaled = scaler.scale(loss)
            engine.backward(scaled if factor is None else loss * torch.tensor(factor))
        engine.step()
        assert any(said in str(one.message) for one in heard) == (factor is None)
        return engine.full_state_dict()


@ranks(2)
def test_a_step_of_unscaled_gradients_or_of_a_loss_with_a_factor_is_not_warned_of() -> None:
    with Engine(gpt, SPECS["data"], optimizer="sgd") as engine, warnings.catch_warnings():
        warnings.simplefilter("error")
        scaler, mine = torch.amp.GradScaler("cpu", init_scale=8.0), engine.shard_batch(IDS)
        engine.backward(scaler.scale(engine(mine, labels=mine).loss))
        assert engine.optimizer is not None
        scaler.unscale_(engine.optimizer)
        engine.step()
        for factor in (torch.tensor(8.0), 8.0):
            engine.backward(engine(mine, labels=mine).loss * factor)
            engine.step()


@ranks(2)
def test_a_scaler_of_an_optimizer_of_ones_own_says_what_to_write() -> None:
    with Engine(gpt, SPECS["zero 1"], optimizer="sgd") as engine:
        own = torch.optim.SGD(engine.model.parameters(), lr=0.1)
        scaler, mine = torch.amp.GradScaler("cpu", init_scale=8.0), engine.shard_batch(IDS)
        engine.backward(scaler.scale(engine(mine, labels=mine).loss))
        with pytest.raises(TrainingError, match="Leave the GradScaler out"):
            scaler.step(own)


def test_a_dropped_engine_takes_its_optimizer_along() -> None:
    engine = Engine(gpt, optimizer=OPTIMIZERS["torch's own"], precision="bf16")
    backward(engine)
    kept = ref(engine.optimizer)
    engine.optimizer.owner = engine  # type: ignore[union-attr]  # as what a user hangs there may
    del engine
    gc.collect()
    assert kept() is None


def test_a_closed_engine_lets_its_optimizer_go() -> None:
    model = torch.nn.Linear(4, 1, bias=False)
    engine = Engine(model, optimizer=dict(name="sgd", lr=1.0))
    engine.close()
    model(torch.ones(1, 4)).sum().backward()
    before = model.weight.detach().clone()
    assert engine.optimizer is not None
    assert not getattr(engine.optimizer, "_step_supports_amp_scaling", False)
    engine.optimizer.step()
    assert torch.equal(model.weight, before - 1.0)
