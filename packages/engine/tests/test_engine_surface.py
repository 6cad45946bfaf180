"""Loops of one's own: what ``backward``, ``step`` and ``no_sync`` allow, with and without ``zero``.

Each loop below is written once and run twice: on one process with plain torch in float64, on all rows; and on ranks
with the engine, each on its rows. Losses and all parameters must agree.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.engine import CheckpointError, Engine, TrainingError
from meshfold.engine.precision import LossScaler, ScaleSettings
from meshfold.mesh import SpecError, all_gather, all_reduce, record
from meshfold.mesh.parameters.parameter_meta import uncompiled_name
from meshfold.mesh.testing import ranks, run_on_ranks
from meshfold.models import GPT, GPTConfig

# A large epsilon: Adam divides gradients that are zero but for rounding by themselves.
ADAMW: dict[str, Any] = dict(name="adamw", lr=1e-2, weight_decay=0.1, eps=1e-4)
ROWS, WIDTH = 8, 6
STEPS = 3


class Serial:
    """A model and AdamW on one process."""

    def __init__(self, make: Callable[[], nn.Module], pieces: int, clip: Callable[[Any], object]) -> None:
        torch.manual_seed(0)
        self.model, self._pieces, self._clip = make().double(), pieces, clip
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1, eps=1e-4)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def pieces(self, x: Tensor) -> list[Tensor]:
        return list(x.chunk(self._pieces))

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        loss.backward(retain_graph=retain_graph)

    def step(self) -> None:
        self._clip([p for p in self.model.parameters() if p.grad is not None])
        self._optimizer.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    def mean(self, loss: Tensor) -> float:
        return loss.item()

    def state(self) -> dict[str, Tensor]:
        return self.model.state_dict()


class Meshed:
    """The engine with the same names."""

    def __init__(self, make: Callable[[], nn.Module], parallel: dict[str, Any], **settings: Any) -> None:
        torch.manual_seed(0)
        arguments: dict[str, Any] = {"optimizer": ADAMW, "precision": "fp64", **settings}
        self.engine = Engine(make(), parallel, **arguments)
        self.model = self.engine.model
        self.backward, self.step = self.engine.backward, self.engine.step
        self.zero_grad, self.no_sync = self.engine.zero_grad, self.engine.no_sync

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.engine(*args, **kwargs)

    def pieces(self, x: Tensor) -> list[Tensor]:
        return [self.engine.shard_batch(x)]

    def mean(self, loss: Tensor) -> float:
        group = self.engine.world.data_group
        return float(all_reduce(loss.detach(), group)) / group.size

    def state(self) -> dict[str, Tensor]:
        return self.engine.full_state_dict()


Net = Serial | Meshed
Make = Callable[..., Net]


def data(step: int, count: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64) for _ in range(count)]


def mean_of(net: Net, x: Tensor, loss: Callable[[Tensor], Tensor]) -> Tensor:
    """A loss over this process's rows; where the serial model stands for several ranks, over each one's."""
    parts = net.pieces(x)
    return torch.stack([loss(part) for part in parts]).mean()


# -- models -----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(x).tanh())
        return y


class Blocks(nn.Module):
    """A few blocks, run in the order that the call says."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, order: tuple[int, ...] = (0, 1, 2)) -> Tensor:
        x = self.first(x)
        for number in order:
            x = x + self.blocks[number](x)
        y: Tensor = self.head(x)
        return y


class Tied(nn.Module):
    """The same matrix at both ends; one parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.begin, self.middle, self.end = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.end.weight = self.begin.weight
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.end(self.middle(self.begin(x)).tanh())
        return y


class Adapted(nn.Module):
    """A frozen layer with a trained low-rank part beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.up(self.down(x))
        return y


def adapters() -> nn.Module:
    return nn.Sequential(Adapted(), nn.Tanh(), Adapted(), nn.Linear(WIDTH, 2).requires_grad_(False))


