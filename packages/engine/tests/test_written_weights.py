"""Weights that a user's own code changes between steps: they count as on one rank, or the change is refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, has_torch_function

from meshfold.engine import Engine, precision
from meshfold.mesh.parameters import WatchedParameter, WeightWriteError, with_written
from meshfold.mesh.parameters.weight_writes import RefusingParameter, refuse, unwatch, watch
from meshfold.mesh.testing import ranks
from meshfold.zero_gemini.sharded_model import contents

X, Y = torch.linspace(-1, 1, 16).view(4, 4).sin(), torch.linspace(-2, 1, 12).view(4, 3).cos()


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def in_place(parameters: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(0.5)


def by_data(parameters: Sequence[Tensor]) -> None:
    for parameter in parameters:
        parameter.data.mul_(0.5)


def assigned(parameters: Sequence[Tensor]) -> None:
    for parameter in parameters:
        parameter.data = parameter.data * 0.5


def by_foreach(parameters: Sequence[Tensor]) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(parameters), 0.5)


CHANGES: dict[str, Callable[[Sequence[Tensor]], None]] = dict(
    in_place=in_place, by_data=by_data, assigned=assigned, by_foreach=by_foreach
)
SPECS: dict[str, dict[str, Any]] = {
    "data": dict(data=2),
    "zero 1": dict(data=2, zero=dict(stage=1)),
    "zero 2": dict(data=2, zero=dict(stage=2)),
    "zero 3": dict(data=2, zero=dict(stage=3)),
    "on the host": dict(data=2, zero=dict(stage=1, placement="cpu")),
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "our kernels": dict(name=torch.optim.AdamW, lr=1e-3),
    "torch's own": dict(name=torch.optim.SGD, lr=0.1, momentum=0.9),
}


def engine_of(spec: str, optimizer: str = "our kernels", **options: Any) -> Engine:
    return Engine(
        model,
        SPECS[spec],
        optimizer=OPTIMIZERS[optimizer],
        loss_fn=lambda output, batch: (output - batch[1]).square().mean(),
        **options,
    )


def trained_alone(
    weights: dict[str, Tensor], optimizer: str, change: Callable[[Sequence[Tensor]], None]
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of torch's own loop."""
    plain = model()
    plain.load_state_dict(weights)
    settings = {**OPTIMIZERS[optimizer]}
    steps = settings.pop("name")(plain.parameters(), **settings)
    losses = []
    for _ in range(3):
        loss = (plain(X) - Y).square().mean()
        steps.zero_grad()
        loss.backward()
        steps.step()
        losses.append(loss.item())
        change([*plain.parameters()][2:])
    return losses, plain.state_dict()


@pytest.mark.few(4)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("spec", ["data", "zero 1", "zero 2"])
@ranks(2)
def test_changes_count(spec: str, change: str, precision: str, optimizer: str) -> None:
    engine = engine_of(spec, optimizer, precision=precision)
    want, others = trained_alone(engine.full_state_dict(), optimizer, CHANGES[change])
    losses = []
    for _ in range(3):
        engine.train_step(engine.shard_batch((X, Y)))
        assert engine.last is not None
        losses.append(engine.last.loss)
        CHANGES[change]([*engine.model.parameters()][2:])
    weights = engine.full_state_dict()
    engine.close()
    tolerance = 1e-5 if precision == "fp32" else 3e-2
    assert losses == pytest.approx(want, rel=tolerance)
    for name, value in weights.items():
        torch.testing.assert_close(value, others[name], rtol=tolerance, atol=tolerance / 10)
    assert {type(parameter) for parameter in engine.model.parameters()} == {nn.Parameter}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@ranks(2)
def test_weights_that_are_only_looked_at_keep_their_precision(optimizer: str) -> None:
    weights = []
    for looks in (False, True):
        engine = engine_of("data", optimizer, precision="bf16")
        for _ in range(3):
            engine.train_step(engine.shard_batch((X, Y)))
            if looks:
                sum(parameter.data.float().norm() for parameter in engine.model.parameters())
        weights.append(engine.full_state_dict())
        engine.close()
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name]) and not torch.equal(value, value.bfloat16().float())


@pytest.mark.few(4)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("spec", ["zero 3", "on the host"])
@ranks(2)
def test_changes_that_would_be_lost_are_refused(spec: str, change: str, precision: str) -> None:
    engine = engine_of(spec, precision=precision)
    engine.train_step(engine.shard_batch((X, Y)))

    def changed_step() -> None:
        CHANGES[change]([*engine.model.parameters()][2:])
        engine.train_step(engine.shard_batch((X, Y)))  # refuses what torch's functions of lists do

    with pytest.raises(WeightWriteError, match=r"'2\.weight'.* state = engine\.full_state_dict\(\), change"):
        changed_step()


