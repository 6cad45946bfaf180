"""Under ``zero``: gradients that nobody looks at are stepped with as they come, and ``no_sync`` sends none."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.engine import Engine
from meshfold.engine.zero.plan import MOST
from meshfold.engine.zero.states import ZeroStates
from meshfold.mesh import MeshfoldError, ParallelSpec, record
from meshfold.mesh.testing import run_on_ranks
from meshfold.models import GPT, GPTConfig
from meshfold.planner import estimate, find_machine
from meshfold.zero_gemini import Gemini, MemoryPlanError
from meshfold.zero_gemini.chunks import parameter_table as members
from meshfold.zero_gemini.planner import MiB

WORDS, WIDTH, ROWS = 37, 32, 8


def gpt() -> GPT:
    return GPT(GPTConfig(vocab_size=WORDS, hidden=64, layers=4, heads=4, max_positions=16))


def gemini_of(engine: Engine) -> Gemini:
    states = engine.states
    assert isinstance(states, ZeroStates)
    return states.gemini


def engine_of(
    model: nn.Module | Callable[[], nn.Module] = gpt,
    world: int = 1,
    zero: dict[str, Any] | None = None,
    **settings: Any,
) -> Engine:
    """With as many chunks as there are of a model that is not a test's."""
    given: dict[str, Any] = {"optimizer": dict(name="adamw", lr=1e-2), "precision": "bf16"}
    made, members.LEAST_ELEMS = members.LEAST_ELEMS, 2**11
    try:
        return Engine(model, dict(data=world, zero=zero), **{**given, **settings})
    finally:
        members.LEAST_ELEMS = made


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(WORDS, (ROWS, 8), generator=generator) for _ in range(count)]


def train(engine: Engine, steps: int = 3) -> list[float]:
    seen = []
    for ids in batches(steps):
        seen.append(engine.train_step(engine.shard_batch(ids)))
        assert engine.last is not None
        if engine.last.stepped:
            seen.append(float(engine.last.grad_norm))  # type: ignore[arg-type]
    return seen


# -- nothing is held ---------------------------------------------------------------------------------------------------


def who_holds(world: int) -> None:
    """A norm too large to clip by changes nothing, but that all gradients are waited for."""
    zero: dict[str, Any]
    for zero in (dict(stage=3, placement="cpu"), dict(stage=2, placement="static", offload_optim_frac=0.5)):
        seen = []
        clips: list[dict[str, Any]] = [dict(clip_grad_norm=1e9), {}]
        for settings in clips:
            with engine_of(world=world, zero=zero, **settings) as engine:
                seen.append((train(engine), engine.full_state_dict()))
                assert gemini_of(engine).holds_gradients == bool(settings)
        assert seen[0][0] == seen[1][0]
        assert all(torch.equal(value, seen[1][1][name]) for name, value in seen[0][1].items())
    for settings in (
        dict(clip_grad_value=0.1),
        dict(clip_norm_type=math.inf),
        dict(precision="fp16"),
        dict(precision="fp64"),
        dict(optimizer=dict(name="sgd", lr=0.1)),
    ):
        with engine_of(world=world, zero=dict(stage=3), **settings) as engine:
            train(engine, 1)
            assert gemini_of(engine).holds_gradients, settings


@pytest.mark.few(1)
@pytest.mark.parametrize("world", [1, 2])
def test_gradients_are_held_where_something_looks_at_all_of_them(world: int) -> None:
    run_on_ranks(world, who_holds, world)


def with_loops_of_ones_own() -> None:
    """Both kinds of loops in turns, accumulation and a scheduler: as if all gradients were held."""
    seen = []
    for clip in (1e9, None):
        with engine_of(
            zero=dict(stage=3, placement="cpu"),
            clip_grad_norm=clip,
            gradient_accumulation=2,
            lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step),
        ) as engine:
            found = []
            for _ in range(2):
                found += train(engine, 2)
                assert gemini_of(engine).holds_gradients == (clip is not None)
                for ids in batches(2):
                    engine.backward(F.cross_entropy(engine(ids).logits.flatten(0, 1).float(), ids.flatten()))
                engine.step()
                assert gemini_of(engine).holds_gradients
            seen.append((found, engine.full_state_dict(), engine.eval_step(batches(1)[0])))
    assert seen[0][0] == seen[1][0] and seen[0][2] == seen[1][2]
    assert all(torch.equal(value, seen[1][1][name]) for name, value in seen[0][1].items())


def test_loops_of_ones_own_hold_them() -> None:
    run_on_ranks(1, with_loops_of_ones_own)