class Branches(nn.Module):
    """Takes one of two ways according to its input, and has a third that it never takes."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList(nn.Linear(WIDTH, 2) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.ways[int(x[0, 0] > 0)](x)
        return y


# -- loops ------------------------------------------------------------------------------------------------------------


def several_losses(make: Make) -> Iterator[Any]:
    """Two losses of one forward, each with its own backward; then two forwards with one."""
    net = make(Blocks)
    for step in range(STEPS):
        x, other = data(step, 2)
        outputs = [net(part) for part in net.pieces(x)]
        first = torch.stack([y.square().mean() for y in outputs]).mean()
        net.backward(first, retain_graph=True)
        auxiliary = torch.stack([y.sin().mean() for y in outputs]).mean()
        net.backward(0.3 * auxiliary)
        both = mean_of(net, x, lambda part: net(part, (0, 2)).cos().mean())
        both = both + mean_of(net, other, lambda part: net(part).square().mean())
        net.backward(both)
        net.step()
        yield from (net.mean(loss) for loss in (first, auxiliary, both))
    yield net.state()


def accumulation(make: Make) -> Iterator[Any]:
    """Micro-steps that wait for the last to be summed; then some of which none is the last."""
    net = make(Blocks)
    for step in range(STEPS):
        *some, last = data(step, 3)
        with net.no_sync():
            for x in some:
                net.backward(mean_of(net, x, lambda part: net(part).square().mean()) / 3)
        loss = mean_of(net, last, lambda part: net(part).square().mean())
        if step == 1:
            with net.no_sync():
                net.backward(loss / 3)
        else:
            net.backward(loss / 3)
        net.step()
        yield net.mean(loss)
    yield net.state()


def adversaries(make: Make) -> Iterator[Any]:
    """A generator and what judges it: two models, each trained through the other's."""
    generator, judge = (
        make(partial(Blocks, 3)),
        make(lambda: nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))),
    )
    for step in range(STEPS):
        noise, truth = data(step, 2)
        real = mean_of(judge, truth[:, :2], lambda part: F.softplus(-judge(part)).mean())
        fake = mean_of(generator, noise, lambda part: F.softplus(judge(generator(part).detach())).mean())
        judge.backward(real)
        judge.backward(fake)
        judge.step()
        fooled = mean_of(generator, noise, lambda part: F.softplus(-judge(generator(part))).mean())
        generator.backward(fooled)
        generator.step()
        judge.zero_grad()  # the generator's loss went through it
        yield from (judge.mean(real), judge.mean(fake), generator.mean(fooled))
    yield generator.state()
    yield judge.state()


