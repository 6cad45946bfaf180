"""A trace has the timesteps of the executor, and the bytes and the work of the operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from meshfold.mesh.errors import SpecError
from meshfold.zero_gemini.memory.arena import Arena
from meshfold.zero_gemini.profiler import LiveBytes, OperatorClock, StepTracer, Trace, WallClock, roofline
from meshfold.zero_gemini.runtime.module_hooks import Runtime
from meshfold.zero_gemini.runtime.open_calls import OpenCalls
from meshfold.zero_gemini.runtime.units import Unit, find_units

WIDTH, ROWS = 32, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(F.gelu(self.up(x)))
        return y


class Recomputed(nn.Module):
    """Checkpointed inside of the unit."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return y


class Model(nn.Module):
    """A parameter of its own, around blocks; ``wrap`` says how a run of blocks is called."""

    def __init__(self, block: Callable[[], nn.Module] = Block, wrap: int = 0, tie: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.embed = nn.Embedding(10, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 10, bias=False)
        self.wrap = wrap
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for start in range(0, 4, self.wrap or 1):
            some = self.blocks[start : start + (self.wrap or 1)]
            x = (
                checkpoint(
                    lambda x, some=some: some[-1](some[0](x)) if len(some) > 1 else some[0](x), x, use_reentrant=False
                )
                if self.wrap
                else some[0](x)
            )
        loss: Tensor = (self.head(x * self.scale)).square().mean()
        return loss


def batch(device: str) -> Tensor:
    return torch.zeros(ROWS, dtype=torch.int64, device=device)


def drop_gradients(model: nn.Module) -> None:
    """As whoever collects gradients does."""
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))


def traced(make: Callable[[], nn.Module], device: str = "meta") -> Trace:
    with torch.device(device):
        model = make()
    drop_gradients(model)
    clock = OperatorClock(roofline(flops=1e9, bytes_per_second=1e9))
    with StepTracer(model, memory=LiveBytes(), clock=clock) as tracer:
        model(batch(device)).backward()
    return tracer.trace()


class Chunk:
    """Of one unit; comes and goes without a trace."""

    resident, step_is_pending, can_gather_early = False, False, True

    def gather(self, operands: object) -> None: ...
    def release(self) -> None: ...
    def wait(self) -> None: ...


def calls_of(units: list[Unit]) -> OpenCalls:
    return OpenCalls({unit: [Chunk()] for unit in units})  # type: ignore[list-item]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": Model,
    "checkpoint inside": lambda: Model(Recomputed),
    "checkpoint outside": lambda: Model(wrap=1),
    "checkpoint around two": lambda: Model(wrap=2),
    "tied": lambda: Model(tie=True),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_moments_are_those_of_the_executor(name: str, device: str) -> None:
    with torch.device(device):
        model = MODELS[name]()
    units = find_units(model)
    runtime = Runtime(model, calls_of(units), prefetch=1)
    with StepTracer(model, memory=LiveBytes(), clock=WallClock()) as tracer:
        model(batch(device)).backward()
    runtime.begin_step()
    trace = tracer.trace()
    assert list(trace.order) == [unit.name for unit in runtime.order]
    assert trace.order[: trace.forward_timesteps] == ("", "embed", *(f"blocks.{i}" for i in range(4)), "head")
    assert trace.order[trace.forward_timesteps : trace.forward_timesteps + 2] == ("", "head")
    assert trace.order[-1] == "embed"
    assert all(m.seconds >= 0 and m.waited_seconds >= 0 for m in trace.timesteps)


def test_torchs_attention_is_one_unit_with_the_layer_that_it_never_calls() -> None:
    attention = nn.MultiheadAttention(8, 2)
    unit, last = find_units(nn.ModuleDict({"attention": attention, "head": nn.Linear(8, 8)}))
    assert (unit.name, last.name) == ("attention", "head")
    assert set(unit.parameters) == set(attention.parameters())


class CountedMarks(WallClock):
    """A clock whose marks must not be part of a graph, as a GPU's events must not."""

    def __init__(self) -> None:
        self.traced = 0

    def mark(self) -> float:
        self.traced += torch.compiler.is_compiling()
        return super().mark()


