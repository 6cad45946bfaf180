"""Blocks against numbers that OpenFold's own blocks gave: ``golden_recipe.py`` says how they were made."""

from __future__ import annotations

import json
from pathlib import Path

import golden_cases as cases
import pytest
import torch

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())


@pytest.mark.parametrize("kind", cases.KINDS)
def test_outputs_and_gradients_are_those_of_openfold(kind: str) -> None:
    block = cases.ours(kind)
    named = dict(block.named_parameters())
    cases.fill(named)
    found, wanted = cases.results(block, named, kind), GOLDEN[kind]
    assert sorted(found) == sorted(wanted)
    for name, numbers in wanted.items():
        got = torch.tensor(found[name], dtype=torch.float64)
        torch.testing.assert_close(got, torch.tensor(numbers, dtype=torch.float64), rtol=1e-10, atol=1e-10, msg=name)


def test_state_dicts_of_openfold_1_load() -> None:
    block = cases.ours("evoformer")
    renamed = {}
    for name, tensor in block.state_dict().items():
        inner = name.removeprefix("pair_stack.")
        moved = inner != name or name.startswith(("msa_transition.", "outer_product_mean."))
        renamed[f"core.{inner}" if moved else name] = tensor + 1
    block.load_state_dict(renamed)
    assert torch.equal(block.pair_stack.tri_mul_out.linear_g.bias, renamed["core.tri_mul_out.linear_g.bias"])
