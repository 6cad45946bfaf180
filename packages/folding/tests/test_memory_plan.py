"""The plan of memory: counts equal what the allocator measures, choices fit, refusals say what would help."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from math import prod

import pytest
import torch
from memory_measure import measured_peak

from meshfold.folding import (
    EvoformerStack,
    MemoryPlanError,
    MemorySettings,
    PairFormerStack,
    find_axial_mode,
    longest_chain,
    plan_memory,
)
from meshfold.folding.axial.sizes import Sizes
from meshfold.folding.esmfold2 import PairUpdateStack
from meshfold.folding.planning.count import LiveTensors
from meshfold.folding.planning.plan import candidates, count_memory, leanest
from meshfold.folding.planning.run import FoldingRun
from meshfold.folding.stack import Stack
from meshfold.mesh import Mesh, MetaMesh, reduce_scatter
from meshfold.mesh.testing import fake_world, ranks, tensor_memory

SIZES = dict(
    c_m=32,
    c_z=16,
    c_hidden_msa_att=8,
    c_hidden_opm=8,
    c_hidden_mul=16,
    c_hidden_pair_att=8,
    no_heads_msa=4,
    no_heads_pair=2,
    transition_n=4,
    msa_dropout=0.15,
    pair_dropout=0.25,
)


def evoformer(blocks: int = 2) -> Stack:
    return EvoformerStack(blocks, c_s=24, **SIZES)


def pairformer(blocks: int) -> Stack:
    return PairFormerStack(
        blocks,
        16,
        16,
        c_hidden_pair_bias=8,
        no_heads_pair_bias=2,
        c_hidden_mul=16,
        c_hidden_pair_att=8,
        no_heads_pair=2,
        transition_n=2,
        pair_dropout=0.25,
    )


def run_of(axes: dict[str, int], mode: str, residues: int, training: bool) -> FoldingRun:
    return FoldingRun(
        sizes=Sizes(residues=residues, sequences=16),
        mode=find_axial_mode(mode),
        axes=axes,
        training=training,
        dtype=torch.float32,
        kernels=False,
    )


def check_counted(
    axes: dict[str, int], mode: str, residues: int, *, training: bool, place: int, stack: Stack | None = None
) -> None:
    """Raise unless the count of the candidate at a place of the list is close to its measured peak."""
    stack = (stack or evoformer()).train(training)
    run = run_of(axes, mode, residues, training)
    settings = list(candidates(stack, run))[place]
    counted = count_memory(stack, run, settings).peak
    world = prod(axes.values())
    with fake_world(world) if world > 1 else nullcontext():
        mesh = Mesh(axes, rank=0)
        measured = measured_peak(stack, run.sizes, mesh, mode, settings, training=training)
    most = 1.05 if settings.chunk_bytes is None else 1.1  # of some chunks, the last one is smaller
    assert 0.95 < counted / measured < most, (axes, residues, training, str(settings), counted, measured)


@pytest.mark.parametrize(("training", "place"), [(True, 2), pytest.param(False, 1, marks=pytest.mark.slow)])
def test_counts_are_what_one_process_measures(training: bool, place: int) -> None:
    check_counted({"axial": 1}, "dap", 48, training=training, place=place)


@pytest.mark.few(2)
@pytest.mark.parametrize(("training", "place"), [(True, 1), (False, 0), (False, 2)])
def test_counts_of_pair_updates_are_what_one_process_measures(training: bool, place: int) -> None:
    stack = PairUpdateStack(2, 16, 48, chunk_size=16)
    check_counted({"axial": 1}, "dap", 48, training=training, place=place, stack=stack)


@pytest.mark.few(1)
@pytest.mark.parametrize(("training", "place"), [(True, 0), (False, 1)])
def test_counts_are_what_one_of_two_ranks_measures(training: bool, place: int) -> None:
    check_counted({"axial": 2}, "dap", 48, training=training, place=place)


@ranks(2)
def test_the_copy_that_gloo_reduces_is_counted() -> None:
    group = Mesh({"axial": 2}).group("axial")
    x = torch.ones(2, 4096)
    reduce_scatter(x, group, 1)  # what is made once
    with tensor_memory() as memory:
        y = reduce_scatter(x, group, 1)
    given = torch.empty(2, 4096, device="meta")
    with LiveTensors(torch.nn.Module(), gloo=True) as live:
        planned = reduce_scatter(given, MetaMesh({"axial": 2}).group("axial"), 1)
    assert planned.shape == y.shape
    # What is sent in one piece, the result, and the copy.
    assert live.take() == (x.nbytes + y.nbytes + x.nbytes, y.nbytes)
    assert memory.peak == live.take()[1] + 2 * x.nbytes


def test_the_tensors_of_the_peak_beside_state_add_up_to_it() -> None:
    """Messages between ranks are among them, though each is one tensor before it is waited for and another one after."""
    count = count_memory(evoformer().eval(), run_of({"axial": 2}, "dap", 48, training=False), MemorySettings())
    assert sum(tensor.bytes for tensor in count.tensors) == pytest.approx(count.peak, rel=0.002)


def test_gradients_of_weights_are_not_counted_as_tensors() -> None:
    """They are part of the weights' bytes: each further block would add them twice."""
    weights = {tuple(weight.shape) for weight in evoformer(1).parameters()}
    found = count_memory(evoformer(), run_of({"axial": 1}, "dap", 24, training=True), MemorySettings())
    assert not [tensor for tensor in found.tensors if tensor.name == "the stack" and tensor.shape in weights]


