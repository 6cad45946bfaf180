"""An engine with ``zero`` trains as the plain engine does, hands over to it and back, and holds its share only."""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshfold.checkpoint.tensors import TensorFile
from meshfold.engine import Engine
from meshfold.engine.zero.states import ZeroStates
from meshfold.mesh import SpecError, record
from meshfold.mesh.testing import fake_world, ranks, run_on_ranks, tensor_memory
from meshfold.models import GPT, GPTConfig
from meshfold.zero_gemini import MemoryPlanError
from meshfold.zero_gemini.chunks import parameter_table as members

VOCABULARY, CLIP = 37, 0.5
# A large epsilon: Adam divides gradients that are zero but for rounding, such as those of key biases, by themselves.
ADAMW: dict[str, Any] = dict(name="adamw", lr=1e-2, weight_decay=0.1, no_decay="norms_and_biases", eps=1e-4)
TOLERANCE = {"fp64": 1e-9, "fp32": 2e-5, "bf16": 2e-3, "fp16": 2e-3}


def gpt() -> GPT:
    return GPT(GPTConfig(vocab_size=VOCABULARY, hidden=32, layers=2, heads=4, max_positions=16, dropout=0.1))


def batches(count: int, rows: int = 6) -> list[dict[str, Tensor]]:
    """Rows have different numbers of labels that count."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(count):
        ids = torch.randint(VOCABULARY, (rows, 8), generator=generator)
        found.append(
            {
                "input_ids": ids,
                "labels": ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.2, -100),
            }
        )
    return found


def engine_of(parallel: dict[str, Any], model: Callable[[], nn.Module] | nn.Module = gpt, **settings: Any) -> Engine:
    arguments: dict[str, Any] = {"optimizer": ADAMW, "precision": "fp64", "clip_grad_norm": CLIP}
    return Engine(model, parallel, **{**arguments, **settings})


def train(engine: Engine, given: list[dict[str, Tensor]]) -> list[float]:
    """The loss of every micro-step, and the gradient's norm of every step."""
    seen = []
    for batch in given:
        seen.append(engine.train_step(engine.shard_batch(batch)))
        assert engine.last is not None
        if engine.last.stepped:
            assert engine.last.grad_norm is not None
            seen.append(engine.last.grad_norm)
    return seen


def assert_same_state(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> None:
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        if tolerance < 1e-4:
            torch.testing.assert_close(
                found[name], value, rtol=tolerance, atol=tolerance, msg=partial("{}: {}".format, name)
            )
        else:  # one rounding of a gradient in 16 bits may turn a small step round
            assert float(((found[name] - value).abs() > 2e-3).float().mean()) < 0.02, name


# -- training is that of the plain engine -----------------------------------------------------------------------------

ZEROS: list[dict[str, Any]] = [
    dict(stage=1, placement="cuda"),
    dict(stage=2),
    dict(stage=3),
    dict(stage=3, placement="cpu"),
    dict(stage=3, placement="static", offload_optim_frac=0.5, offload_param_frac=0.3),
    dict(stage=1, placement="cpu"),
    dict(stage=2, placement="static", offload_optim_frac=0.5),
    dict(stage=3, placement="cuda", reshard_after_forward=False),
]
MESHES: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, dict(data=2)),
    (4, dict(data=4)),
    (4, dict(data=2, tensor=2)),
    (4, dict(data=2, tensor=2, sequence=dict(mode="megatron"))),
    (4, dict(tensor=dict(mode="2d", size=4))),
    (4, dict(data=2, tensor=dict(mode="2d", grid=(2, 1)))),
    (8, dict(data=2, tensor=dict(mode="2.5d", depth=1, size=4))),
]
# Number of the mesh, precision, numbers of the zeros, micro-steps of a step.
CHOSEN: list[tuple[int, str, tuple[int, ...], int]] = [
    (0, "fp64", (0, 3), 2),
    (1, "fp64", (0, 4, 7), 2),
    (3, "fp64", (2, 3), 1),
    (5, "fp64", (1,), 1),
    (1, "fp32", (2, 5), 2),
    (0, "bf16", (2, 3), 1),
    (3, "bf16", (4,), 2),
    (1, "fp16", (0, 3), 2),
]
ALL = [
    (mesh, precision, tuple(range(len(ZEROS))), accumulation)
    for mesh in range(len(MESHES))
    for precision in TOLERANCE
    for accumulation in (1, 3)
] + [(3, "bf16", (1, 7), 2), (1, "fp64", (1, 6), 2)]


