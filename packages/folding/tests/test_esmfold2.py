"""ESMFold 2 of transformers with our pair stacks and MSA encoder: equal to transformers' own, and the same under every layout."""

from __future__ import annotations

import copy

import pytest
import torch
from esm_models import PairParts, check_esmfold2, differences, esmfold2, pair_parts_results
from torch import Tensor, nn

from meshfold.folding import (
    MemorySettings,
    adopt_models,
    folding_cost,
    parallelize_folding,
    plan_memory,
    sum_gradients,
)
from meshfold.folding.esmfold2 import PairUpdateStack
from meshfold.mesh import Mesh, record
from meshfold.mesh.testing import fake_world, ranks, tensor_memory


def test_parts_equal_transformers_and_parameters_stay() -> None:
    """In float32, in which transformers computes whatever the weights are."""
    theirs = PairParts()
    ours = copy.deepcopy(theirs)
    before = dict(ours.named_parameters())
    adopt_models(ours)
    after = dict(ours.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    wanted, got = (pair_parts_results(model, torch.float32) for model in (theirs, ours))
    assert len(wanted) > 30
    assert not differences(wanted, got, 1e-6)


def predict(model: nn.Module) -> dict[str, Tensor]:
    """Return the prediction for a small protein, with the same noise each time."""
    torch.manual_seed(0)
    return dict(model.eval().infer_protein("ACDEFGH"))


@ranks(2)
def test_a_prediction_on_2_ranks_equals_transformers() -> None:
    theirs = esmfold2()
    ours = copy.deepcopy(theirs)
    parallelize_folding(ours, Mesh({"axial": 2}))
    wanted, got = predict(theirs), predict(ours)
    assert not differences(wanted, got, 1e-4)
    assert wanted["sample_atom_coords"].abs().max() > 1


@pytest.mark.parametrize("recompute", ["updates", "both"])
def test_chunks_change_nothing(recompute: str) -> None:
    check_esmfold2("dap", {"axial": 1}, memory=MemorySettings(chunk_bytes=900, recompute=recompute))


@pytest.mark.slow
@ranks(4)
def test_chunks_on_a_grid_change_nothing() -> None:
    check_esmfold2("grid", {"row": 2, "col": 2}, memory=MemorySettings(chunk_bytes=900, recompute="both"))


@torch.no_grad()
def test_pairs_in_chunks_and_in_place_are_those_of_whole_updates() -> None:
    torch.manual_seed(0)
    stack = PairUpdateStack(2, 8, 12, chunk_size=3).double()
    z = torch.randn(2, 7, 7, 8, dtype=torch.float64)
    kept, mask = z.clone(), (torch.rand(2, 7, 7) > 0.2).double()
    with torch.enable_grad():
        wanted = stack(z, mask).detach()
    for chunk in (None, 900):
        parallelize_folding(stack, Mesh({"axial": 1}, rank=0), memory=MemorySettings(chunk_bytes=chunk))
        torch.testing.assert_close(stack(z, mask), wanted, rtol=1e-12, atol=1e-12)
    assert torch.equal(z, kept)


def test_a_limit_chooses_the_chunks_of_pair_updates() -> None:
    stack = PairUpdateStack(2, 8, 12, chunk_size=None).eval()
    whole, least = (
        plan_memory(stack, residues=32, training=False, dtype=torch.float32, kernels=False, limit=limit)
        for limit in (None, "300KiB")
    )
    assert whole.settings.chunk_bytes is None and least.settings.chunk_bytes
    room = (300 << 10) - least.weights
    parallelize_folding(stack, Mesh({"axial": 1}, rank=0), memory=room)
    with torch.no_grad(), tensor_memory() as memory:
        stack(torch.ones(1, 32, 32, 8), torch.ones(1, 32, 32))
    assert stack.axes.memory == least.settings
    assert memory.peak < room < whole.bytes - whole.weights


@ranks(4)
def test_grid_2x2() -> None:
    check_esmfold2("grid", {"row": 2, "col": 2})


@pytest.mark.slow
@pytest.mark.parametrize("residues", [8, 7, 2])
@ranks(6)
def test_every_layout_of_6(residues: int) -> None:
    for mode, axes in (
        ("dap", {"axial": 6}),
        ("grid", {"row": 2, "col": 3}),
        ("grid", {"row": 1, "col": 6}),
        ("grid+depth", {"depth": 3, "row": 1, "col": 2}),
    ):
        check_esmfold2(mode, axes, residues)


@pytest.mark.slow
@ranks(3)
def test_dap_3() -> None:
    check_esmfold2("dap", {"axial": 3})


@pytest.mark.slow
@ranks(2)
def test_every_layout_of_2() -> None:
    for mode, axes in (("dap", {"axial": 2}), ("grid", {"row": 2, "col": 1}), ("grid", {"row": 1, "col": 2})):
        check_esmfold2(mode, axes)


def test_recorded_equals_planned() -> None:
    with fake_world(4):
        model = parallelize_folding(PairParts().double(), Mesh({"row": 2, "col": 2}), "grid")
        residues, sequences = 7, 3
        z, single = (torch.randn(2, residues, *shape, dtype=torch.float64) for shape in ((residues, 8), (75,)))
        types, mask = (
            torch.zeros(2, residues, sequences, dtype=torch.int64),
            torch.ones(2, residues, dtype=torch.float64),
        )
        with record() as log:
            out = model(z.requires_grad_(), single, types, mask, mask.unsqueeze(-1).expand(-1, -1, sequences))
            log.phase = "backward"
            out.square().sum().backward()
            log.phase = "gradients"
            sum_gradients(model)
        planned = folding_cost(model, residues=residues, sequences=sequences, batch=2, itemsize=8)
        for phase in ("forward", "backward", "gradients"):
            assert log.count(phase) == planned.count(phase), phase
        assert log.bytes == planned.bytes > 0
