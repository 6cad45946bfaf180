"""Updates in parts and recomputation: outputs and every gradient are those of whole updates, inputs stay as they are."""

from __future__ import annotations

import pytest
import torch
from folding_models import MODELS, check_equal, inputs_of, model_of

from meshfold.folding import (
    EsmFoldStack,
    FoldingRun,
    MemorySettings,
    Sizes,
    count_work,
    find_axial_mode,
    parallelize_folding,
)
from meshfold.folding.memory import Parts
from meshfold.folding.planning.plan import candidates
from meshfold.mesh import Mesh, MeshfoldError
from meshfold.mesh.testing import ranks

SMALL = MemorySettings(chunk_bytes=6000, recompute="updates")


@pytest.mark.parametrize(
    "kind",
    [
        "evoformer",
        "pairformer",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("multimer", "extra", "template")),
    ],
)
def test_chunks_on_one_rank(kind: str) -> None:
    check_equal(kind, "dap", {"axial": 1}, memory=SMALL)


@pytest.mark.parametrize("recompute", [pytest.param("updates", marks=pytest.mark.slow), "blocks", "both"])
def test_recomputation_drops_the_same_elements(recompute: str) -> None:
    memory = MemorySettings(chunk_bytes=None if recompute == "blocks" else 5000, recompute=recompute)
    check_equal("evoformer", "dap", {"axial": 1}, blocks=2, memory=memory)


@pytest.mark.few(1)
@pytest.mark.parametrize(("mode", "axes"), [("dap", {"axial": 2}), ("grid", {"row": 2, "col": 1})])
@ranks(2)
def test_chunks_over_2_ranks(mode: str, axes: dict[str, int]) -> None:
    check_equal("evoformer", mode, axes, memory=MemorySettings(chunk_bytes=8000, recompute="both"), blocks=1)
    check_equal("extra", mode, axes, memory=SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
@ranks(4)
def test_chunks_over_4_ranks(kind: str) -> None:
    for mode, axes in (("dap", {"axial": 4}), ("grid", {"row": 2, "col": 2}), ("grid", {"row": 1, "col": 4})):
        for attention in ("exchange", "gather", "ring"):
            check_equal(kind, mode, axes, attention=attention, memory=SMALL, product_steps=2)


@pytest.mark.parametrize("kind", MODELS)
def test_inference_in_place_leaves_inputs_alone(kind: str) -> None:
    tensors, masks = inputs_of(kind, 6, 7)
    before = [x.clone() for x in tensors]
    wanted = model_of(kind, 2, 0.5).eval()(*tensors, *masks)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    for chunk in (None, 2000):
        model = model_of(kind, 2, 0.5).eval()
        parallelize_folding(model, Mesh({"axial": 1}, rank=0), memory=MemorySettings(chunk_bytes=chunk))
        with torch.no_grad():
            got = model(*tensors, *masks)
        for a, b in zip(got if isinstance(got, tuple) else (got,), wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
        for x, was in zip(tensors, before, strict=True):
            assert torch.equal(x, was)


def test_parts_cover_every_line_once() -> None:
    for length, count in ((7, 3), (5, 4), (1, 1), (0, 1), (6, 6)):
        bounds = Parts(length, count).bounds
        assert [line for first, size in bounds for line in range(first, first + size)] == list(range(length))
        assert len(bounds) <= max(count, 1)


def test_settings_that_cannot_be_right() -> None:
    with pytest.raises(MeshfoldError, match=r"chunk_bytes=0: give a whole number of bytes"):
        MemorySettings(chunk_bytes=0)
    with pytest.raises(MeshfoldError, match=r"recompute='block' is not known.*Did you mean 'blocks'"):
        MemorySettings(recompute="block")


@pytest.mark.few(1)
@pytest.mark.parametrize(("mode", "axes"), [("dap", {"axial": 2}), ("grid", {"row": 1, "col": 2})])
@ranks(2)
def test_inference_in_chunks_over_2_ranks(mode: str, axes: dict[str, int]) -> None:
    """A product takes several steps in each part in channels."""
    tensors, masks = inputs_of("pairformer", 6, 7)
    wanted = model_of("pairformer", 1, 0.0).eval()(*tensors, *masks)
    model = model_of("pairformer", 1, 0.0).eval()
    parallelize_folding(model, Mesh(axes), mode, memory=MemorySettings(chunk_bytes=2000))
    with torch.no_grad():
        got = model(*tensors, *masks)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_small_chunks_read_pairs_a_few_times() -> None:
    """The smallest chunks of inference on one rank move less than 2.5 times the bytes of whole updates."""
    with torch.device("meta"):
        stack = EsmFoldStack(1, 64, 128, head_width_s=32, head_width_z=32).eval()
    run = FoldingRun(
        sizes=Sizes(residues=512, itemsize=2), mode=find_axial_mode("dap"), axes={"axial": 1}, training=False
    )
    given = list(candidates(stack, run))
    whole, lean = (
        sum(operator.bytes * count for operator, count in count_work(stack, run, settings).operators.items())
        for settings in (given[0], given[-1])
    )
    assert whole < lean < 2.5 * whole
