"""A loop of the user's own: the model's loss needs no whole logits, and they can be read until the weights change."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.engine import Engine
from meshfold.kernels.fuse import LazyLogits
from meshfold.mesh.testing import ranks

sys.path.append(str(Path(__file__).parent))  # for the helpers beside this file, on every rank
from test_fused_kernels import ALWAYS, IDS, LABELS, Counted, OwnModel, fused_losses, hugging_face, llama, whole_logits


def engine_of(make: Any, parallel: dict[str, Any], kernels: object) -> Engine:
    engine = Engine(make, parallel, kernels=kernels, precision="fp64", optimizer=dict(name="sgd", lr=0.5, momentum=0.9))
    if engine.fused_kernels is not None and engine.fused_kernels.logits is not None:
        for head in engine.fused_kernels.logits.heads:
            head.__class__ = Counted
    return engine


def looped(
    make: Any, parallel: dict[str, Any], kernels: object, *, reads: bool
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of three steps of a loop that reads logits for a second loss, or does not read them."""
    engine = engine_of(make, parallel, kernels)
    seen = []
    for _ in range(3):
        batch = engine.shard_batch(dict(input_ids=IDS, labels=LABELS))
        output = engine(**batch)
        loss = output["loss"] if isinstance(output, dict) else output.loss
        if reads:
            logits = output["logits"] if isinstance(output, dict) else output.logits
            loss = loss + 0.1 * logits.square().mean()
        engine.backward(loss)
        engine.step()
        seen.append(loss.item())
    weights = engine.full_state_dict()
    engine.close()
    return seen, weights


CASES: dict[str, tuple[Any, dict[str, Any], int]] = {
    "own": (OwnModel, {}, 1),
    "zero 3 alone": (llama, dict(zero=dict(stage=3)), 1),
    "Hugging Face, a plan": (hugging_face, dict(zero=dict(placement="auto")), 1),
    "data": (OwnModel, dict(data=2), 2),
    "zero 3": (OwnModel, dict(data=2, zero=dict(stage=3)), 2),
    "tensor": (llama, dict(tensor=2), 2),
    "Hugging Face, tensor": (hugging_face, dict(tensor=2), 2),
    "ulysses": (llama, dict(sequence=dict(mode="ulysses", size=2)), 2),
    "Hugging Face, ring": (hugging_face, dict(sequence=dict(mode="ring", size=2)), 2),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("reads", [False, True], ids=["loss", "loss and logits"])
@pytest.mark.parametrize("case", [case for case in CASES if CASES[case][2] == 1])
@ranks(1)
def test_one_rank(case: str, reads: bool) -> None:
    check(case, reads)


@pytest.mark.few(1)
@pytest.mark.parametrize("reads", [False, True], ids=["loss", "loss and logits"])
@pytest.mark.parametrize("case", [case for case in CASES if CASES[case][2] == 2])
@ranks(2)
def test_two_ranks(case: str, reads: bool) -> None:
    check(case, reads)


def check(case: str, reads: bool) -> None:
    make, spec, _ = CASES[case]
    want, weights = looped(make, spec, "off", reads=reads)
    fused_losses.clear()
    whole_logits.clear()
    got, others = looped(make, spec, ALWAYS, reads=reads)
    assert len(fused_losses) >= 2  # the first may be looked at
    assert bool(whole_logits) == reads
    tolerance = 1e-4 if make is hugging_face else 1e-9
    assert got == pytest.approx(want, rel=tolerance)
    for name, value in weights.items():
        assert torch.allclose(others[name], value, rtol=tolerance, atol=tolerance / 10), name


@ranks(1)
def test_logits_are_read_until_the_step() -> None:
    engine = engine_of(OwnModel, {}, ALWAYS)
    plain: nn.Module = OwnModel().double()
    plain.load_state_dict(engine.full_state_dict())
    output = engine(input_ids=IDS, labels=LABELS)
    assert isinstance(output["logits"], LazyLogits)
    engine.backward(output["loss"])
    torch.testing.assert_close(output["logits"].detach() + 0, plain(IDS)["logits"].detach())
    late = engine(input_ids=IDS, labels=LABELS)
    engine.backward(late["loss"])
    engine.step()
    torch.testing.assert_close(output["logits"] * 1, plain(IDS)["logits"])  # computed in time
    with pytest.raises(RuntimeError, match=r"read after their loss .* before engine.step\(\)"):
        late["logits"].argmax(-1)
    loaded = engine(input_ids=IDS, labels=LABELS)
    engine.load_state_dict(engine.full_state_dict())
    with pytest.raises(RuntimeError, match="read after their loss"):
        loaded["logits"].argmax(-1)
    # Without labels the loss is the user's, of logits as they are.
    logits = engine(input_ids=IDS)["logits"]
    assert type(logits) is Tensor
    engine.backward(F.cross_entropy(logits.flatten(0, 1), LABELS.flatten()))
    engine.close()


@ranks(2)
def test_a_second_derivative_through_layers_that_are_split_is_refused() -> None:
    """A penalty on the gradient by the input: weights got a part of its gradient, silently."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    settings: dict[str, Any] = dict(optimizer="sgd", precision="fp64", rules={"0": "column", "2": "row"})
    with Engine(model, dict(tensor=2), **settings) as engine:
        x = torch.ones(3, 4, dtype=torch.float64, requires_grad=True)
        (slope,) = torch.autograd.grad(engine(x).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match=r"differentiate twice") as raised:
            engine.backward((slope.norm(dim=1) - 1).square().mean())
        assert any("have no second derivative" in note for note in raised.value.__notes__)
