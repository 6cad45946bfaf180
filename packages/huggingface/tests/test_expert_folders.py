"""Folders of mixtures: read with experts over ranks, exported and converted, they come back bit for bit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from meshfold.checkpoint.tensors import open_weights
from meshfold.engine import Engine
from meshfold.huggingface import convert_folder, pretrained
from meshfold.mesh.testing import run_on_ranks

sys.path.append(str(Path(__file__).parents[2] / "experts" / "tests"))  # for the models there, on every rank
from expert_models import FAMILIES, WHOLE_ATTENTION, model_of

pytest.importorskip("transformers", reason="needs meshfold[hf]")


def through_ranks(folder: str, families: list[str], parallel: dict[str, Any]) -> list[int]:
    """Read a folder of each family, and write it as a folder and as a checkpoint; return this rank's experts of a layer."""
    found = []
    for family in families:
        rules = WHOLE_ATTENTION.get(family) if "tensor" in parallel else None
        with Engine(pretrained(f"{folder}/{family}"), parallel, rules=rules, optimizer=None) as engine:
            engine.save_hugging_face(f"{folder}/{family}-exported")
            engine.save(f"{folder}/{family}-checkpoint")
            found.append(next(len(p) for name, p in engine.model.named_parameters() if "experts.down" in name))
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("parallel", [dict(data=2, expert=2), dict(expert=2, tensor=2)], ids=str)
def test_every_family_comes_back_as_it_was(parallel: dict[str, Any], tmp_path: Path) -> None:
    for family in FAMILIES:
        model_of(family).float().save_pretrained(tmp_path / family)
    assert run_on_ranks(2, through_ranks, str(tmp_path), [*FAMILIES], parallel) == [[4] * len(FAMILIES)] * 2
    for family in FAMILIES:
        convert_folder(tmp_path / f"{family}-checkpoint", tmp_path / f"{family}-converted", to="hf")
        with_values = dict(open_weights(tmp_path / family))
        assert any(".experts." in name for name in with_values), family
        for made in ("exported", "converted"):
            found = dict(open_weights(tmp_path / f"{family}-{made}"))
            assert found.keys() == with_values.keys(), (family, made)
            for name, value in with_values.items():
                assert torch.equal(found[name], value), (family, made, name)
