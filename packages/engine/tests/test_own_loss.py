"""A ``loss_fn`` is the loss, whatever the model makes of labels; under every spec it is given whole outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.engine import Engine
from meshfold.mesh import SpecError
from meshfold.mesh.testing import ranks
from meshfold.models import GPT, GPTConfig

IDS = torch.randint(37, (4, 8), generator=torch.Generator().manual_seed(1))
LABELS = IDS.roll(-1, dims=1)
LABELS[0, 3:] = LABELS[1, :6] = -100  # so that data ranks have unequally many
BATCH = dict(input_ids=IDS, labels=LABELS)
SPECS: dict[str, dict[str, Any]] = {
    "data": dict(data=2),
    "zero 3": dict(data=2, zero=dict(stage=3)),
    "tensor": dict(tensor=2),
    "pipeline": dict(pipeline=dict(size=2, microbatches=4)),
    "sequence": dict(sequence=dict(mode="ring", size=2)),
}


def gpt() -> GPT:
    return GPT(GPTConfig(vocab_size=37, hidden=16, layers=2, heads=2, max_positions=16))


def halved(output: Any, batch: Any) -> Tensor:
    """Half the cross entropy with labels that are moved already, which is not the model's own loss of them."""
    return F.cross_entropy(output.logits.flatten(0, 1), batch["labels"].flatten()) / 2


@pytest.mark.few(2)
@pytest.mark.parametrize("spec", SPECS)
@ranks(2)
def test_it_goes_before_the_models_own(spec: str) -> None:
    engine = Engine(gpt, SPECS[spec], loss_fn=halved, precision="fp64", optimizer=dict(name="sgd", lr=0.5))
    serial = gpt().double()
    serial.load_state_dict(engine.full_state_dict())
    for _ in range(3):
        wanted = halved(serial(IDS), BATCH)
        serial.zero_grad()
        wanted.backward()
        assert engine.eval_step(engine.shard_batch(BATCH)) == pytest.approx(float(wanted), rel=1e-9)
        assert engine.train_step(engine.shard_batch(BATCH)) == pytest.approx(float(wanted), rel=1e-9)
        with torch.no_grad():
            for parameter in serial.parameters():
                assert parameter.grad is not None
                parameter -= 0.5 * parameter.grad
    engine.close()


class Needs(nn.Module):
    """Cannot do without labels, of which it makes no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 8)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x: Tensor = self.embed(input_ids) + self.embed(labels.clamp(min=0))
        return x


def test_a_model_that_needs_labels_is_given_them() -> None:
    engine = Engine(Needs, loss_fn=lambda output, batch: output.square().mean())
    assert engine.eval_step(BATCH) > 0


def test_where_labels_are_the_decoders_input_there_is_no_loss_of_ones_own() -> None:
    model = gpt()
    model.config = type("Config", (), dict(is_encoder_decoder=True))()
    engine = Engine(model, loss_fn=halved)
    with pytest.raises(SpecError, match="loss_fn with labels for GPT, an encoder-decoder"):
        engine.eval_step(BATCH)