def branches(make: Make) -> Iterator[Any]:
    """Ranks take different ways; in one step nobody takes the first."""
    net = make(Branches)
    for step in range(STEPS):
        x = data(step)[0]
        x[: ROWS // 2, 0] = 1.0
        x[ROWS // 2 :, 0] = 1.0 if step == 1 else -1.0
        loss = mean_of(net, x, lambda part: net(part).square().mean())
        net.backward(loss)
        net.step()
        yield net.mean(loss)
    yield net.state()


def orders(make: Make) -> Iterator[Any]:
    """Evaluated before the first step; then the order of blocks is another in each step, one is left out, one comes twice."""
    net = make(Blocks)
    with torch.no_grad():
        net.model.eval()
        yield net.mean(mean_of(net, data(9)[0], lambda part: net.model(part).square().mean()))
        net.model.train()
    for step, order in enumerate([(0, 1, 2), (2, 1, 0), (1, 1), (0, 1, 2), (2, 0)]):
        loss = mean_of(net, data(step)[0], lambda part, order=order: net(part, order).square().mean())  # type: ignore[misc]
        net.backward(loss)
        net.step()
        yield net.mean(loss)
    yield net.state()


def plain_loop(model: Callable[[], nn.Module], make: Make) -> Iterator[Any]:
    net = make(model)
    for step in range(STEPS):
        loss = mean_of(net, data(step)[0], lambda part: (net(part) - 1).square().mean())
        net.backward(loss)
        net.step()
        yield net.mean(loss)
    yield net.state()


def compiled(when: str, make: Make) -> Iterator[Any]:
    """Blocks compiled before the engine takes the model, or after."""

    def model() -> nn.Module:
        made = Blocks()
        if when == "before":
            compile_blocks(made)
        return made

    net = make(model)
    if when == "after":
        compile_blocks(net.model)
    for step in range(STEPS):
        loss = mean_of(net, data(step)[0], lambda part: net(part).square().mean())
        net.backward(loss)
        net.step()
        yield net.mean(loss)
    yield net.state()


def compile_blocks(model: nn.Module) -> None:
    blocks = model.get_submodule("blocks")
    assert isinstance(blocks, nn.ModuleList)
    for number, block in enumerate(blocks):
        blocks[number] = torch.compile(block, backend=counting)  # type: ignore[assignment]


GRAPHS: list[int] = []


def counting(graph: Any, inputs: Any) -> Any:
    """The back end that makes forward and backward graphs and runs them without a compiler."""
    from torch._dynamo.backends.debugging import aot_eager

    GRAPHS.append(sum(node.op.startswith("call") for node in graph.graph.nodes))
    return aot_eager(graph, inputs)


LOOPS: dict[str, Callable[[Make], Iterator[Any]]] = {
    "several losses": several_losses,
    "accumulation": accumulation,
    "adversaries": adversaries,
    "branches": branches,
    "orders": orders,
    "tied and unused": partial(plain_loop, Tied),
    "adapters": partial(plain_loop, adapters),
    "compiled before": partial(compiled, "before"),
    "compiled after": partial(compiled, "after"),
}
ZEROS: list[dict[str, Any]] = [
    {},
    dict(zero=dict(stage=1)),
    dict(zero=dict(stage=2)),
    dict(zero=dict(stage=3)),
    dict(zero=dict(stage=3, placement="cpu")),
]


def run_loop(name: str, parallel: dict[str, Any]) -> list[Any]:
    return list(LOOPS[name](partial(Meshed, parallel=parallel)))


def compare(name: str, pieces: int, specs: list[dict[str, Any]]) -> None:
    wanted = list(LOOPS[name](lambda model: Serial(model, pieces, lambda trained: None)))
    assert sum(isinstance(value, float) for value in wanted) >= STEPS
    for parallel in specs:
        torch._dynamo.reset()
        GRAPHS.clear()
        found = run_loop(name, parallel)
        # Blocks are graphs of all their three layers, whatever hooks sit on them.
        assert set(GRAPHS) == ({3} if name.startswith("compiled") else set()), (name, parallel, GRAPHS)
        assert len(found) == len(wanted)
        for ours, theirs in zip(found, wanted, strict=True):
            if isinstance(theirs, float):
                assert ours == pytest.approx(theirs, rel=1e-9), (name, parallel)
                continue
            theirs = {
                uncompiled_name(key): value for key, value in theirs.items()
            }  # what torch.compile adds is no name's
            assert list(ours) == list(theirs)
            for key, value in theirs.items():
                torch.testing.assert_close(
                    ours[key], value, rtol=1e-9, atol=1e-9, msg=partial("{} {}: {}".format, parallel, key)
                )


@pytest.mark.few(1)
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_on_two_ranks_is_the_serial_loop(name: str) -> None:
    run_on_ranks(2, compare, name, 2, [{"data": 2, **ZEROS[-1]}])


@pytest.mark.slow  # the stage that does most is compared above
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_is_the_serial_loop_under_every_stage(name: str) -> None:
    run_on_ranks(2, compare, name, 2, [{"data": 2, **zero} for zero in ZEROS[:-1]])


@pytest.mark.parametrize(
    "name",
    [
        loop if loop in ("adversaries", "compiled before") else pytest.param(loop, marks=pytest.mark.slow)
        for loop in LOOPS
    ],
)
def test_a_loop_on_one_rank_is_the_serial_loop(name: str) -> None:
    compare(name, 1, [{}, dict(zero=dict(stage=3))])


# -- clipping ---------------------------------------------------------------------------------------------------------

CLIPS: dict[str, tuple[dict[str, Any], Callable[[Any], object]]] = {
    "L2": (dict(clip_grad_norm=0.1), lambda p: nn.utils.clip_grad_norm_(p, 0.1)),
    "L1": (dict(clip_grad_norm=2.0, clip_norm_type=1.0), lambda p: nn.utils.clip_grad_norm_(p, 2.0, 1.0)),
    "largest": (
        dict(clip_grad_norm=0.01, clip_norm_type=math.inf),
        lambda p: nn.utils.clip_grad_norm_(p, 0.01, math.inf),
    ),
    "value": (dict(clip_grad_value=0.002), lambda p: nn.utils.clip_grad_value_(p, 0.002)),
}
VOCABULARY = 37


def gpt() -> GPT:
    return GPT(GPTConfig(vocab_size=VOCABULARY, hidden=32, layers=1, heads=4, max_positions=16))


def clipped(make: Make) -> Iterator[Any]:
    net = make(gpt)
    generator = torch.Generator().manual_seed(3)
    for _ in range(STEPS):
        ids = torch.randint(VOCABULARY, (ROWS, 7), generator=generator)
        losses = [net(part, labels=part).loss for part in net.pieces(ids)]
        with net.no_sync():
            net.backward(torch.stack(losses).mean(), retain_graph=True)
        net.backward(0.5 * torch.stack(losses).mean())
        net.step()
        yield net.mean(torch.stack(losses).mean())
    yield net.state()


def compare_clipping(kind: str, specs: list[dict[str, Any]]) -> None:
    settings, clip = CLIPS[kind]
    norms: list[float] = []

    def serial(model: Callable[[], nn.Module]) -> Net:
        def both(trained: list[Tensor]) -> None:
            norm_type = settings.get("clip_norm_type", 2.0)
            norms.append(float(nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None], norm_type)))
            clip(trained)

        return Serial(model, 1, both)

    *losses, weights = clipped(serial)
    free = [*clipped(lambda model: Serial(model, 1, lambda trained: None))][-1]
    assert any(not torch.allclose(free[name], value, rtol=1e-6) for name, value in weights.items())
    for parallel in specs:
        net = Meshed(gpt, parallel, **settings)
        loop = clipped(lambda model, net=net: net)
        for loss, norm in zip(losses, norms, strict=True):
            assert next(loop) == pytest.approx(loss, rel=1e-9), (kind, parallel)
            last = net.engine.last
            assert last is not None and last.grad_norm == pytest.approx(norm, rel=1e-9), (kind, parallel)
        for name, value in next(loop).items():
            torch.testing.assert_close(value, weights[name], rtol=1e-9, atol=1e-9, msg=f"{kind} {parallel} {name}")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "kind",
    [kind if kind in ("L2", "value") else pytest.param(kind, marks=pytest.mark.slow) for kind in CLIPS],
)
@pytest.mark.parametrize("rest", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "rest"])
def test_clipping_is_that_of_torch_over_the_whole_model(kind: str, rest: bool) -> None:
    two: list[dict[str, Any]] = [dict(data=2), dict(tensor=2)]
    four: list[dict[str, Any]] = [dict(data=2, tensor=2), dict(tensor=dict(mode="2d", size=4))]
    zeros: list[dict[str, Any]] = [dict(stage=1), dict(stage=3, placement="cpu")]
    two += [{**two[0], "zero": zero} for zero in zeros]
    four += [{**spec, "zero": zeros[1]} for spec in four]
    # Alternately plain and beside zero.
    run_on_ranks(2, compare_clipping, kind, two[not rest :: 2])
    run_on_ranks(4, compare_clipping, kind, four[::3] if not rest else four[1:3])


