"""The bytes that are recorded equal those that the layouts foretell, collective by collective."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from folding_models import MODELS, inputs_of, model_of

from meshfold.folding import Axes, find_axial_mode, folding_cost, parallelize_folding, sum_gradients
from meshfold.folding.axial.product import EdgeProduct, product_plan
from meshfold.mesh import Mesh, record
from meshfold.mesh.testing import ranks
from meshfold.tensor_parallel import matmul_cost


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("mode", "attention", "axes", "steps"),
    [
        pytest.param(
            "dap", "exchange", {"axial": 4}, 1, marks=pytest.mark.slow
        ),  # the mode below, without depth and rows
        ("grid", "ring", {"row": 2, "col": 2}, 2),
        pytest.param("grid", "gather", {"row": 1, "col": 4}, 1, marks=pytest.mark.slow),
        ("grid+depth", "exchange", {"depth": 2, "row": 1, "col": 2}, 1),
    ],
)
@ranks(4)
def test_recorded_equals_planned(mode: str, attention: str, axes: dict[str, int], steps: int) -> None:
    for kind in MODELS:
        model, mesh = model_of(kind, 2, 0.0), Mesh(axes)
        row = replace(find_axial_mode(mode), attention=attention)
        parallelize_folding(model, mesh, row, product_steps=steps)
        tensors, masks = inputs_of(kind, 5, 7, batch=2)
        leaves = [tensor.requires_grad_() for tensor in tensors]
        with record() as log:
            out = model(*leaves, *masks)
            log.phase = "backward"
            sum(y.square().sum() for y in (out if isinstance(out, tuple) else (out,))).backward()
            log.phase = "gradients"
            sum_gradients(model)
        planned = folding_cost(model, residues=7, sequences=5, batch=2, templates=3, itemsize=8)
        for phase in ("forward", "backward", "gradients"):
            assert log.count(phase) == planned.count(phase), (kind, phase)
        assert log.bytes == planned.bytes > 0


@pytest.mark.few(1)
@pytest.mark.parametrize("axes", [{"axial": 4}, {"row": 2, "col": 3}, {"depth": 2, "row": 2, "col": 2}])
def test_a_triangle_product_costs_what_the_layout_algebra_says(axes: dict[str, int]) -> None:
    mode = {1: "dap", 2: "grid", 3: "grid+depth"}[len(axes)]
    mesh, size, channels = Mesh(axes, rank=0), 24, 128
    for oriented in (Axes.of(mesh, find_axial_mode(mode)), Axes.of(mesh, find_axial_mode(mode)).turned):
        ours = EdgeProduct(oriented).cost(size * size // mesh.world_size * channels * 2, size // mesh.world_size)
        theirs = matmul_cost(product_plan(oriented), dict(m=size, k=size, n=size), mesh, itemsize=2 * channels)
        counted: Counter[object] = Counter((entry.kind, entry.axes, entry.bytes) for entry in ours)
        assert counted == theirs.count()


def test_dap_sends_less_than_the_formula_of_fastfold_needs() -> None:
    """At 128 sequences of 256 residues, forward: 6 gathers and 6 all-to-alls were 22.0 million elements a rank over 2."""
    from meshfold.folding import EvoformerBlock

    with torch.device("meta"):
        block = EvoformerBlock(256, 128, 32, 32, 128, 32, 8, 4, 4, 0.15, 0.25)
    parallelize_folding(block, Mesh(dict(axial=2), rank=0), "dap")
    cost = folding_cost(block, residues=256, sequences=128, itemsize=1)
    forward = sum(entry.bytes for entry in cost.entries if entry.phase == "forward")
    assert 10e6 < forward < 22.1e6
