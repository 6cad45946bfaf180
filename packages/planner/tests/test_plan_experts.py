"""Plans of mixtures whose experts ranks share: what a rank holds and sends is what a real run has."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from meshfold.engine import Engine
from meshfold.engine.zero.states import ZeroStates
from meshfold.experts import Experts
from meshfold.mesh import ParallelSpec, record
from meshfold.mesh.model_io import LiveBytes, OperatorCounter
from meshfold.mesh.model_io.operators import Operator
from meshfold.mesh.testing import run_on_ranks
from meshfold.models import Llama, MoELlamaConfig
from meshfold.planner import MACHINES, Estimate, estimate, plan_memory
from meshfold.planner.estimates import step_times
from meshfold.planner.step_bytes import WORKSPACE_BYTES
from meshfold.zero_gemini.memory.arena import Arena, Block

sys.path.append(str(Path(__file__).parents[2] / "engine" / "tests"))  # for the helpers there, on every rank
from expert_cases import HIDDEN, MoE, batches, engine_of

ROWS, LENGTH = 8, 8


def planned(parallel: dict[str, Any], **model: Any) -> Estimate:
    spec = ParallelSpec.parse(parallel)
    return estimate(
        partial(MoE, **model), spec.with_world_size(spec.world_size), batch_size=ROWS, seq_len=LENGTH, kernels="off"
    )


def run(parallel: dict[str, Any]) -> tuple[int, dict[tuple[str, tuple[str, ...]], float]]:
    """Return what rank 0 holds of the parameters, and sends in a step."""
    with engine_of(parallel, precision="fp32") as engine:
        batch = engine.shard_batch(batches(1)[0])
        engine.train_step(batch)  # the first looks more closely
        with record() as log:
            engine.train_step(batch)
        found: dict[tuple[str, tuple[str, ...]], float] = {}
        for entry in log.entries:
            key = entry.kind, entry.axes
            found[key] = found.get(key, 0.0) + float(entry.bytes)
        return sum(p.nbytes for p in engine.model.parameters()), found


SHARED: dict[str, Any] = dict(data=4, expert=dict(size=2, tensor=2))
SPARSE: dict[str, Any] = dict(size=2, exchange="all_to_all")


@pytest.mark.few(1)
@pytest.mark.parametrize("parallel", [dict(data=4, expert=2), dict(data=2, expert=SPARSE, tensor=2), SHARED], ids=str)
def test_memory_and_traffic_are_those_of_a_run(parallel: dict[str, Any]) -> None:
    held, sent = run_on_ranks(4, run, parallel)[0]
    plan = planned(parallel)
    assert plan.memory.parameters == held
    assert plan.parameters == sum(p.numel() for p in MoE().parameters()) > plan.local_parameters
    expected: dict[tuple[str, tuple[str, ...]], float] = {}
    for entry in plan.traffic:
        expected[entry.kind, entry.axes] = expected.get((entry.kind, entry.axes), 0.0) + entry.bytes
    # Sizes go ahead of rows where they are not known; how many rows there are depends on the routing.
    assert expected.keys() == sent.keys()
    assert ("all_to_all" in {kind for kind, _ in sent}) or parallel["expert"] != SPARSE
    for key, amount in expected.items():
        assert amount == pytest.approx(sent[key], rel=0.25 if key[0] == "exchange_rows" else 1e-3, abs=32), key


def test_zero_shares_experts_over_the_ranks_that_have_copies() -> None:
    apart = planned(dict(data=4, expert=4, zero=dict(stage=3, placement="cuda")))
    shared = planned(dict(data=4, expert=SPARSE, zero=dict(stage=3, placement="cuda")))
    experts = sum(p.numel() for name, p in MoE().named_parameters() if ".experts." in name)
    for plan, axes, copies in ((apart, ("data",), 1), (shared, ("data/2",), 2)):
        [reduced] = [t for t in plan.traffic if t.kind == "reduce_scatter" and t.axes != ("data",)] or [None]
        assert (reduced is None) == (copies == 1)
        if reduced is not None:
            assert (reduced.axes, reduced.ranks) == (axes, copies)
            assert 4 * experts / 2 / 2 <= reduced.bytes <= 1.5 * 4 * experts / 2 / 2
        exchanged = sum(t.bytes for t in plan.traffic if t.kind == "exchange_rows")
        assert exchanged > 0 and plan.critical >= exchanged


def test_an_all_gather_of_tokens_is_counted_with_the_room_that_it_takes() -> None:
    """Each of two ranks sends all of its tokens, and has room for twice the rows of its experts."""
    some, everyone = (planned(dict(data=2, expert=dict(size=2, exchange=how))) for how in ("all_to_all", "all_gather"))
    tokens = ROWS // 2 * LENGTH
    gathered = [t for t in everyone.traffic if t.kind == "all_gather"]
    assert sum(t.bytes for t in gathered) >= 2 * 2 * tokens * HIDDEN * 4  # of two layers, forward and backward
    assert {t.axes for t in gathered} == {("data",)} and "exchange_rows" not in {t.kind for t in everyone.traffic}
    assert everyone.flops == pytest.approx(some.flops, rel=0.02)  # rows of nobody are not multiplied
    assert everyone.memory.activations > some.memory.activations


def on_four(exchange: str, capacity: float | None = None, layers: int = 2) -> Estimate:
    """Plan a model of 16 experts, 8 of them a token."""

    def model() -> Llama:
        sizes: dict[str, Any] = dict(vocab_size=64, hidden=64, layers=layers, heads=4, ffn=96, experts=16)
        made = Llama(MoELlamaConfig(**sizes, top_k=8, balance=0.0))
        for module in made.modules():
            if isinstance(module, Experts):
                module.capacity = capacity
        return made

    spec = ParallelSpec.parse(dict(data=4, expert=dict(size=4, exchange=exchange))).with_world_size(4)
    return estimate(model, spec, batch_size=8, seq_len=256, kernels="off")


def sent(plan: Estimate) -> float:
    return sum(t.bytes for t in plan.traffic if t.kind in ("exchange_rows", "all_to_all", "all_gather"))


def of_a_layer(exchange: str, capacity: float | None = None) -> int:
    """Return the bytes that a layer more keeps for backward."""
    three, two = (on_four(exchange, capacity, layers).memory.activations for layers in (3, 2))
    return three - two


def test_room_for_all_rows_is_why_four_ranks_send_to_some() -> None:
    """With many experts a token an all-gather sends little more than the default. Its layers keep room for twice the mean of rows,
    and one at a time takes room for all."""
    some, everyone, chosen = (on_four(how) for how in ("all_to_all", "all_gather", "auto"))
    assert sent(everyone) < 1.34 * sent(some)
    assert chosen.memory == some.memory and chosen.traffic == some.traffic
    assert of_a_layer("all_gather") < 1.7 * of_a_layer("all_to_all")
    assert everyone.memory.activations - some.memory.activations > 2 * of_a_layer("all_to_all")


def test_with_a_capacity_four_ranks_send_to_all() -> None:
    """The room of rows is then 1.25 times what evenly used experts get; half a capacity halves rows and FLOP."""
    some, everyone, chosen = (on_four(how, 1.25) for how in ("all_to_all", "all_gather", "auto"))
    assert sent(everyone) < 1.34 * sent(some)
    kept, kept_of_all = (plan.memory.activations - WORKSPACE_BYTES for plan in (some, everyone))
    assert kept_of_all < 1.35 * kept
    assert chosen.memory == everyone.memory and chosen.traffic == everyone.traffic != some.traffic
    dropless = on_four("all_to_all")
    assert dropless.flops == pytest.approx(some.flops, rel=1e-6) == pytest.approx(everyone.flops, rel=1e-6)
    for how in ("all_to_all", "all_gather"):
        half, quarter, more = (on_four(how, capacity).flops for capacity in (0.5, 0.25, 0.75))
        assert dropless.flops - half == pytest.approx(more - quarter, rel=0.01)
        assert half < 0.8 * dropless.flops
    assert sent(on_four("all_to_all", 0.25)) < 0.7 * sent(some)


def deep(layers: int) -> Llama:
    sizes: dict[str, Any] = dict(vocab_size=64, hidden=32, heads=4, ffn=32, experts=8, top_k=4, max_positions=64)
    return Llama(MoELlamaConfig(**sizes, layers=layers))


def launched(parallel: dict[str, Any], layers: int) -> Counter[tuple[str, str]]:
    """Count the operators of a step of rank 0, but for products and attention."""
    with Engine(
        partial(deep, layers), parallel, optimizer=dict(name="sgd", lr=1e-3), precision="bf16", kernels="off"
    ) as engine:
        ids = torch.randint(64, (8, 16), generator=torch.Generator().manual_seed(0))
        batch = engine.shard_batch(dict(input_ids=ids, labels=ids))
        engine.run_step(batch)
        with OperatorCounter() as counter:
            engine.run_step(batch)
    return by_name(counter.counts)


def by_name(counts: Mapping[Operator, int]) -> Counter[tuple[str, str]]:
    found: Counter[tuple[str, str]] = Counter()
    for operator, number in counts.items():
        found[operator.phase, operator.name.removesuffix("_out")] += number * (not operator.flop)
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("exchange", ["all_to_all", "all_gather"])
def test_a_layer_launches_what_is_planned(exchange: str) -> None:
    """Routing, exchange and counting, operator by operator; the host's seconds of a layer are counted by these."""
    parallel = dict(data=2, expert=dict(size=2, exchange=exchange))
    spec, machine = ParallelSpec.parse(parallel).with_world_size(2), MACHINES["laptop"]
    settings: dict[str, Any] = dict(batch_size=8, seq_len=16, precision="bf16", kernels="off", machine=machine)
    two, one = (run_on_ranks(2, launched, parallel, layers)[0] for layers in (2, 1))
    planned_two, planned_one = (
        by_name(estimate(partial(deep, layers), spec, **settings).work.operators) for layers in (2, 1)
    )
    two.subtract(one)
    planned_two.subtract(planned_one)
    different = {key: (two[key], planned_two[key]) for key in {**two, **planned_two} if two[key] != planned_two[key]}
    # Plans multiply in a loop over experts, which begins with zeros; hosts agree on numbers of tokens by a message of their own.
    known = {"aten._grouped_mm", "aten.new_zeros", "aten._scaled_dot_product_flash_attention_for_cpu"}
    known |= {f"{name}_backward" for name in known}
    if exchange == "all_gather":
        known |= {"c10d.allreduce", "aten._local_scalar_dense"}
    assert {name for _, name in different} <= known, different
    assert sum(two.values()) > 200