def test_an_infinite_norm_sees_nan_on_any_rank() -> None:
    run_on_ranks(2, nan_somewhere)


def nan_somewhere() -> None:
    rank = torch.distributed.get_rank()
    for zero in ({}, dict(zero=dict(stage=2))):
        for bad in (0, 1):
            engine = Engine(
                nn.Linear(3, 1),
                dict(data=2, **zero),
                optimizer="sgd",
                precision="fp16",
                clip_grad_norm=1.0,
                clip_norm_type=math.inf,
            )
            x = torch.full((2, 3), math.nan if rank == bad else 1.0)
            engine.backward(engine(x).square().mean())
            assert not engine.step() and engine.last is not None and engine.last.skipped
            assert not math.isfinite(engine.last.grad_norm or 0.0)
            engine.close()


# -- the loss scale ---------------------------------------------------------------------------------------------------


def test_the_loss_scale_waits_for_overflows_in_a_row_and_stays_in_its_bounds() -> None:
    scaler = LossScaler(
        ScaleSettings(
            initial_scale=8.0,
            hysteresis=2,
            growth_interval=2,
            min_scale=2.0,
            max_scale=32.0,
            growth_factor=3.0,
        )
    )

    def scales(*norms: float) -> list[float]:
        found = []
        for norm in norms:
            assert scaler.update(norm) == (not math.isfinite(norm))
            found.append(scaler.scale)
        return found

    bad = math.inf
    assert scales(bad, 1.0, bad, 1.0) == [8.0] * 4  # never two in a row
    assert scales(bad, bad) == [8.0, 4.0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert scales(math.nan) == [2.0]  # and each that follows
        again = LossScaler(scaler.settings, says=False)
        again.load_state_dict(scaler.state_dict())
        assert again.update(bad) and again.state_dict() == {"scale": 2.0, "good_steps": 0, "overflows": 4}
    with pytest.warns(RuntimeWarning, match=r"min_scale=2 and cannot go lower") as said:
        assert scales(bad, bad) == [2.0, 2.0]
    assert len(said) == 1
    assert scales(1.0, 1.0, 1.0, 1.0) == [2.0, 6.0, 6.0, 18.0]
    assert scales(1.0, 1.0, 1.0, 1.0) == [18.0, 32.0, 32.0, 32.0]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(max_scale=0), "max_scale=0"),
        (dict(max_scale=1.0), "initial_scale=65536.0 is above max_scale=1.0"),
        (dict(min_scale=4.0, max_scale=2.0), "min_scale=4.0 is above max_scale=2.0"),
        (dict(initial_scale=0.5), "below min_scale=1.0"),
        (dict(hysteresis=0), "hysteresis=0"),
        (dict(growth_interval=True), "growth_interval=True"),
        (dict(growth_factor=0.5), "growth_factor=0.5"),
        (dict(backoff_factor=1.0), "backoff_factor=1.0"),
        (dict(hysterisis=2), "Did you mean 'hysteresis'"),
    ],
)
def test_wrong_settings_of_the_loss_scale_say_why(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Engine(nn.Linear(1, 1), precision=dict(name="fp16", **wrong))


# -- what is not sent, and what is refused ----------------------------------------------------------------------------


@ranks(2)
def test_no_sync_saves_communication() -> None:
    for zero, times in (({}, 1), (dict(zero=dict(stage=1)), 1)):
        engine = Engine(Blocks(), dict(data=2, **zero), optimizer=ADAMW)
        sent = []
        for quiet in (True, False):
            with record() as log:
                for number in range(4):
                    with engine.no_sync() if quiet and number < 3 else nullcontext():
                        engine.backward(engine(torch.ones(2, WIDTH)).square().mean())
                engine.step()
            sent.append(
                sum(e.bytes for e in log.entries if e.kind in ("all_reduce", "reduce_scatter") and e.bytes > 64)
            )
        assert sent[1] == 4 * sent[0] > 0, (zero, sent, times)
        engine.close()


def test_the_halves_of_a_step_refuse_what_makes_no_sense() -> None:
    engine = Engine(Blocks(), optimizer=ADAMW)
    with pytest.raises(TrainingError, match=r"step\(\) without a backward"):
        engine.step()
    loss = engine(torch.ones(2, WIDTH)).square()
    with pytest.raises(SpecError, match=r"tensor of shape \(2, 2\)"):
        engine.backward(loss)
    with pytest.raises(SpecError, match="computed from the model's parameters"):
        engine.backward(torch.tensor(1.0))
    engine.backward(loss.mean())
    with pytest.raises(CheckpointError, match="1 backwards without a step"):
        engine.save("nowhere")
    engine.zero_grad()
    with pytest.raises(TrainingError, match="without a backward"):
        engine.step()
    with pytest.raises(TrainingError, match="no optimizer"):
        Engine(Blocks())(torch.ones(2, WIDTH))
    refused: list[tuple[dict[str, Any], str]] = [
        (dict(clip_grad_norm=1.0, clip_grad_value=1.0), "not both"),
        (dict(clip_grad_norm=1.0, clip_norm_type=3), "clip_norm_type=3"),
        (dict(clip_norm_type=True), "clip_norm_type=True"),
        (dict(clip_grad_value=0), "clip_grad_value=0"),
    ]
    for wrong, message in refused:
        with pytest.raises(SpecError, match=message):
            Engine(Blocks(), **wrong)


@ranks(2)
def test_dropout_of_a_loop_is_that_of_train_step_and_another_in_each_forward() -> None:
    def drops() -> GPT:
        return GPT(GPTConfig(vocab_size=VOCABULARY, hidden=32, layers=1, heads=4, max_positions=16, dropout=0.5))

    ids = torch.arange(24).view(4, 6)
    found = []
    for parallel in (dict(data=2), dict(data=2, zero=dict(stage=3)), dict(tensor=2)):
        one, other = (Engine(drops, parallel, optimizer=ADAMW, precision="fp64") for _ in range(2))
        mine = one.shard_batch(ids)
        losses = []
        for _ in range(2):
            loss = one(mine, labels=mine).loss
            one.backward(loss)
            one.step()
            rows = all_gather(loss.detach().view(1), one.world.data_group)
            losses.append(float(rows.mean()))
        assert losses == pytest.approx([other.train_step(mine) for _ in range(2)], rel=1e-9)
        with torch.no_grad():
            assert float(one(mine, labels=mine).loss) != float(one(mine, labels=mine).loss)
        found.append(losses)
        one.close()
        other.close()
    assert found[1] == pytest.approx(found[0], rel=1e-9)
    assert found[2] == pytest.approx(found[0], rel=1e-9)


@ranks(2)
def test_an_optimizer_of_whole_matrices_steps_under_zero_as_in_one_process() -> None:
    def losses(make: Callable[[], Any]) -> list[float]:
        net, generator = make(), torch.Generator().manual_seed(3)
        return [
            net.train_step(net.shard_batch(torch.randint(VOCABULARY, (ROWS, 7), generator=generator)))
            for _ in range(STEPS)
        ]

    settings: dict[str, Any] = dict(optimizer=dict(name=torch.optim.Adafactor, lr=0.1), precision="fp64")
    found = losses(lambda: Engine(gpt, dict(data=2, zero=dict(stage=3)), **settings))
    model = build_serial()
    optimizer, generator = torch.optim.Adafactor(model.parameters(), lr=0.1), torch.Generator().manual_seed(3)
    for loss in found:
        ids = torch.randint(VOCABULARY, (ROWS, 7), generator=generator)
        wanted = model(ids, labels=ids).loss
        assert loss == pytest.approx(float(wanted), rel=1e-9)
        wanted.backward()
        optimizer.step()
        optimizer.zero_grad()


def build_serial() -> GPT:
    """The weights that the engine's function starts from, in one process."""
    engine = Engine(gpt, dict(data=2), precision="fp64")
    model = gpt().double()
    model.load_state_dict(engine.full_state_dict())
    engine.close()
    return model