def planned_bytes(clip: float | None) -> int:
    """What the arena has is what the plan says, the process's own apart; 2 bytes an element less without clipping."""
    zero = dict(stage=3, placement="cpu", gpu_memory_limit=64 * MiB)
    with engine_of(zero=zero, clip_grad_norm=clip) as engine:
        train(engine, 4)
        assert engine.residency is not None
        plan, gemini = engine.residency.plan, gemini_of(engine)
        assert plan is not None and plan.workload.clipping == (clip is not None)
        assert {placement.state for placement in gemini.placements.values()} == {"host"}
        used, planned = (
            gemini.memory.host_arena.used_bytes,
            plan.peak_host_bytes - plan.workload.host_base_bytes,
        )
        assert planned <= used < planned + 512 * len(gemini.memory.host_arena.blocks)
        return used


def bytes_of_plans() -> None:
    elements = sum(p.numel() for p in gpt().parameters())
    held, early = planned_bytes(1.0), planned_bytes(None)
    largest = 0
    with engine_of(zero=dict(stage=3, placement="cpu")) as engine:
        largest = max(chunk.spec.shard_elems for chunk in gemini_of(engine).chunks)
    assert held - early >= 2 * elements - 4 * largest - 2**14
    assert held - early > elements


def test_the_arena_has_what_the_plan_says() -> None:
    run_on_ranks(1, bytes_of_plans)


def half_a_step(folder: str, when: str) -> None:
    from torch._dynamo import eval_frame  # the engine, which watches the second step, then tells the compiler

    engine = engine_of(zero=dict(stage=3, placement="cpu" if when == "host" else "auto", gpu_memory_limit=64 * MiB))
    train(engine, 1)
    engine.save(f"{folder}/ckpt")
    wanted = engine.full_state_dict()

    def fail(gradient: Tensor) -> None:
        raise torch.OutOfMemoryError("there is no more")

    first = next(p for name, p in engine.model.named_parameters() if "layers.0" in name or "blocks.0" in name)
    handle = first.register_hook(fail)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        train(engine, 1)
    handle.remove()
    assert any("resume from the last checkpoint" in note for note in raised.value.__notes__)
    for attempt in (
        lambda: train(engine, 1),
        lambda: engine.save(f"{folder}/other"),
        lambda: engine.eval_step(batches(1)[0]),
        lambda: engine.full_state_dict(),
        lambda: engine.zero_grad(),
        lambda: engine.load(f"{folder}/ckpt"),
    ):
        with pytest.raises(MeshfoldError, match=r"cannot continue.*resume\s+from the last checkpoint"):
            attempt()
    engine.close()
    assert eval_frame._stance.stance == "default"
    with engine_of(zero=dict(stage=3)) as again:
        again.load(f"{folder}/ckpt")
        assert all(torch.equal(value, again.full_state_dict()[name]) for name, value in wanted.items())
        train(again, 1)


@pytest.mark.few(1)
@pytest.mark.parametrize("when", ["host", "device"])
def test_half_a_step_is_said_and_not_undone(when: str, tmp_path: Path) -> None:
    run_on_ranks(1, half_a_step, str(tmp_path), when)


def first_guess() -> None:
    """Before anything has run, too, gradients that nobody holds take no room."""
    elements = sum(p.numel() for p in gpt().parameters())
    device = 4 * elements
    zero = dict(stage=3, gpu_memory_limit=device, host_memory_limit=round(13.2 * elements / MOST) - device)
    with engine_of(zero=zero):
        pass
    for settings in (dict(clip_grad_norm=1.0), dict(gradient_accumulation=2)):
        with pytest.raises(MemoryPlanError, match="parameters"):
            engine_of(zero=zero, **settings)


def test_the_first_guess_knows_it_too() -> None:
    run_on_ranks(1, first_guess)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("settings", "holds"),
    [
        (dict(), True),
        (dict(clip=False), False),
        (dict(clip=False, optimizer="sgd"), True),
        (dict(clip=False, precision="fp16"), True),
        (dict(clip=False, accumulate=2), False),
    ],
)
def test_a_plan_knows_whether_gradients_are_held(settings: dict[str, Any], holds: bool) -> None:
    spec = ParallelSpec.parse(dict(zero=dict(stage=3, placement="cpu"))).with_world_size(1)
    given: dict[str, Any] = dict(batch_size=4, seq_len=8, precision="bf16", machine=find_machine("h200"))
    found = estimate(gpt, spec, **{**given, **settings})
    plan = found.plan
    assert plan is not None and plan.workload.clipping == holds
    assert (plan.strategy == "none") == (not holds)
    workload, chunks = plan.workload, plan.workload.chunks
    bytes_each = workload.regime.parameter + workload.regime.state
    gradients = workload.regime.gradient * sum(chunk.elems for chunk in chunks)
    if not holds and "accumulate" not in settings:  # between micro-steps they wait
        gradients = 2 * workload.regime.gradient * max(chunk.elems for chunk in chunks)
    wanted = workload.host_base_bytes + gradients + bytes_each * sum(chunk.elems for chunk in chunks)
    assert plan.peak_host_bytes == pytest.approx(wanted, abs=2 * len(chunks))