class NoBytes:
    """A probe that is no dispatch mode: under one nothing is compiled."""

    round_bytes = 1

    def __enter__(self) -> NoBytes:
        return self

    def __exit__(self, *error: object) -> None: ...

    def take(self) -> tuple[int, int]:
        return 0, 0


def compile_blocks(model: Model, how: str) -> None:
    for number, block in enumerate(model.blocks):
        if how == "in place":
            block.compile(backend="aot_eager")
        else:
            model.blocks[number] = torch.compile(block, backend="aot_eager")  # type: ignore[assignment]


@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["in place", "wrapped"])
def test_marks_of_compiled_blocks_are_in_no_graph(how: str) -> None:
    """Every traced step has marks of its own, and the timesteps of a model that is not compiled."""
    model, clock = Model(), CountedMarks()
    wanted = list(traced(Model, "cpu").order)
    compile_blocks(model, how)
    Runtime(model, calls_of(find_units(model)), prefetch=1)
    for _ in range(2):
        with StepTracer(model, memory=NoBytes(), clock=clock) as tracer:
            model(batch("cpu")).backward()
        assert list(tracer.trace().order) == wanted
        assert clock.traced == 0
    model(batch("cpu")).backward()  # without a tracer nobody asks for the time
    assert clock.traced == 0


def test_units_lie_in_one_another() -> None:
    trace = traced(Model)
    whole = {(m.unit, m.backward): (i, m.until) for i, m in enumerate(trace.timesteps)}
    assert whole["", False] == (0, 6)  # the model, entered first and left last
    assert whole["blocks.2", False] == (4, 4)
    turn, last = trace.forward_timesteps, len(trace.timesteps) - 1
    assert whole["", True] == (turn, last)  # the ids have no gradient: inside until the end
    assert whole["blocks.3", True] == (turn + 2, turn + 2)
    assert whole["embed", True] == (last, last)


@pytest.mark.parametrize("name", MODELS)
def test_bytes_on_meta_are_those_of_a_run(name: str) -> None:
    dry, real = traced(MODELS[name]), traced(MODELS[name], "cpu")
    assert [m.non_model_bytes for m in dry.timesteps] == [m.non_model_bytes for m in real.timesteps]
    assert [m.left_bytes for m in dry.timesteps] == [m.left_bytes for m in real.timesteps]


def test_bytes_by_hand() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)).to("meta")
    x = torch.empty(ROWS, WIDTH, device="meta")
    drop_gradients(model)
    with StepTracer(model, memory=LiveBytes(base_bytes=100), clock=WallClock()) as tracer:
        model(x).sum().backward()
    forward0, forward1, backward1, backward0 = tracer.trace().timesteps
    rows, weight = 4 * ROWS * WIDTH, 4 * WIDTH * WIDTH
    assert forward0.non_model_bytes == forward0.left_bytes == 100 + rows
    assert forward1.non_model_bytes == 100 + 2 * rows + 4  # both outputs, the sum
    assert (
        forward1.left_bytes == 100 + rows + 4 + 4
    )  # the second is let go; the sum's gradient (one) is expanded: a view
    # the input's gradient and the weight's; the module's input is still alive for the weight's
    assert backward1.non_model_bytes >= 100 + 2 * rows + weight
    assert backward0.left_bytes <= 100 + 8


def test_checkpointing_shows() -> None:
    plain, inside = traced(Model), traced(MODELS["checkpoint inside"])
    turn = plain.forward_timesteps - 1
    kept = 4 * ROWS * WIDTH * (2 + 2)  # up's output, gelu's output, each twice as wide: what a block need not keep
    assert plain.timesteps[turn].left_bytes - inside.timesteps[turn].left_bytes == pytest.approx(4 * kept, rel=0.05)
    forward = [m.seconds for m in plain.timesteps[1:turn]]
    again = [b.seconds - a.seconds for a, b in zip(plain.timesteps, inside.timesteps, strict=True) if a.backward]
    assert 0.4 * forward[1] < again[2] < forward[1]  # computed once more, up to the last tensor that backward needs


