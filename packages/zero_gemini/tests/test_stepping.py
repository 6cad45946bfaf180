"""Where a chunk's state lives, and where it moves between steps, changes no bit of training and no byte that is not told."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parent))  # for the helpers beside this file, on every rank

from stepping_cases import PLACEMENTS, SHAPES, Small, adam, kinds, same, small, two_groups

from meshfold.mesh.testing import run_on_ranks
from meshfold.zero_gemini.chunks.placement import ChunkPlacement
from meshfold.zero_gemini.errors import MemoryPlanError, OutOfBudget
from meshfold.zero_gemini.memory.pinned import PAGE_BYTES
from meshfold.zero_gemini.optimizer import AdamStepper, GeneralStepper
from meshfold.zero_gemini.optimizer import kernel_runs as runs_module
from meshfold.zero_gemini.optimizer.master_weights import planes_of


def check_bytes(made: Small, placements: Iterable[ChunkPlacement], regime: str, *, resident: bool = False) -> None:
    """Both arenas have what the planes need, and no byte more."""
    memory, device, host = made.memory, 0, 0
    on_disk = False
    for chunk, placement in zip(made.chunks, itertools.cycle(placements)):
        elements, arena = chunk.spec.shard_elems, memory.arena(placement.state)
        shard = memory.compute.nbytes(elements, chunk.dtype)
        planes = sum(arena.nbytes(p.numel(elements), p.dtype) for p in planes_of(chunk.dtype, regime))
        if resident or placement.parameters == "device":
            device += shard
            host += memory.host_arena.nbytes(elements, chunk.dtype) * (placement.state != "device")
        else:
            host += memory.host_arena.nbytes(elements, chunk.dtype)
        device += planes * (placement.state == "device")
        host += planes * (placement.state == "host")
        on_disk |= placement.state == "disk"
    if isinstance(made.stepper, AdamStepper) and made.stepper.disk is not None:
        ring = made.stepper.disk.ring
        assert (ring.nbytes > 0) == on_disk and ring.nbytes <= 3 * PAGE_BYTES
        host += on_disk * ring.count * memory.host_arena.nbytes(ring.nbytes + PAGE_BYTES, torch.uint8)
        assert ring.host_bytes == on_disk * ring.count * memory.host_arena.nbytes(ring.nbytes + PAGE_BYTES, torch.uint8)
    assert (memory.compute.used_bytes, memory.host_arena.used_bytes) == (device, host)


USED = [[*SHAPES], ["a", "c", "f"], ["b"], ["g", "e"], []]


@kinds
def test_every_place_trains_to_the_same_bits(tmp_path: Path, dtype: torch.dtype, regime: str) -> None:
    with small(adam(regime), dtype, PLACEMENTS[:1]) as plain:
        for used in USED:
            plain.step(used)
        wanted = plain.bits()
    for placements in (
        [PLACEMENTS[1]],
        [PLACEMENTS[2]],
        [PLACEMENTS[3]],
        [PLACEMENTS[4]],
        [PLACEMENTS[0], PLACEMENTS[4], PLACEMENTS[1]],
    ):
        with small(adam(regime, tmp_path), dtype, placements) as made:
            for used in USED:
                made.step(used, torch.tensor(0.5))
                [*made.seen()]  # a forward
                check_bytes(made, placements, regime)
            assert same(made.bits(), wanted), placements
        assert not list(tmp_path.iterdir())
        assert made.memory.host_arena.used_bytes == sum(
            made.memory.host_arena.nbytes(chunk.spec.shard_elems, dtype)
            for chunk in made.chunks
            if chunk.tier == "host"
        )


@kinds
def test_every_move_there_is(tmp_path: Path, dtype: torch.dtype, regime: str) -> None:
    """From each placement to each, with a step before and one after."""
    with (
        small(adam(regime), dtype, PLACEMENTS[:1]) as plain,
        small(adam(regime, tmp_path), dtype, PLACEMENTS[:1]) as made,
    ):
        for pair in itertools.product(PLACEMENTS, repeat=2):
            for place, placement in enumerate(pair):
                for index in range(len(made.chunks)):
                    made.move(index, placement)
                check_bytes(made, [placement], regime)
                for one in (plain, made):
                    one.step(USED[place])
        assert same(made.bits(), plain.bits())


@pytest.mark.few(2)
@kinds
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_sequence_of_moves_trains_to_the_same_bits(
    tmp_path: Path, dtype: torch.dtype, regime: str, data: st.DataObject
) -> None:
    resident = data.draw(st.booleans(), label="stages 1 and 2")
    buffers = data.draw(st.integers(1, 4), label="buffers")
    placements = [data.draw(st.sampled_from(PLACEMENTS)) for _ in range(3)]
    moves = st.tuples(st.integers(0, 2), st.sampled_from(PLACEMENTS))
    steps = st.sampled_from(USED)
    others = st.sampled_from(["look", "rewrite", "reset"])
    if resident:
        placements = [ChunkPlacement(state=placement.state) for placement in placements]
    with (
        small(adam(regime), dtype, PLACEMENTS[:1], resident=resident) as plain,
        small(adam(regime, tmp_path, buffers=buffers), dtype, placements, resident=resident) as made,
    ):
        ids = made.parameter_ids()
        for do in data.draw(st.lists(st.one_of(steps, moves, moves, others), max_size=10), label="do"):
            if isinstance(do, list):
                made.step(do)
                plain.step(do)
            elif isinstance(do, tuple):
                placement = ChunkPlacement(state=do[1].state) if resident else do[1]
                made.move(do[0], placement)
                placements[do[0]] = placement
            elif do == "look":
                assert same([*made.seen()], [*plain.seen()])
            else:
                for one in (made, plain):
                    one.stepper.finish()
                    if do == "reset":
                        one.stepper.reset()
                    else:
                        one.stepper.write("a", "exp_avg", torch.linspace(-1, 1, 1500))
                        one.stepper.write("d", "exp_avg_sq", torch.linspace(0, 1, 2310))
                        one.stepper.write("e", "step", torch.tensor(5.0))
                        one.stepper.write("f", "exp_avg", torch.tensor(-0.5))
                        one.stepper.fill("c", torch.linspace(-2, 2, 1000))
            if not made.chunks[0].step_is_pending:
                check_bytes(made, placements, regime, resident=resident)
        check_bytes(made, placements, regime, resident=resident)
        assert made.parameter_ids() == ids
        assert same(made.bits(), plain.bits())
    assert not list(tmp_path.iterdir())


def moves_of_two_ranks(folder: Path, resident: bool) -> None:
    rank = torch.distributed.get_rank()
    sequence = [
        *itertools.product(
            range(3),
            [ChunkPlacement(state=placement.state) for placement in PLACEMENTS] if resident else PLACEMENTS,
        )
    ]
    generator = torch.Generator().manual_seed(1)
    options: dict[str, Any] = {"resident": resident, "world": 2}
    with (
        small(adam("B"), torch.bfloat16, PLACEMENTS[:1], **options) as plain,
        small(adam("B", folder, rank=rank), torch.bfloat16, PLACEMENTS[:1], **options) as made,
    ):
        for place in torch.randperm(len(sequence), generator=generator).tolist():
            made.move(*sequence[place])
            for one in (plain, made):
                one.step(USED[place % 5])
            assert same([*made.seen()], [*plain.seen()])
        assert same(made.bits(), plain.bits())


@pytest.mark.parametrize("resident", [False, True], ids=["stage 3", "stages 1 and 2"])
def test_ranks_move_together(tmp_path: Path, resident: bool) -> None:
    run_on_ranks(2, moves_of_two_ranks, tmp_path, resident)


def test_adam_with_decay_in_the_gradient(tmp_path: Path) -> None:
    """It cannot be stepped in halves, so it is stepped beside the computation in one."""

    def optimizer(parameters: list[nn.Parameter]) -> Any:
        return two_groups(parameters, torch.optim.Adam, weight_decay=0.1)

    with small(adam(), torch.bfloat16, PLACEMENTS[:1], optimizer=optimizer) as plain:
        for _ in range(3):
            plain.step()
        wanted = plain.bits()
    with small(adam("A", tmp_path), torch.bfloat16, PLACEMENTS[2:4], optimizer=optimizer) as made:
        for _ in range(3):
            made.step()
            assert all(chunk.step_is_pending for chunk in made.chunks)
        assert same(made.bits(), wanted)


def test_what_is_used_alike_is_one_run_of_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, int]] = []
    for name in ("adam_step", "adam_update_parameters", "adam_update_moments"):
        kernel = getattr(runs_module, name)

        def counted(state: Any, *rest: Any, name: str = name, kernel: Any = kernel, **options: Any) -> None:
            ran.append((name, state.weights.numel()))
            kernel(state, *rest, **options)

        monkeypatch.setattr(runs_module, name, counted)

    def one_group(parameters: list[nn.Parameter]) -> Any:
        groups: list[Any] = [{"params": parameters}, {"params": []}]
        return torch.optim.AdamW(groups, lr=1e-2)

    with small(
        adam("A", tmp_path, piece_bytes=1 << 20),
        torch.bfloat16,
        PLACEMENTS[:3:2] + PLACEMENTS[4:],
        optimizer=one_group,
    ) as made:
        first, second = made.stepper.optimizer.param_groups
        first["params"], second["params"] = first["params"] + second["params"], []
        made.step()
        made.stepper.finish()
        sizes = [chunk.spec.shard_elems for chunk in made.chunks]
        assert sorted(ran) == sorted(
            [
                ("adam_step", sizes[0]),
                ("adam_update_parameters", sizes[1]),
                ("adam_update_moments", sizes[1]),
                ("adam_step", sizes[2]),
            ]
        )


def test_the_host_steps_beside_the_computation_with_one_thread_less() -> None:
    """And takes none from those who compute."""
    found, before = [], torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with small(adam(), torch.bfloat16, PLACEMENTS[1:2]) as made:
            made.step()
            made.stepper.finish()
            assert torch.get_num_threads() == 2
            with ThreadPoolExecutor(1) as new:
                assert new.submit(torch.get_num_threads).result() == 2
            pool = made.stepper._worker._pool  # type: ignore[attr-defined]
            found.append(pool.submit(torch.get_num_threads).result())
        assert found == [1]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("index", range(len(PLACEMENTS)))
def test_a_move_that_finds_no_memory_changes_nothing(tmp_path: Path, index: int) -> None:
    """At every point where memory may run out, in either arena; afterwards training goes on."""
    start = PLACEMENTS[index]
    with small(adam(), torch.bfloat16, PLACEMENTS[:1]) as plain:
        for _ in range(2):
            plain.step()
        wanted = plain.bits()
    refused = 0
    for placement in PLACEMENTS:
        if (start.parameters, placement.parameters) == ("device", "host"):
            continue  # the chunk itself says what happens there
        with small(adam("A", tmp_path), torch.bfloat16, [start]) as made:
            made.step()
            made.stepper.finish()
            memory = made.memory
            used = memory.compute.used_bytes, memory.host_arena.used_bytes
            for spare in range(0, 60_000, 8192):
                memory.compute.budget_bytes, memory.host_arena.budget_bytes = (bytes_ + spare for bytes_ in used)
                try:
                    made.stepper.move(made.chunks[0], placement)
                    break
                except OutOfBudget:
                    refused += 1
                    assert (memory.compute.used_bytes, memory.host_arena.used_bytes) == used
                    assert made.chunks[0].tier == start.parameters
                    check_bytes(made, [start], "A")
            else:
                pytest.fail(f"{placement} was not reached")
            memory.compute.budget_bytes = memory.host_arena.budget_bytes = None
            made.step()
            assert same(made.bits(), wanted)
    assert refused


# -- any optimizer --------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {}),
    "nadam": (torch.optim.NAdam, {}),
    "adamw": (torch.optim.AdamW, {"amsgrad": True}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@settings(max_examples=6, deadline=None)
@given(
    do=st.lists(
        st.one_of(st.sampled_from(USED), st.tuples(st.integers(0, 2), st.sampled_from(PLACEMENTS[:3]))),
        max_size=8,
    ),
    wide=st.booleans(),
    start=st.sampled_from(PLACEMENTS[:3]),
)
def test_any_optimizer_moves_with_the_same_bits(name: str, do: list[Any], wide: bool, start: ChunkPlacement) -> None:
    cls, options = OPTIMIZERS[name]

    def optimizer(parameters: list[nn.Parameter]) -> Any:
        return two_groups(parameters, cls, **options)

    def make(made: torch.optim.Optimizer) -> GeneralStepper:
        with_state = bool(made.state)
        made.state.clear()
        return GeneralStepper(made, torch.float64 if wide else None, with_state=with_state)

    with (
        small(make, torch.float32, PLACEMENTS[:1], optimizer=optimizer) as plain,
        small(make, torch.float32, [start], optimizer=optimizer) as made,
    ):
        ids, placements = made.parameter_ids(), [start] * 3
        for one in do:
            if isinstance(one, list):
                plain.step(one)
                made.step(one)
            else:
                made.move(*one)
                placements[one[0]] = one[1]
            check_general_bytes(made, placements, torch.float64 if wide else torch.float32)
        assert made.parameter_ids() == ids
        assert same(made.bits(), plain.bits())
    assert made.memory.compute.used_bytes + made.memory.host_arena.used_bytes == sum(
        made.memory.arena(chunk.tier).nbytes(chunk.spec.shard_elems, torch.float32) for chunk in made.chunks
    )


def check_general_bytes(made: Small, placements: list[ChunkPlacement], master_dtype: torch.dtype) -> None:
    memory = made.memory
    bytes_ = {"device": 0, "host": 0}
    for chunk, placement in zip(made.chunks, placements, strict=True):
        arena = memory.arena(placement.state)
        bytes_[placement.parameters] += memory.arena(placement.parameters).nbytes(chunk.spec.shard_elems, chunk.dtype)
        if master_dtype != chunk.dtype or placement.parameters != placement.state:
            bytes_[placement.state] += arena.nbytes(chunk.spec.shard_elems, master_dtype)
        for part in chunk.slices:
            parameter = made.stepper.optimizer_parameter(part.name)
            assert parameter is not None
            for value in made.stepper.optimizer.state.get(parameter, {}).values():
                if isinstance(value, Tensor) and value.dim():
                    bytes_[placement.state] += arena.nbytes(value.numel(), value.dtype)
    assert (memory.compute.used_bytes, memory.host_arena.used_bytes) == (bytes_["device"], bytes_["host"])


def test_a_disk_needs_a_folder() -> None:
    def make(made: torch.optim.Optimizer) -> GeneralStepper:
        return GeneralStepper(made, None, with_state=False)

    def optimizer(parameters: list[nn.Parameter]) -> Any:
        return two_groups(parameters, torch.optim.SGD)

    with pytest.raises(MemoryPlanError, match=r"planned for disk, but no folder is given: set offload_path"):
        Small(make, torch.float32, PLACEMENTS[3:4], optimizer=optimizer)
    with small(make, torch.float32, PLACEMENTS[:1], optimizer=optimizer) as made:
        with pytest.raises(MemoryPlanError, match="set offload_path"):
            made.move(0, PLACEMENTS[3])
        made.step()
