"""``engine.print`` prints on rank 0 alone; mistakes of a first script are told with what to write."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
import torch
from torch import nn

from meshfold.engine import Engine, TrainingError
from meshfold.mesh import MeshfoldError, SpecError
from meshfold.mesh.testing import ranks, run_on_ranks
from meshfold.models import build


def printed() -> str:
    """What a rank prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out, Engine(nn.Linear(2, 2), dict(data=2)) as engine:
        engine.print("step", 3, sep="=", end=".\n")
        if engine.mesh.index("data") == 1:
            engine.print("not seen")
    return out.getvalue()


def test_rank_0_alone_prints() -> None:
    assert run_on_ranks(2, printed) == ["step=3.\n", ""]


@ranks(1)
def test_anything_may_be_printed_somewhere_else() -> None:
    file = io.StringIO()
    Engine(nn.Linear(2, 2)).print("a", file=file)
    assert file.getvalue() == "a\n"


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("float16", "fp16"),
        (torch.bfloat16, "bf16"),
        ("Half", "fp16"),
        ("16-mixed", "fp16"),
        (dict(name="double"), "fp64"),
        (16, "fp16"),
    ],
)
def test_another_name_of_a_precision_is_told_ours(written: Any, name: str) -> None:
    with pytest.raises(SpecError, match=f"it is called '{name}' here"):
        Engine(nn.Linear(2, 2), precision=written)


@ranks(1)
def test_ids_that_are_too_large_are_told_beside_the_tables() -> None:
    engine = Engine(lambda: build("gpt-tiny", vocab_size=50), {}, optimizer="sgd")
    with pytest.raises(IndexError) as caught:
        engine.train_step(torch.full((2, 8), 99))
    note = caught.value.__notes__[-1]
    assert note.startswith(
        "the largest number in it is 99, its last dim has 8, and the model's embeddings have so many"
    )
    assert " 50" in note and "Give ids below the vocabulary" in note


@ranks(2)
def test_a_closed_engine_says_so_on_every_rank() -> None:
    engine = Engine(nn.Linear(2, 2), dict(data=2), optimizer="sgd", loss_fn=lambda output, batch: output.mean())
    engine.close()
    with pytest.raises(
        TrainingError, match=r"engine.train_step\(...\): this engine is closed\. .* or make another Engine"
    ):
        engine.train_step((torch.ones(2, 2), torch.ones(2)))


@ranks(1)
def test_rules_for_numbered_submodules_show_the_numbers() -> None:
    with pytest.raises(MeshfoldError, match=r"rule 'nope' matches no submodule\. Names here are 0, 1$"):
        Engine(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), {}, rules={"nope": "column"})