def compare(parallel: dict[str, Any], zeros: list[dict[str, Any]], precision: str, accumulation: int) -> None:
    """Evaluated before the first step, two steps with dropout and clipping, evaluated again."""

    def run(spec: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
        given = batches(2 * accumulation)
        with engine_of(spec, precision=precision, gradient_accumulation=accumulation) as engine:
            before = engine.eval_step(engine.shard_batch(given[0]))
            seen = train(engine, given)
            after = engine.eval_step(engine.shard_batch(given[0]))
            assert (engine.steps, engine.skipped_steps) == (2, 0)
            return [before, *seen, after], engine.full_state_dict()

    wanted, weights = run(parallel)
    assert wanted[accumulation + 1] > CLIP, "clipping has to be at work"
    for zero in zeros:
        found, state = run({**parallel, "zero": zero})
        assert found == pytest.approx(wanted, rel=TOLERANCE[precision]), zero
        assert_same_state(state, weights, TOLERANCE[precision])


def described(case: tuple[int, str, tuple[int, ...], int]) -> str:
    return f"{MESHES[case[0]][1]}-{case[1]}-{case[3]}".translate(str.maketrans("", "", "'{}() "))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=described(case)) for case in CHOSEN),
        *(pytest.param(case, id=f"all-{described(case)}", marks=pytest.mark.slow) for case in ALL),
    ],
)
def test_training_is_that_of_the_plain_engine(case: tuple[int, str, tuple[int, ...], int]) -> None:
    (world, parallel), precision, zeros, accumulation = MESHES[case[0]], *case[1:]
    run_on_ranks(world, compare, parallel, [ZEROS[number] for number in zeros], precision, accumulation)


OPTIMIZERS: list[dict[str, Any]] = [
    dict(name="sgd", lr=0.1, momentum=0.9, weight_decay=0.01),
    dict(name=torch.optim.Adagrad, lr=1e-2),
    dict(name=torch.optim.RMSprop, lr=1e-3, momentum=0.5),
    dict(name="adamw", lr=1e-2, amsgrad=True),
]


def other_optimizers(parallel: dict[str, Any], first: int) -> None:
    for optimizer in OPTIMIZERS[first::2]:
        runs = []
        for spec in (parallel, {**parallel, "zero": dict(stage=3)}):
            with engine_of(spec, optimizer=optimizer) as engine:
                runs.append((train(engine, batches(3)), engine.full_state_dict()))
        (wanted, weights), (found, state) = runs
        assert found == pytest.approx(wanted, rel=1e-9), optimizer
        assert_same_state(state, weights, 1e-8)


@pytest.mark.parametrize("first", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_any_elementwise_optimizer_steps_on_shards(first: int) -> None:
    run_on_ranks(2, other_optimizers, dict(data=2), first)


# -- checkpoints ------------------------------------------------------------------------------------------------------

Leg = tuple[int, dict[str, Any]]
LEGS: list[Leg] = [
    (2, dict(data=2, zero=dict(stage=3))),
    (1, {}),
    (4, dict(data=2, tensor=2, zero=dict(stage=1))),
    (1, dict(zero=dict(stage=2, placement="cpu"))),
    (4, dict(data=4, zero=dict(stage=3, placement="cpu"))),
    (2, dict(data=2)),
]


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3, 6], gamma=0.5)


def leg(parallel: dict[str, Any], path: str, first: int, count: int, **settings: Any) -> tuple[list[float], float]:
    """Losses and norms of some steps from the checkpoint at ``path`` on, to the next one; and the rate in the end."""
    with engine_of(parallel, lr_scheduler=halving, **settings) as engine:
        if first:
            engine.load(path)
            assert engine.steps == first
        seen = train(engine, batches(first + count)[first:])
        if path:
            engine.save(path)
        assert engine.last is not None
        return seen, engine.last.lr