def test_seconds_count_the_way_to_the_experts() -> None:
    machine = MACHINES["h200x8"]
    apart, together = (planned(dict(data=4, expert=size)) for size in (4, 1))
    spread, copied = (step_times(plan, machine, "fp32") for plan in (apart, together))
    assert spread.tensor > copied.tensor and spread.data < copied.data and apart.flops == together.flops


def test_a_pipeline_of_mixtures_is_planned() -> None:
    plan = planned(dict(data=2, pipeline=2, expert=SPARSE), factor=0.0)
    assert {t.axes for t in plan.traffic if t.kind == "exchange_rows"} == {("data",)}
    assert plan.parameters == sum(p.numel() for p in MoE().parameters())


class Recorded(LiveBytes):
    """The most that chunks and what operators make take together."""

    def __init__(self, arena: Arena, counted: list[Block]) -> None:
        super().__init__(round_bytes=512)
        self._arena, self._counted, self.most = arena, counted, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_dispatch__(func, types, args, kwargs)
        twice = sum(block.nbytes for block in self._counted if block in self._arena.blocks)
        self.most = max(self.most, self.bytes + self._arena.used_bytes - twice)
        return made


def wide_mixture() -> Llama:
    """A mixture with so large a vocabulary that embedding and head decide the peak."""
    return Llama(
        MoELlamaConfig(vocab_size=8192, hidden=64, layers=2, heads=4, ffn=96, experts=16, top_k=4, balance=0.0)
    )