@ranks(2)
def test_what_the_refusal_names_works() -> None:
    engine = engine_of("zero 3")
    want, others = trained_alone(engine.full_state_dict(), "our kernels", in_place)
    for each in want:
        engine.train_step(engine.shard_batch((X, Y)))
        assert engine.last is not None and engine.last.loss == pytest.approx(each, rel=1e-5)
        state = engine.full_state_dict()
        in_place([state["2.weight"], state["2.bias"]])
        engine.load_state_dict(state)
    for name, value in engine.full_state_dict().items():
        torch.testing.assert_close(value, others[name], rtol=1e-5, atol=1e-6)
    engine.close()


@ranks(2)
def test_changes_beside_state_on_the_host_count_once_its_step_is_done() -> None:
    engine = engine_of("on the host")
    before = engine.full_state_dict()
    in_place([*engine.model.parameters()])
    assert all(torch.equal(value, before[name] / 2) for name, value in engine.full_state_dict().items())
    engine.train_step(engine.shard_batch((X, Y)))
    after = engine.full_state_dict()
    assert all((value - before[name] / 2).abs().max() < 2e-3 for name, value in after.items())
    engine.close()


READS: dict[str, Callable[[nn.Module], object]] = dict(
    data=lambda model: [parameter.data.clone() for parameter in model.parameters()],
    norms=lambda model: sum(parameter.norm() for parameter in model.parameters()),
    vector=lambda model: nn.utils.parameters_to_vector(model.parameters()),
)


@pytest.mark.parametrize("read", READS)
@ranks(2)
def test_what_would_read_nothing_is_refused(read: str) -> None:
    engine = engine_of("zero 3")
    with pytest.raises(WeightWriteError, match=r"'0\.weight', which has no elements now"):
        READS[read](engine.model)
    engine.train_step(engine.shard_batch((X, Y)))
    engine.close()


class Codebook(nn.Module):
    """Changes a frozen parameter in its forward, as an average over batches."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.mean = nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        with torch.no_grad():
            self.mean.lerp_(y.mean(0), 0.1)
        return y - self.mean


@ranks(2)
def test_a_forward_that_changes_a_parameter_is_refused_under_stage_3() -> None:
    engine = Engine(
        Codebook,
        SPECS["zero 3"],
        optimizer=OPTIMIZERS["our kernels"],
        loss_fn=lambda output, batch: (output - batch[1]).square().mean(),
    )
    with pytest.raises(WeightWriteError, match=r"'mean' was changed in place while it was gathered.*register_buffer"):
        engine.train_step(engine.shard_batch((X, Y)))


class Layer(nn.Module):
    """Large enough for chunks of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


class Computed(nn.Module):
    """Calls a block with weights that it has computed from the block's, from the second forward on."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer(1100) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(1100, 1))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for block in self.blocks:
            weights = {"inner.weight": block.inner.weight * self.scale} if self.calls > 1 else {}
            x = functional_call(block, weights, (x,))
        return x


@ranks(2)
def test_computed_weights_of_a_released_parameter_are_refused_by_name_on_every_rank() -> None:
    engine = Engine(
        Computed,
        SPECS["zero 3"],
        optimizer=OPTIMIZERS["our kernels"],
        loss_fn=lambda output, batch: output.square().mean(),
    )
    batch = engine.shard_batch((torch.ones(2, 1100) / 10, torch.zeros(2, 1)))
    engine.train_step(batch)
    refused = r"'blocks\.\d\.inner\.weight', which has no elements now.* move the computation into the module"
    with pytest.raises(WeightWriteError, match=refused):
        engine.train_step(batch)


class Penalised(nn.Module):
    """Computes with a block's parameter after the block."""

    def __init__(self, penalty: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks, self.penalty = nn.ModuleList(Layer(1100) for _ in range(2)), penalty

    def forward(self, x: Tensor) -> Tensor:
        first: Any = self.blocks[0]
        for block in self.blocks:
            x = block(x)
        assert first.inner.weight.requires_grad and first.inner.weight.dtype == torch.float32
        return x + self.penalty(first.inner.weight, x).sum()


PENALTIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "exp()": lambda w, x: torch.exp(w),
    "linear()": lambda w, x: F.linear(x, w),
    "einsum()": lambda w, x: torch.einsum("ij,kj->ik", x, w),
    "cat()": lambda w, x: torch.cat([w, w]),
    "zeros_like()": lambda w, x: torch.zeros_like(w),
    ".T": lambda w, x: x @ w.T,
}