# -- no_sync -----------------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """A tied head, a frozen block, and a part that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4))
        self.blocks[1].requires_grad_(False)
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        y: Tensor = self.head(x)
        return y


def mixed() -> Mixed:
    torch.manual_seed(3)
    return Mixed()


def loss_of(model: Any, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def sums_apart(world: int, zero: dict[str, Any], ends: str) -> None:
    """Three backwards apart and one that is not, or none: the serial gradient's norm and step, and nothing sent meanwhile."""
    serial = mixed().double()
    optimizer = torch.optim.SGD([p for p in serial.parameters() if p.requires_grad], lr=0.5, momentum=0.9)
    settings: dict[str, Any] = dict(
        precision="fp64", optimizer=dict(name="sgd", lr=0.5, momentum=0.9), loss_fn=lambda *_: 0
    )
    with engine_of(mixed(), world, zero, clip_grad_norm=0.05, **settings) as engine:
        gemini = gemini_of(engine)
        given = batches(8)
        for step in range(2):
            mine = given[4 * step : 4 * step + (4 if ends == "backward" else 3)]
            before = gemini.memory.host_arena.used_bytes, gemini.memory.compute.used_bytes
            for number, ids in enumerate(mine):
                loss_of(serial, ids).backward()
                rows = engine.shard_batch(ids)
                if number < 3:
                    with engine.no_sync():
                        loss = loss_of(engine, rows)
                        with record() as log:
                            engine.backward(loss)
                    sent = {entry.kind for entry in log.entries}
                    assert sent <= ({"all_gather"} if zero["stage"] == 3 else set()), log
                else:
                    engine.backward(loss_of(engine, rows))
            # Whole gradients wait where the optimizer's state lives: as many times a share as there are ranks.
            if ends == "step" and step == 0 and zero["placement"] in ("cpu", "cuda"):
                used = {gemini._chunk_of[name] for name in gemini._facts if "unused" not in name} & {*gemini._gradients}
                whole = 8 * sum(chunk.spec.size_elems for chunk in used)
                arena = gemini.memory.host_arena if zero["placement"] == "cpu" else gemini.memory.compute
                grown = arena.used_bytes - before[zero["placement"] == "cuda"]
                rest = 8 * sum(chunk.spec.size_elems for chunk in {*gemini._gradients} - used) * (world == 1)
                assert whole <= grown < whole + rest + 1024 * len(gemini._gradients), (zero, grown, whole)
            parameters = [p for p in serial.parameters() if p.grad is not None]
            with record() as log:
                engine.step()
            assert engine.last is not None and engine.last.grad_norm is not None
            wanted = float(nn.utils.clip_grad_norm_(parameters, 0.05))
            assert engine.last.grad_norm == pytest.approx(wanted, rel=1e-9)
            optimizer.step()
            optimizer.zero_grad()
        found = engine.full_state_dict()
        for name, value in serial.state_dict().items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-10, msg=name)


ZEROS: list[dict[str, Any]] = [
    dict(stage=3, placement="cpu"),
    dict(stage=2, placement="cuda"),
    dict(stage=2, placement="cpu"),
    dict(stage=3, placement="static", offload_optim_frac=0.5, offload_param_frac=0.2),
    dict(stage=1, placement="cuda"),
]


def all_sums_apart(world: int, zeros: list[dict[str, Any]]) -> None:
    for zero in zeros:
        for ends in ("backward", "step"):
            sums_apart(world, zero, ends)


@pytest.mark.few(1)
@pytest.mark.parametrize(("world", "zeros"), [(2, ZEROS), (4, ZEROS[:3]), (1, ZEROS[:1])])
def test_no_sync_sends_no_gradient(world: int, zeros: list[dict[str, Any]]) -> None:
    run_on_ranks(world, all_sums_apart, world, zeros)


def accumulation_sums_every_time() -> None:
    with engine_of(world=2, zero=dict(stage=3), gradient_accumulation=2) as engine:
        with record() as log, engine.no_sync():
            engine.train_step(engine.shard_batch(batches(1)[0]))
        assert "reduce_scatter" in {entry.kind for entry in log.entries}


def test_gradient_accumulation_holds_a_share() -> None:
    run_on_ranks(2, accumulation_sums_every_time)
