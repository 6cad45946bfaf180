"""ESMFold of transformers with our trunk: equal to transformers' own, on one rank and under every layout."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from esm_models import PairParts, check_esmfold, differences, esmfold, esmfold_results
from torch import nn

from meshfold.folding import (
    EsmFoldTrunk,
    MemorySettings,
    PairRows,
    adopt_models,
    folding_cost,
    parallelize_folding,
    plan_memory,
    structure_bytes,
    structure_rows,
    sum_gradients,
)
from meshfold.folding.axial.axes import WHOLE
from meshfold.folding.structure_rows import attend_points
from meshfold.mesh import LayoutError, Mesh, record
from meshfold.mesh.model_io import LiveBytes
from meshfold.mesh.testing import fake_world, ranks


def test_one_rank_equals_transformers_and_parameters_stay() -> None:
    theirs = esmfold()
    ours = copy.deepcopy(theirs)
    before = dict(ours.named_parameters())
    adopt_models(ours)
    assert isinstance(ours.trunk, EsmFoldTrunk)
    after = dict(ours.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert not ours.esm.embeddings.word_embeddings.weight.requires_grad
    wanted, got = esmfold_results(theirs, 2), esmfold_results(ours, 2)
    assert len(wanted) > 150
    assert not differences(wanted, got, 1e-10)


def test_no_recycles_in_the_call_means_those_of_the_configuration() -> None:
    model = esmfold(max_recycles=2).eval()
    types = torch.arange(5).unsqueeze(0)
    with torch.no_grad():
        wanted = model(types).s_z
        adopt_models(model)
        seen: list[tuple[int, int]] = []
        model.trunk.on_recycle = lambda number, passes: seen.append((number, passes))
        torch.testing.assert_close(model(types).s_z, wanted, rtol=1e-11, atol=1e-11)
    assert seen == [(0, 2), (1, 2)]
    with pytest.raises(ValueError, match="no_recycles=-1: the trunk needs at least one pass"):
        model(types, num_recycles=-1)


def test_chunks_and_recomputation_change_nothing() -> None:
    """With gradients, and without, when updates are added in place."""
    theirs = esmfold()
    ours = copy.deepcopy(theirs)
    lean = MemorySettings(chunk_bytes=600, recompute="both")
    parallelize_folding(ours, Mesh({"axial": 1}, rank=0), memory=lean)
    assert not differences(esmfold_results(theirs, 1), esmfold_results(ours, 1), 1e-10)
    types = torch.arange(7).unsqueeze(0)
    with torch.no_grad():
        wanted, got = (model(types, num_recycles=2) for model in (theirs, ours))
    for name in ("s_s", "s_z", "positions"):
        torch.testing.assert_close(got[name], wanted[name], rtol=1e-10, atol=1e-10)


def test_a_plan_counts_the_blocks_of_a_trunk() -> None:
    model = adopt_models(esmfold(num_blocks=1).eval())
    stack = model.trunk.stack()
    whole = plan_memory(stack, residues=16, training=False, dtype=torch.float32)
    assert whole.settings == MemorySettings() and whole.no_blocks == 1
    limit = whole.other_bytes + (whole.bytes - whole.other_bytes) * 2 // 3
    lean = plan_memory(stack, residues=16, training=False, dtype=torch.float32, limit=limit)
    assert lean.settings.chunk_bytes is not None and lean.bytes <= limit
    parallelize_folding(model, Mesh({"axial": 1}, rank=0), memory=lean.count.peak)
    with torch.no_grad():
        model.float()(torch.arange(16).unsqueeze(0), num_recycles=0)
    assert model.trunk.blocks[0].tri_mul_in.axes.memory == lean.settings
    assert [tuple(p.shape) for p in stack.blocks.parameters()] == [
        tuple(p.shape) for p in model.trunk.blocks.parameters()
    ]


@ranks(3)
def test_dap_3_with_residues_that_do_not_divide() -> None:
    check_esmfold("dap", {"axial": 3}, recycles=0)


@ranks(4)
def test_grid_2x2_with_dropout() -> None:
    check_esmfold("grid", {"row": 2, "col": 2}, dropout=0.2)


def check_rows(mode: str, axes: dict[str, int]) -> None:
    """The structure of pairs that stay split is transformers' own; the bytes sent are those of the plan."""
    theirs = esmfold().eval()
    ours: Any = copy.deepcopy(theirs)
    mesh = Mesh(axes)
    parallelize_folding(ours, mesh, mode)
    ours.trunk.keeps_rows = True
    generator = torch.Generator().manual_seed(3)
    single = torch.randn(2, 7, 16, generator=generator, dtype=torch.float64)
    types = torch.randint(0, 20, (2, 7), generator=generator)
    mask = torch.ones_like(types)
    mask[1, 5:] = 0
    given = types, torch.arange(7).expand(2, 7), mask
    with torch.no_grad():
        wanted = theirs.trunk(single, single.new_zeros(2, 7, 7, 8), *given, no_recycles=1)
        with record() as log:
            found = ours.trunk(single, single.new_zeros(()).expand(2, 7, 7, 8), *given, no_recycles=1)
    rows = found["s_z"]
    assert rows.pairs.shape == (2, rows.axes.padded(7) // mesh.size(*rows.axes.rows), 7, 8)
    found["s_z"] = rows.axes.join(rows.pairs, (1, rows.axes.rows, 7))
    for name in ("s_s", "s_z", "states", "positions", "frames"):
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-9, atol=1e-9)
    planned = folding_cost(ours, residues=7, batch=2, recycles=1, itemsize=8)
    assert log.bytes == sum(entry.bytes for entry in planned.entries if entry.phase == "forward")