def relay(legs: list[Leg], path: Path, **settings: Any) -> tuple[list[float], float]:
    """Two steps under each of the specs."""
    seen: list[float] = []
    for number, (size, parallel) in enumerate(legs):
        arguments = (parallel, str(path), 2 * number, 2)
        found = run_on_ranks(size, leg, *arguments, **settings)
        assert all(rank == found[0] for rank in found)
        seen, rate = seen + found[0][0], found[0][1]
    return seen, rate


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("precision", "legs"),
    [
        pytest.param("fp64", [LEGS[0], LEGS[1], LEGS[4]], id="fp64"),
        pytest.param("bf16", LEGS[:4], id="bf16"),
        pytest.param("fp32", LEGS[:4], id="fp32", marks=pytest.mark.slow),
        pytest.param("fp64", LEGS, id="fp64-all", marks=pytest.mark.slow),
    ],
)
def test_a_run_handed_over_is_the_unbroken_run(precision: str, legs: list[Leg], tmp_path: Path) -> None:
    wanted, rate = leg({}, "", 0, 2 * len(legs), precision=precision)
    found, found_rate = relay(legs, tmp_path / "ckpt", precision=precision)
    assert found_rate == rate
    assert found == pytest.approx(wanted, rel={"fp64": 1e-9, "fp32": 1e-4, "bf16": 2e-2}[precision])
    state = TensorFile(tmp_path / "ckpt" / "optimizer.safetensors")
    steps = {int(value) for name, value in state.items() if name.endswith("/step")}
    assert steps == {2 * len(legs)}


def save_again(parallel: dict[str, Any], load: str, save: str, steps: int, **settings: Any) -> None:
    with engine_of(parallel, lr_scheduler=halving, **settings) as engine:
        if load:
            engine.load(load)
        train(engine, batches(steps))
        engine.save(save)


CHAIN: list[Leg] = [
    (4, dict(data=2, tensor=2, zero=dict(stage=3))),
    (2, dict(data=2, zero=dict(stage=1, placement="cpu"))),
    (1, dict(zero=dict(stage=3))),
    (1, {}),
    (4, dict(data=4, zero=dict(stage=2))),
]