def measured_peak(parallel: dict[str, Any]) -> int:
    """Return the most bytes that a step of rank 0 takes."""
    counted: list[Block] = []
    before = Arena.count

    def count(arena: Arena, tensor: torch.Tensor, purpose: str = "") -> Block:
        """Note blocks of results of collectives, which operators have made."""
        counted.append(before(arena, tensor, purpose))
        return counted[-1]

    Arena.count = count  # type: ignore[method-assign]
    try:
        with Engine(
            wide_mixture,
            parallel,
            optimizer=dict(name="adamw", lr=1e-6),
            precision="bf16",
            clip_grad_norm=1.0,
            kernels="off",
        ) as engine:
            assert isinstance(engine.states, ZeroStates)
            ids = torch.randint(8192, (2, 8), generator=torch.Generator().manual_seed(engine.mesh.rank))
            most = []
            for _ in range(2):
                with Recorded(engine.states.gemini.memory.compute, counted) as recorded:
                    engine.run_step(dict(input_ids=ids, labels=ids))
                most.append(recorded.most)
            return most[1]
    finally:
        Arena.count = before  # type: ignore[method-assign]


@pytest.mark.few(1)
@pytest.mark.parametrize("exchange", ["all_to_all", "all_gather"])
def test_a_step_of_a_mixture_takes_the_memory_that_is_planned(exchange: str) -> None:
    """Chunks of experts are made after all others, but the head's gradient is reduced before theirs and does not stay whole."""
    parallel = dict(data=2, expert=dict(size=2, exchange=exchange), zero=dict(stage=3, placement="cuda"))
    found = run_on_ranks(2, measured_peak, parallel)[0]
    memory = plan_memory(wide_mixture, parallel, batch_size=4, seq_len=8, precision="bf16", kernels="off")
    assert found == pytest.approx(memory.total - WORKSPACE_BYTES, rel=0.03)
