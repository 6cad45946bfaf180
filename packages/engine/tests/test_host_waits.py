"""A step whose metrics nobody reads does not make the host wait for the device."""

from __future__ import annotations

import traceback
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from meshfold.engine import Engine
from meshfold.experts import Experts
from meshfold.mesh.testing import ranks
from meshfold.models import GPT, GPTConfig, Llama, MoELlamaConfig

# They run on the CPU alone, or wait for the other ranks' hosts and not for what is queued on the device.
ALLOWED = ("_numba.py", "layers/vocabulary.py", "zero_gemini/group_flags.py", "processes/host_numbers.py")
WAITING = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "unique")
SPECS: dict[str, dict[str, Any]] = {
    "data": dict(data=2),
    "tensor": dict(tensor=2),
    "sequence": dict(sequence=dict(mode="ulysses", size=2)),
    "zero 1": dict(data=2, zero=dict(stage=1)),
    "zero 2": dict(data=2, zero=dict(stage=2)),
    "zero 3": dict(data=2, zero=dict(stage=3)),
}


def caller() -> str:
    """The lines of ours that led here, the last first."""
    ours = [
        f"{frame.filename.rpartition('meshfold/')[2]}:{frame.lineno}"
        for frame in traceback.extract_stack()
        if "/src/meshfold" in frame.filename
    ]
    return " < ".join(reversed(ours[-4:]))


class Waits(TorchDispatchMode):
    """Notes the operations inside whose results the host reads, with the lines that called each."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in WAITING:
            self.found.append(f"{name} in {caller()}")
        return func(*args, **(kwargs or {}))


class Copies(TorchFunctionMode):
    """Notes methods that copy a tensor to the host, which on the CPU are no operations."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.tolist, Tensor.cpu, Tensor.numpy):
            self.found.append(f"{func.__name__} in {caller()}")
        return func(*args, **(kwargs or {}))


def waits(engine: Engine, batch: Any) -> list[str]:
    """Return what the host waits for in the fourth step."""
    mine = engine.shard_batch(batch)
    for _ in range(3):
        engine.run_step(mine)
    with Waits() as waited, Copies() as copied:
        engine.run_step(mine)
    assert engine.last is not None and engine.last.step == 4
    engine.close()
    return [line for line in (*waited.found, *copied.found) if not any(name in line for name in ALLOWED)]


@pytest.mark.few(3)
@pytest.mark.parametrize("spec", SPECS)
@ranks(2)
def test_a_language_model(spec: str) -> None:
    torch.manual_seed(0)
    engine = Engine(
        lambda: GPT(GPTConfig(vocab_size=37, hidden=16, layers=2, heads=2, max_positions=16)),
        SPECS[spec],
        optimizer=dict(name="adamw", lr=0.01),
        clip_grad_norm=1.0,
    )
    found = waits(engine, torch.randint(37, (4, 8)))
    assert not found, "\n".join(found)


@pytest.mark.few(1)
@pytest.mark.parametrize("spec", ["data", "zero 3"])
@ranks(2)
def test_a_mixture_of_experts(spec: str) -> None:
    """Tokens go to all ranks, and no host asks how many rows an expert gets."""
    torch.manual_seed(0)
    config = MoELlamaConfig(vocab_size=32, hidden=16, layers=2, heads=2, ffn=16, experts=4, top_k=2)
    engine = Engine(
        lambda: Llama(config),
        dict(**SPECS[spec], expert=dict(size=2)),
        optimizer=dict(name="adamw", lr=0.01),
        clip_grad_norm=1.0,
    )
    found = waits(engine, torch.randint(32, (4, 8)))
    assert not found, "\n".join(found)


def mixture_of(capacity: float | None) -> nn.Module:
    config = MoELlamaConfig(vocab_size=32, hidden=16, layers=2, heads=2, ffn=16, experts=8, top_k=4)
    model = Llama(config)
    for module in model.modules():
        if isinstance(module, Experts):
            module.capacity = capacity
    return model


@pytest.mark.parametrize(("capacity", "exchange"), [(1.25, "auto"), (None, "all_gather")])
@ranks(4)
def test_a_mixture_on_more_than_two_ranks(capacity: float | None, exchange: str) -> None:
    """With a capacity the default is the exchange without a wait, and which tokens are dropped is the device's secret too."""
    torch.manual_seed(0)
    engine = Engine(
        lambda: mixture_of(capacity),
        dict(data=4, expert=dict(size=4, exchange=exchange)),
        optimizer=dict(name="adamw", lr=0.01),
        clip_grad_norm=1.0,
    )
    with pytest.MonkeyPatch.context() as patch:  # few rows are computed in parts, too
        patch.setattr(import_module("meshfold.experts.dispatch"), "FEW", 0)
        found = waits(engine, torch.randint(32, (4, 8)))
    assert not found, "\n".join(found)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.inner(x).relu())
        return y


@pytest.mark.few(3)
@pytest.mark.parametrize("ignored", [-100, 2])
@pytest.mark.parametrize("spec", ["data", "zero 3"])
@ranks(2)
def test_a_loss_of_the_users_own(spec: str, ignored: int) -> None:
    torch.manual_seed(0)
    engine = Engine(
        Classifier,
        SPECS[spec],
        optimizer=dict(name="adamw", lr=0.01),
        loss_fn=lambda output, batch: F.cross_entropy(output, batch[1], ignore_index=ignored),
    )
    found = waits(engine, (torch.randn(6, 6), torch.tensor([0, 1, 2, 0, 1, 2])))
    assert not found, "\n".join(found)


def hugging_face() -> nn.Module:
    """A Llama of transformers, which looks for packed documents in every forward of its own."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, use_cache=False
    )
    config._attn_implementation = "sdpa"
    return LlamaForCausalLM(config)


@pytest.mark.few(1)
@pytest.mark.parametrize("spec", [dict(data=1), dict(data=1, zero=dict(stage=3))], ids=["data", "zero 3"])
def test_no_wait_in_a_hugging_face_model(spec: dict[str, Any]) -> None:
    engine = Engine(hugging_face(), spec, optimizer=dict(name="adamw", lr=1e-3), clip_grad_norm=1.0)
    assert waits(engine, dict(input_ids=torch.arange(16).view(2, 8))) == []