@ranks(2)
def test_functions_of_a_released_parameter_are_refused_by_its_name() -> None:
    """torch would compute with no elements, or say that sizes do not match."""
    for what, penalty in PENALTIES.items():
        with Engine(
            Penalised(penalty),
            SPECS["zero 3"],
            optimizer=OPTIMIZERS["our kernels"],
            loss_fn=lambda output, batch: output.square().mean(),
        ) as engine:
            batch = engine.shard_batch((torch.ones(2, 1100) / 10, torch.zeros(2, 1)))
            refused = (
                rf"{re.escape(what)} of 'blocks\.0\.inner\.weight', which has no elements now.* move the computation"
            )
            with pytest.raises(WeightWriteError, match=refused):
                engine.train_step(batch)


@ranks(2)
def test_data_of_another_dtype_is_refused() -> None:
    engine = engine_of("zero 1")
    parameter = next(engine.model.parameters())
    with pytest.raises(WeightWriteError, match=r"float64.*give the same shape, dtype and device"):
        parameter.data = parameter.double()
    engine.close()


@pytest.mark.few(3)
@pytest.mark.parametrize("spec", ["data", "zero 1", "zero 2", "zero 3", "on the host"])
@ranks(2)
def test_steps_alone_write_nothing(spec: str) -> None:
    """Looking at what was written would wait for a GPU in every step."""
    with (
        mock.patch.object(precision, "with_written", wraps=with_written) as looks,
        mock.patch.object(contents, "with_written", looks),
    ):
        engine = engine_of(spec, precision="bf16", clip_grad_norm=1.0)
        for _ in range(3):
            engine.train_step(engine.shard_batch((X, Y)))
        engine.full_state_dict()
        assert not looks.called
        engine.close()


@ranks(2)
def test_released_parameters_answer_few_calls_in_a_step() -> None:
    """A call of Python takes a microsecond, and a step has hundreds of parameters."""
    calls: list[object] = []
    answer = RefusingParameter.__torch_function__.__func__  # type: ignore[attr-defined]

    def counted(cls: type, func: Any, *given: Any) -> Any:
        calls.append(func)
        return answer(cls, func, *given)

    with Engine(
        nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)), nn.Linear(64, 3)),
        SPECS["zero 3"],
        optimizer=OPTIMIZERS["our kernels"],
        loss_fn=lambda output, batch: F.mse_loss(output, batch[1]),
    ) as engine:
        batch = engine.shard_batch((X.repeat(1, 16), Y))
        for _ in range(2):
            engine.train_step(batch)
        with mock.patch.object(RefusingParameter, "__torch_function__", classmethod(counted)):
            engine.train_step(batch)
    assert len(calls) < 20, f"{len(calls)} calls: {calls}"


class Passing(TorchFunctionMode):
    """As the modes that replace a model's dropout, or its attention under ``sequence``."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [nullcontext, Passing])
def test_code_that_looks_at_watched_parameters_compiles_to_one_graph(mode: Callable[[], Any]) -> None:
    """Also where a function mode is active; eager code makes no call of Python for them."""
    torch.compiler.reset()
    layer, graphs = nn.Linear(4, 4), []
    for parameter in layer.parameters():
        watch(parameter)
    assert type(layer.weight) is WatchedParameter and not has_torch_function((layer.weight,))

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        if weight.is_meta or weight.shape != (4, 4) or weight.dtype == torch.float64:
            raise ValueError(weight.shape)
        return F.linear(F.layer_norm(x, (4,), weight[0]), weight).square() + F.rms_norm(x, (4,), layer.bias)

    def counted(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    x = torch.arange(8.0).view(2, 4)
    with mode():
        found = torch.compile(lambda given: forward(given, layer.weight), backend=counted, fullgraph=True)(x)
    found.sum().backward()
    assert len(graphs) == 1 and layer.weight.grad is not None
    torch.testing.assert_close(found, forward(x, layer.weight))
    refuse(layer.weight, "weight", "which is not there")
    with pytest.raises(WeightWriteError, match="'weight', which is not there"):
        torch.exp(layer.weight)
    unwatch(layer.weight)
    assert vars(layer.weight).get("__torch_function__") is None