@pytest.mark.slow
@pytest.mark.parametrize(("training", "place"), [(True, 0), (True, 1), (True, 2), (False, 0)])
@pytest.mark.parametrize("residues", [48, 64])
def test_counts_of_every_candidate_without_chunks(residues: int, training: bool, place: int) -> None:
    check_counted({"axial": 1}, "dap", residues, training=training, place=place, stack=evoformer(3))


@pytest.mark.slow
@pytest.mark.parametrize(("training", "place"), [*((True, n) for n in range(3, 9)), *((False, n) for n in range(1, 4))])
def test_counts_of_every_candidate_in_chunks(training: bool, place: int) -> None:
    """One test each, of a short chain: steps in the smallest chunks take some 100,000 operators, and each is recorded."""
    check_counted({"axial": 1}, "dap", 24, training=training, place=place, stack=evoformer(3))


@pytest.mark.slow
@pytest.mark.parametrize(("training", "place"), [(True, 0), (True, 1), (True, 2), (False, 0), (False, 1)])
@pytest.mark.parametrize(
    ("mode", "axes"),
    [
        ("dap", {"axial": 2}),
        ("dap", {"axial": 3}),
        ("grid", {"row": 2, "col": 1}),
        ("grid", {"row": 2, "col": 3}),
        ("grid+depth", {"depth": 2, "row": 1, "col": 2}),
    ],
)
def test_counts_of_every_layout(mode: str, axes: dict[str, int], training: bool, place: int) -> None:
    check_counted(axes, mode, 32, training=training, place=place)


@pytest.mark.slow
def test_counts_of_chunks_in_training_are_what_one_of_six_ranks_measures() -> None:
    check_counted({"row": 2, "col": 3}, "grid", 32, training=True, place=3)


@pytest.mark.parametrize(
    ("mode", "axes"), [("dap", {"axial": 2}), pytest.param("grid", {"row": 2, "col": 1}, marks=pytest.mark.slow)]
)
def test_a_repeated_block_keeps_its_input_only(mode: str, axes: dict[str, int]) -> None:
    run = run_of(axes, mode, 48, training=True)
    gc.collect()
    gc.disable()  # cycles of references would keep the tensors of a repetition until the collector runs
    try:
        count = count_memory(evoformer(), run, MemorySettings(recompute="blocks"))
    finally:
        gc.enable()
    m, z = 16 * 48 * SIZES["c_m"] // 2 * 4, 48 * 48 * SIZES["c_z"] // 2 * 4
    assert m + z <= count.block <= 2 * (m + z)  # and the gradient of it


def test_the_first_candidate_that_fits_is_chosen() -> None:
    stack = pairformer(2)
    given = dict(residues=24, training=False, dtype=torch.float32)
    free = plan_memory(stack, **given)
    assert free.settings == MemorySettings() and len(free.tried) == 1
    tight = plan_memory(stack, **given, limit=free.bytes - 1)
    assert tight.bytes < free.bytes and tight.settings.chunk_bytes is not None
    assert [str(tensor) for tensor in tight.count.tensors if tensor.name == "input z"] == ["input z [1, 24, 24, 16]"]
    assert "fits with chunks of" in str(tight) and "input z (1)" in str(tight)
    least = count_memory(stack, free.run, leanest(stack, free.run)).peak
    with pytest.raises(
        MemoryPlanError,
        match=r"24 residues do not fit .* the largest tensor is .* Over dap axial \d it fits",
    ):
        plan_memory(stack, **given, limit=least - 1 + free.weights + free.other_bytes)


@pytest.mark.slow
def test_the_longest_chain_fits_and_a_longer_one_does_not() -> None:
    stack = pairformer(1).eval()
    given = dict(training=False, dtype=torch.float32)
    limit = plan_memory(stack, residues=48, **given).bytes
    longest = longest_chain(stack, limit=limit, **given)
    assert longest >= 48
    plan_memory(stack, residues=longest, limit=limit, **given)
    with pytest.raises(MemoryPlanError):
        plan_memory(stack, residues=longest + 16, limit=limit, **given)