class Watched(nn.Module):
    """A block that recomputes, and tells."""

    def __init__(self, tracer: list[StepTracer], number: int) -> None:
        super().__init__()
        self.block, self.name = Block(), f"blocks.{number}"
        self.tracer = tracer

    def forward(self, x: Tensor) -> Tensor:
        again = False

        def run(x: Tensor) -> Tensor:
            nonlocal again
            layers, before, again = self.tracer[0].layers, again, True
            with layers.again(self.name, self, x) if before else layers.forward(self.name):
                y: Tensor = self.block(x)
                return y

        y: Tensor = checkpoint(run, x, use_reentrant=False)
        return y


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_keeping_takes(device: str) -> None:
    """As the difference between two runs says."""
    tracers: list[StepTracer] = []
    numbers = iter(range(4))
    with torch.device(device):
        model = Model(lambda: Watched(tracers, next(numbers)))
    drop_gradients(model)
    clock = OperatorClock(roofline(flops=1e9, bytes_per_second=1e9))
    tracers.append(StepTracer(model, memory=LiveBytes(), clock=clock))
    with tracers[0] as tracer:
        model(batch(device)).backward()
    trace, plain = tracer.trace(), traced(Model, device)
    turn = plain.forward_timesteps - 1
    kept = plain.timesteps[turn].left_bytes - trace.timesteps[turn].left_bytes
    assert sum(layer.kept_bytes for layer in trace.layers) == kept == 4 * 4 * ROWS * 2 * WIDTH * 2
    assert [(layer.name, layer.first) for layer in trace.layers] == [(f"blocks.{i}", i + 2) for i in range(4)]
    assert [trace.timesteps[layer.last + 1].unit for layer in trace.layers] == [f"blocks.{i}" for i in range(4)]
    for layer in trace.layers:
        more = trace.timesteps[layer.last + 1].seconds - plain.timesteps[layer.last + 1].seconds
        assert layer.seconds == pytest.approx(more)
        assert 0 < layer.before_bytes < trace.timesteps[layer.last + 1].non_model_bytes


def test_seconds_are_those_of_the_operators() -> None:
    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.ReLU()).to("meta")
    clock = OperatorClock(roofline(flops=1e12, bytes_per_second=1e12))
    x = torch.empty(64, 256, device="meta")
    with clock:
        begin = clock.mark()
        y = model[0](x)
        middle = clock.mark()
        model[1](y.view(-1)).view(64, 256)
        end = clock.mark()
    assert clock.seconds(begin, middle) == 2 * 64 * 256 * 256 / 1e12  # more than its bytes take
    assert clock.seconds(middle, end) == pytest.approx(2 * 4 * 64 * 256 / 1e12)  # reads and writes; views are free
    assert clock.flop == 2 * 64 * 256 * 256
    clock.add_attention(10**12, head_dim=64, computed=0.5)  # causal: half of the pairs
    assert clock.seconds(end, clock.mark()) == pytest.approx(0.5)
    with clock.times(3):  # parts of one size, of which one runs
        clock.add_attention(10**12)
    assert clock.seconds(end, clock.mark()) == pytest.approx(0.5 + 3.0)


def test_what_an_arena_gives_out_is_not_counted() -> None:
    """It is model data, which is accounted for there."""
    live, arena = LiveBytes(), Arena("host", "cpu")
    with live:
        buffer = arena.allocate(1000, torch.float32).tensor
        buffer[:10].copy_(torch.ones(10))
        assert live.take() == (40, 0)
        other = torch.empty(7)
        del other
        assert live.take() == (28, 0)
        kept = torch.empty(100, dtype=torch.float16)
        assert live.bytes == 200
    assert kept.numel() == 100 and live.bytes == 200


def test_storages_round_as_an_allocator_does() -> None:
    with LiveBytes(round_bytes=512) as live:
        kept = [torch.empty(1), torch.empty(129)]
        assert live.bytes == 512 + 1024
    assert len(kept) == 2


def test_a_trace_needs_a_backward() -> None:
    model = Model()
    with StepTracer(model, memory=LiveBytes(), clock=WallClock()) as tracer:
        model(batch("cpu"))
    with pytest.raises(SpecError, match="7 units"):
        tracer.trace()


def test_hooks_go_when_the_tracer_is_left() -> None:
    model = Model()
    with StepTracer(model, memory=LiveBytes(), clock=WallClock()) as tracer:
        model(batch("cpu")).backward()
    length = len(tracer.trace().timesteps)
    model(batch("cpu")).backward()
    assert len(tracer.trace().timesteps) == length
    hooks: list[Any] = [m._forward_hooks or m._forward_pre_hooks for m in model.modules()]
    assert not any(hooks)
