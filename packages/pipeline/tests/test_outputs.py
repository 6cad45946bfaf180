"""The output of a called pipeline, on every rank: in the model's own form, or an error on every rank and not on one."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from pipeline_checks import Model, model, tokens
from torch import Tensor

from meshfold.mesh import Mesh, SpecError
from meshfold.mesh.testing import ranks
from meshfold.pipeline import Pipeline

IDS = tokens(5)["input_ids"]


class Pair(NamedTuple):
    logits: Tensor
    best: Tensor


class Odd:
    __slots__ = ("logits",)

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


FORMS: dict[str, Any] = {
    "tensor": lambda logits: logits,
    "tuple": lambda logits: (logits, None, logits.argmax(-1)),
    "named tuple": lambda logits: Pair(logits, logits.argmax(-1)),
    "attributes": lambda logits: SimpleNamespace(logits=logits, best=logits.argmax(-1)),
}
WRONG: dict[str, tuple[Any, str]] = {
    "slots": (Odd, "cannot be joined"),
    "complex": (lambda logits: torch.complex(logits, logits), "cannot be joined"),
    "other lengths": (
        lambda logits: logits.flatten(1)[:, : 1 + int(logits[0, 0, 0] * 1e6) % 50],
        "cannot be joined",
    ),
    "nothing": (lambda logits: None, "cannot be joined"),
    "a number": (lambda logits: SimpleNamespace(loss=logits.mean()), "no tensor whose first dim is the batch"),
}


class Shaped(Model):
    """Returns its logits in some form."""

    form: str = "tensor"

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        made = FORMS[self.form] if self.form in FORMS else WRONG[self.form][0]
        return made(super().forward(input_ids)["logits"])


def shaped(form: str) -> Shaped:
    made = copy.deepcopy(model(4))
    made.__class__ = Shaped
    made.form = form  # type: ignore[attr-defined]
    return made.eval()  # type: ignore[return-value]


@pytest.mark.parametrize("form", FORMS)
@ranks(2)
def test_the_output_has_the_form_that_the_model_gives_it(form: str) -> None:
    wanted = shaped(form)(IDS)
    found = Pipeline(shaped(form), Mesh({"pipe": 2}), microbatches=2)(IDS)
    if form == "tensor":
        assert torch.allclose(found, wanted, rtol=1e-12)
        return
    if form == "tuple":
        assert isinstance(found, tuple) and len(found) == 2
        found = SimpleNamespace(logits=found[0], best=found[1])
        wanted = SimpleNamespace(logits=wanted[0], best=wanted[2])
    assert torch.allclose(found.logits, wanted.logits, rtol=1e-12)
    assert torch.equal(found.best, wanted.best)


@pytest.mark.parametrize("form", WRONG)
@ranks(2)
def test_what_cannot_be_handed_out_is_an_error_on_every_rank(form: str) -> None:
    pipeline = Pipeline(shaped(form), Mesh({"pipe": 2}), microbatches=2)
    with pytest.raises(SpecError, match=WRONG[form][1]):
        pipeline(IDS)