@ranks(3)
def test_structures_of_pairs_that_stay_split() -> None:
    check_rows("dap", {"axial": 3})


@pytest.mark.slow
@ranks(4)
def test_structures_of_pairs_that_stay_split_in_a_grid() -> None:
    check_rows("grid", {"row": 2, "col": 2})
    check_rows("grid", {"row": 1, "col": 4})


def test_memory_of_point_attention_is_that_of_some_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is made of all pairs at once, and what is alive is what was planned."""
    from transformers.models.esm.openfold_utils.rigid_utils import Rigid

    monkeypatch.setattr(structure_rows, "LEAST_PART", 1)
    ipa: Any = esmfold().float().trunk.structure_module.ipa
    length = 192
    rows = PairRows(torch.randn(1, length, length, 8), WHOLE)
    single, mask = torch.randn(1, length, 8), torch.ones(1, length)
    frames = Rigid.identity((1, length), torch.float32, torch.device("cpu"), False, fmt="quat")
    with torch.no_grad(), LiveBytes() as live:
        attend_points(ipa, single, rows, lambda first, size: rows.pairs[:, first : first + size] + 1.0, frames, mask)
        most = live.take()[0]
    own = rows.pairs.numel() * 4
    assert most < own / 2
    assert 0.5 * most < structure_bytes(ipa, rows.pairs) - own < 1.5 * most


@pytest.mark.slow
@ranks(2)
def test_dropout_is_the_same_with_split_columns() -> None:
    check_esmfold("grid", {"row": 1, "col": 2}, recycles=0, dropout=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("recycles", [0, 2])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@ranks(4)
def test_every_layout_of_4(recycles: int, dropout: float) -> None:
    for mode, axes in (
        ("dap", {"axial": 4}),
        ("grid", {"row": 2, "col": 2}),
        ("grid", {"row": 4, "col": 1}),
        ("grid+depth", {"depth": 2, "row": 1, "col": 2}),
    ):
        check_esmfold(mode, axes, recycles=recycles, dropout=dropout, residues=5)


@pytest.mark.slow
@pytest.mark.parametrize("residues", [8, 3])
@ranks(2)
def test_every_layout_of_2(residues: int) -> None:
    for mode, axes in (("dap", {"axial": 2}), ("grid", {"row": 2, "col": 1}), ("grid", {"row": 1, "col": 2})):
        check_esmfold(mode, axes, recycles=2, residues=residues)


@pytest.mark.slow
@ranks(6)
def test_grid_2x3() -> None:
    check_esmfold("grid", {"row": 2, "col": 3}, recycles=2, dropout=0.2)


@pytest.mark.slow
@ranks(4)
def test_layouts_with_chunks_and_recomputation() -> None:
    for mode, axes in (("dap", {"axial": 4}), ("grid", {"row": 2, "col": 2})):
        check_esmfold(mode, axes, dropout=0.2, memory=MemorySettings(chunk_bytes=2000, recompute="both"))


def test_recorded_equals_planned() -> None:
    with fake_world(4):
        model, mesh = esmfold(), Mesh({"row": 2, "col": 2})
        parallelize_folding(model, mesh, "grid")
        residues = 7
        s, z = (torch.randn(2, *shape, dtype=torch.float64) for shape in ((residues, 16), (residues, residues, 8)))
        types, mask = torch.zeros(2, residues, dtype=torch.int64), torch.ones(2, residues)
        index = torch.arange(residues).expand(2, -1)
        with record() as log:
            out = model.trunk(s.requires_grad_(), z.requires_grad_(), types, index, mask, 2)
            log.phase = "backward"
            (out["s_s"].square().sum() + out["s_z"].square().sum() + out["states"].square().sum()).backward()
            log.phase = "gradients"
            sum_gradients(model)
        planned = folding_cost(model, residues=residues, batch=2, recycles=2, itemsize=8)
        for phase in ("forward", "backward", "gradients"):
            assert log.count(phase) == planned.count(phase), phase
        assert log.bytes == planned.bytes > 0


def test_what_cannot_be_done_is_refused() -> None:
    with pytest.raises(LayoutError, match="memory='1GiB': the MSA encoder of ESMFold 2 has no plan"):
        parallelize_folding(PairParts(), Mesh({"axial": 1}, rank=0), memory="1GiB")
    model = esmfold()
    with pytest.raises(
        LayoutError, match="EsmFoldingTrunk cannot be replaced in place: give the model that contains it"
    ):
        adopt_models(model.trunk)
    model.trunk.recycle_s_norm = nn.Linear(2, 2)
    with pytest.raises(LayoutError, match=r"other parameters .* such as recycle_s_norm.bias: use a version"):
        parallelize_folding(model, Mesh({"axial": 1}, rank=0))
    with pytest.raises(LayoutError, match="Linear has no folding block"):
        parallelize_folding(nn.Linear(2, 2), Mesh({"axial": 1}, rank=0))