@pytest.mark.few(1)
@pytest.mark.parametrize("precision", ["fp64", "bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_a_checkpoint_goes_through_every_stage_and_world_to_the_bit(precision: str, tmp_path: Path) -> None:
    for number, (size, parallel) in enumerate(CHAIN):
        load = str(tmp_path / str(number - 1)) if number else ""
        run_on_ranks(
            size,
            save_again,
            parallel,
            load,
            str(tmp_path / str(number)),
            0 if number else 2,
            precision=precision,
        )
    same_files(tmp_path, len(CHAIN))


def test_moments_in_bfloat16_go_through_a_checkpoint_to_the_bit(tmp_path: Path) -> None:
    chain: list[Leg] = [(2, dict(data=2, zero=dict(regime="B"))), (1, dict(zero=dict(stage=1, regime="B")))]
    for number, (size, parallel) in enumerate(chain):
        load = str(tmp_path / str(number - 1)) if number else ""
        run_on_ranks(
            size,
            save_again,
            parallel,
            load,
            str(tmp_path / str(number)),
            0 if number else 2,
            precision="bf16",
        )
    same_files(tmp_path, len(chain))


def same_files(folder: Path, count: int) -> None:
    for file in ("model.safetensors", "optimizer.safetensors"):
        first = TensorFile(folder / "0" / file)
        for number in range(1, count):
            other = TensorFile(folder / str(number) / file)
            assert set(first) == set(other), number
            for name in first:
                assert first[name].dtype == other[name].dtype, (number, name)
                assert torch.equal(first[name], other[name]), (number, name)


def test_weights_alone_and_a_state_dict_go_in(tmp_path: Path) -> None:
    plain = engine_of({}, precision="bf16")
    train(plain, batches(2))
    plain.save(tmp_path / "ckpt")
    wanted = plain.full_state_dict()
    run_on_ranks(2, take_weights, str(tmp_path / "ckpt"), wanted)


def take_weights(path: str, wanted: dict[str, Tensor]) -> None:
    zero = dict(data=2, zero=dict(stage=3))
    with engine_of(zero, precision="bf16") as engine, engine_of(zero, precision="bf16") as other:
        engine.load(path, weights_only=True)
        other.load_state_dict(wanted)
        for one in (engine, other):
            assert one.steps == 0
            found = one.full_state_dict()
            assert all(torch.equal(found[name], value) for name, value in wanted.items())
        assert train(engine, batches(2)) == train(other, batches(2))


@pytest.mark.few(1)
@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_an_earlier_checkpoint_takes_everything_back(precision: str, tmp_path: Path) -> None:
    """Of before the first step: there is no optimizer state in it, and none must be left."""
    engine = engine_of(dict(zero=dict(stage=3)), precision=precision)
    engine.save(tmp_path / "ckpt")
    first = train(engine, batches(3))
    engine.load(tmp_path / "ckpt")
    assert train(engine, batches(3)) == first


# -- regimes ----------------------------------------------------------------------------------------------------------


def learn(world: int) -> None:
    """One batch over and over: B and C lose little of what A learns."""
    lost, batch = {}, batches(1)[0]
    for regime in ("A", "B", "C"):
        spec = dict(data=world, zero=dict(stage=3, regime=regime))
        with engine_of(spec, build_quiet, precision="bf16") as engine:
            losses = [engine.train_step(engine.shard_batch(batch)) for _ in range(25)]
            lost[regime] = losses[-1]
            assert losses[-1] < 0.6 * losses[0], regime
    assert lost["B"] < 1.2 * lost["A"] + 0.05
    assert lost["C"] < 1.3 * lost["A"] + 0.05


def build_quiet() -> GPT:
    return GPT(GPTConfig(vocab_size=VOCABULARY, hidden=32, layers=2, heads=4, max_positions=16))


@pytest.mark.slow  # packages/zero_gemini/tests/test_gemini.py has a quick one
@pytest.mark.parametrize("world", [1, 2])
def test_regimes_learn(world: int) -> None:
    run_on_ranks(world, learn, world)


@pytest.mark.parametrize("regime", ["B", "C"])
def test_a_regime_of_bfloat16_refuses_other_precisions_and_optimizers(regime: str) -> None:
    for settings in (
        dict(precision="fp32"),
        dict(precision="fp16"),
        dict(precision="fp64"),
        dict(precision="bf16", optimizer=dict(name="sgd", lr=0.1)),
    ):
        with pytest.raises((SpecError, MemoryPlanError), match=r"regime.*bf16"):
            engine_of(dict(zero=dict(stage=3, regime=regime)), **settings)


@pytest.mark.parametrize(
    ("zero", "message"),
    [
        (dict(stage=2, placement="static", offload_param_frac=0.5), "offload_param_frac=0.5.*stage=3"),
        (
            dict(placement="static", offload_param_frac=0.5, offload_optim_frac=0.2),
            "raise offload_optim_frac",
        ),
    ],
)
def test_shares_that_cannot_be_are_refused(zero: dict[str, Any], message: str) -> None:
    with pytest.raises((SpecError, MemoryPlanError), match=message):
        engine_of(dict(zero=zero))


def where(engine: Engine) -> set[tuple[str, str]]:
    """Where parameters and states of chunks live."""
    states = engine.states
    assert isinstance(states, ZeroStates)
    return {(placement.parameters, placement.state) for placement in states.gemini.placements.values()}


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("zero", "placements"),
    [
        (dict(placement="const"), {("device", "host")}),
        (dict(placement="const", gpu_memory_limit=3 * 2**19), {("device", "host"), ("host", "host")}),
        (dict(placement="cpu", offload_path=True), {("host", "disk")}),
        (
            dict(placement="static", offload_optim_frac=0.5, offload_path=True),
            {("device", "device"), ("device", "disk")},
        ),
        (dict(stage=2, placement="cpu", offload_path=True), {("device", "disk")}),
        (dict(placement="auto", gpu_memory_limit=2**31), {("device", "device")}),
        (dict(placement="auto", gpu_memory_limit=2**21, host_memory_limit=2**34), {("host", "host")}),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_every_placement_begins_where_the_spec_says(
    zero: dict[str, Any], placements: set[tuple[str, str]], tmp_path: Path
) -> None:
    spec = {**zero, **({"offload_path": str(tmp_path)} if "offload_path" in zero else {})}
    with engine_of(dict(zero=spec), middling, precision="bf16") as engine:
        assert where(engine) == placements
        losses = train(engine, batches(1))
    with engine_of(dict(zero=dict(placement="cuda")), middling, precision="bf16") as engine:
        assert train(engine, batches(1)) == losses
    assert not list(tmp_path.iterdir())


def middling() -> GPT:
    """Several chunks."""
    return GPT(GPTConfig(vocab_size=VOCABULARY, hidden=128, layers=4, heads=4, max_positions=16))


# -- overflow, evaluation, schedulers ---------------------------------------------------------------------------------


def overflow(zero: dict[str, Any]) -> None:
    """A scale that overflows at first: the step is skipped and nothing changes, then it goes on as the plain engine."""
    precision = dict(name="fp16", initial_scale=2.0**24, backoff_factor=2.0**-6)
    runs = []
    for spec in (dict(data=2), dict(data=2, zero=zero)):
        with engine_of(spec, precision=precision) as engine:
            before = engine.full_state_dict()
            found = []
            for number, batch in enumerate(batches(5)):
                found.append(engine.train_step(engine.shard_batch(batch)))
                assert engine.last is not None
                if number == 0:
                    assert engine.last.skipped and engine.steps == 0
                    after = engine.full_state_dict()
                    assert all(torch.equal(after[name], value) for name, value in before.items())
            assert engine.last is not None and engine.steps + engine.skipped_steps == 5 and engine.steps >= 3
            runs.append((found, engine.skipped_steps, engine.last.loss_scale))
    assert runs[1][0] == pytest.approx(runs[0][0], rel=2e-3)
    assert runs[1][1:] == runs[0][1:]


@pytest.mark.few(1)
@pytest.mark.parametrize("zero", [dict(stage=1), dict(stage=3, placement="cpu")])
def test_a_step_that_overflows_is_skipped(zero: dict[str, Any]) -> None:
    run_on_ranks(2, overflow, zero)


@ranks(2)
def test_evaluation_only_needs_no_optimizer() -> None:
    batch = batches(1)[0]
    found = []
    for spec in (
        dict(data=2),
        dict(data=2, zero=dict(stage=3)),
        dict(data=2, zero=dict(stage=1, placement="cpu")),
    ):
        with engine_of(spec, optimizer=None, clip_grad_norm=None) as engine:
            found.append(engine.eval_step(engine.shard_batch(batch)))
            assert engine.eval_step(engine.shard_batch(batch)) == found[-1]
    assert found[1:] == pytest.approx(found[:1] * 2, rel=1e-12)


@ranks(2)
def test_two_engines_train_in_turns_in_one_process() -> None:
    specs: list[dict[str, Any]] = [
        dict(data=2, zero=dict(stage=3)),
        dict(data=2, zero=dict(stage=2, placement="cpu")),
    ]
    alone = []
    for spec in specs:
        with engine_of(spec) as engine:
            alone.append(train(engine, batches(3)))
    engines = [engine_of(spec) for spec in specs]
    together: list[list[float]] = [[], []]
    for batch in batches(3):
        for engine, seen in zip(engines, together, strict=True):
            seen += train(engine, [batch])
    assert together == alone
    for engine in engines:
        engine.close()


@ranks(2)
def test_a_scheduler_moves_the_rate_without_warnings() -> None:
    # The general way, our Adam, and one that makes its state as soon as it is made.
    for precision, kind in (("fp64", "adamw"), ("bf16", "adamw"), ("fp32", torch.optim.Adagrad)):
        with (
            warnings.catch_warnings(),
            engine_of(
                dict(data=2, zero=dict(stage=3)),
                precision=precision,
                optimizer=dict(name=kind, lr=1e-2),
                lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step),
            ) as engine,
        ):
            warnings.simplefilter("error")
            rates = []
            for batch in batches(3):
                engine.train_step(engine.shard_batch(batch))
                assert engine.last is not None
                rates.append(engine.last.lr)
            assert engine.lr_scheduler.optimizer is engine.optimizer
        assert rates == [1e-2, 5e-3, 2.5e-3]


def test_the_seed_decides_what_is_rounded() -> None:
    def weights(seed: int, regime: str) -> dict[str, Tensor]:
        engine = engine_of(dict(zero=dict(stage=3, regime=regime)), build_quiet, precision="bf16", seed=seed)
        train(engine, batches(2))
        with closing(engine):
            return engine.full_state_dict()

    once, again, other = weights(0, "B"), weights(0, "B"), weights(1, "B")
    assert all(torch.equal(again[name], value) for name, value in once.items())
    assert any(not torch.equal(other[name], value) for name, value in once.items())


# -- what is held -----------------------------------------------------------------------------------------------------


def deep() -> GPT:
    return GPT(GPTConfig(vocab_size=VOCABULARY, hidden=64, layers=12, heads=4, max_positions=16))


def test_neither_a_function_nor_a_step_is_ever_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    # As many chunks as there are of a model that is not a test's.
    monkeypatch.setattr(members, "LEAST_ELEMS", 2**13)
    monkeypatch.setattr(members, "PARTS", 50)
    elements = sum(p.numel() for p in deep().parameters())
    with tensor_memory() as whole:
        engine_of({}, deep, precision="fp32").close()
    assert whole.peak > 4 * elements  # the measure measures
    gc.collect()  # engines that tests before have left would be freed in the next measurement
    with fake_world(64, rank=3):
        with tensor_memory() as memory:
            engine = engine_of(dict(data=64, zero=dict(stage=3)), deep, precision="fp32")
        assert 12 * elements / 64 < memory.peak < 3 * elements, memory.peak / elements
        assert sum(p.numel() for p in engine.model.parameters()) == 0
        batch = torch.zeros(1, 8, dtype=torch.int64)
        engine.train_step(batch)
        with tensor_memory() as memory:
            engine.train_step(batch)
        assert memory.peak < 3 * elements, memory.peak / elements
        assert sum(p.numel() for p in engine.model.parameters()) == 0
        engine.close()


@ranks(2)
def test_what_is_gathered_for_a_forward_may_stay_for_its_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "LEAST_ELEMS", 2**11)
    gathers: dict[bool, int] = {}
    for reshards in (True, False):
        zero = dict(stage=3, placement="cuda", reshard_after_forward=reshards)
        with engine_of(dict(data=2, zero=zero), deep) as engine:
            given = [engine.shard_batch(batch) for batch in batches(4)]
            for batch in given[:2]:
                engine.train_step(batch)
            with record() as log:
                engine.train_step(given[2])
            found = [entry for entry in log.entries if entry.kind == "all_gather"]
            gathers[reshards] = sum(entry.block_bytes > 1000 for entry in found)  # not how many tokens each has
            assert isinstance(engine.states, ZeroStates)
            chunks = engine.states.gemini.chunks
            assert not any(chunk.is_gathered for chunk in chunks)
            engine.model(given[3]["input_ids"])  # of which no backward comes
            engine.train_step(given[3])
            assert not any(chunk.is_gathered for chunk in chunks)
    assert gathers[False] == len(chunks) > 3
    assert gathers[True] > 1.5 * len(chunks)


class Mixed(nn.Module):
    """A tied head, a frozen block, a part that is never used, a single number, a table of integers, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3))
        self.blocks[1].requires_grad_(False)
        self.unused = nn.Linear(16, 16)
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.arange(VOCABULARY), requires_grad=False)
        self.register_buffer("scale", torch.full((16,), 0.5))
        self.head = nn.Linear(16, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embed(self.shift[ids]) * self.get_buffer("scale")
        for block in self.blocks:
            x = x + block(x)
        y: Tensor = self.head(x) * self.temperature
        return y


def mixed() -> Mixed:
    torch.manual_seed(3)
    return Mixed()


def mixed_loss(logits: Tensor, batch: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def odd_parameters(parallel: dict[str, Any], folder: str, make: Callable[[], Mixed]) -> None:
    ids = [batch["input_ids"] for batch in batches(6)]

    def run(
        spec: dict[str, Any], optimizer: dict[str, Any], name: str, precision: str
    ) -> tuple[list[float], dict[str, Tensor]]:
        settings = dict(optimizer=optimizer, precision=precision, loss_fn=mixed_loss)
        with engine_of(spec, make(), **settings) as engine:
            if spec.get("zero"):
                assert all(not p.numel() for p in engine.model.parameters()) or engine.mesh.world_size == 1
                assert not engine.model.blocks[1][0].weight.requires_grad  # type: ignore[index, union-attr]
            seen = [engine.train_step(engine.shard_batch(batch)) for batch in ids[:3]]
            engine.save(f"{folder}/{name}")
        with engine_of(spec, make(), **settings) as engine:
            engine.load(f"{folder}/{name}")
            seen += [engine.train_step(engine.shard_batch(batch)) for batch in ids[3:]]
            return seen, engine.full_state_dict()

    for optimizer in (dict(name="adamw", lr=1e-2), dict(name="sgd", lr=0.1, momentum=0.9)):
        for precision in ("fp64", "fp32"):
            wanted, weights = run(parallel, optimizer, "plain", precision)
            found, state = run({**parallel, "zero": dict(stage=3)}, optimizer, "zero", precision)
            assert found == pytest.approx(wanted, rel=TOLERANCE[precision])
            assert_same_state(state, weights, TOLERANCE[precision])
            first = make().state_dict()
            for key in ("blocks.1.0.weight", "unused.weight"):  # neither stepped nor decayed
                assert torch.equal(state[key].float(), first[key]), key
            assert state["head.weight"] is state["embed.weight"]
            kept = TensorFile(Path(folder) / "zero" / "optimizer.safetensors")
            assert set(kept) == set(TensorFile(Path(folder) / "plain" / "optimizer.safetensors"))


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_frozen_tied_unused_and_odd_parameters(world: int, tmp_path: Path) -> None:
    run_on_ranks(world, odd_parameters, dict(data=world), str(tmp_path), mixed)


def hugging_face(parallel: dict[str, Any]) -> None:
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
        word_embed_proj_dim=32,
        dropout=0.1,
        pad_token_id=1,
        bos_token_id=2,
        eos_token_id=2,
    )
    runs = []
    for spec in (parallel, {**parallel, "zero": dict(stage=3)}):
        with engine_of(spec, lambda: OPTForCausalLM(config)) as engine:
            seen = train(engine, batches(3))
            runs.append(([*seen, engine.eval_step(engine.shard_batch(batches(1)[0]))], engine.full_state_dict()))
    for found, state in runs[1:]:
        assert found == pytest.approx(runs[0][0], rel=1e-9)
        assert_same_state(state, runs[0][1], 1e-8)
    assert math.isfinite(runs[0][0][0])


def test_a_hugging_face_model_trains_in_chunks() -> None:
    run_on_ranks(2, hugging_face, dict(data=2))


@pytest.mark.slow
def test_a_hugging_face_model_trains_in_chunks_under_tensor_parallelism() -> None:
    run_on_ranks(4, hugging_face, dict(data=2, tensor=2))


class Borrower(nn.Module):
    """Blocks that compute with a parameter of their parent's other child."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(x, self.embed.weight)


def borrow(least_elems: int) -> None:
    made = members.LEAST_ELEMS
    members.LEAST_ELEMS = least_elems
    try:
        engine = engine_of(dict(zero=dict(stage=3)), Borrower, loss_fn=lambda out, batch: out.sum())
    finally:
        members.LEAST_ELEMS = made
    with pytest.raises(RuntimeError) as raised:
        engine.train_step(engine.shard_batch(torch.zeros(2, 3, dtype=torch.int64)))
    assert "embed.weight" in raised.value.__notes__[0] and "use stage 2" in raised.value.__notes__[0]


def test_a_parameter_used_outside_of_its_module_is_named() -> None:
    run_on_ranks(2, borrow, 1024)


def test_first_values_of_large_parameters_are_made_some_rows_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from meshfold.mesh.initialization import parameter_values

    wanted = engine_of(dict(zero=dict(stage=3))).full_state_dict()
    monkeypatch.setattr(parameter_values, "_AT_ONCE", 100)
    pieces = []
    by_rows = parameter_values._by_rows
    monkeypatch.setattr(parameter_values, "_by_rows", lambda *given: pieces.append(given[1]) or by_rows(*given))
    found = engine_of(dict(zero=dict(stage=3))).full_state_dict()
    assert "embed.weight" in pieces and all(torch.equal(found[name], wanted[name]) for name in wanted)
