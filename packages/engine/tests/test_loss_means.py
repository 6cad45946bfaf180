"""A model's own loss is a mean over next tokens, all labels or rows: ranks are weighted by what its first forward shows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.engine import Engine
from meshfold.mesh.testing import RankFailure, ranks, run_on_ranks

IDS = torch.randint(1, 11, (5, 6), generator=torch.Generator().manual_seed(1))
LABELS = IDS.clone()
LABELS[0, 2:] = LABELS[1, :1] = LABELS[3, 4:] = -100  # data ranks and micro-batches have unequally many


class Model(nn.Module):
    """A language model with one of many losses."""

    def __init__(self, kind: str, reduction: str = "mean") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.reduction = kind, reduction
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])
        if kind == "ctc":
            self.loss_type, self.config = "ForCTC", type("Config", (), {"ctc_loss_reduction": reduction})

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return {"loss": self.loss(x, labels)}

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(x)
        if self.kind == "next tokens":
            return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        if self.kind == "rows":
            return F.cross_entropy(logits[:, -1], labels[:, 1].clamp(min=0))
        if self.kind == "ctc":
            real = labels >= 0
            lengths = torch.full((len(x),), x.shape[1])
            scores = logits.log_softmax(-1).transpose(0, 1)
            return F.ctc_loss(scores, labels[real], lengths, real.sum(1), reduction=self.reduction, zero_infinity=True)
        if self.kind == "contrastive":
            return F.cross_entropy(x[:, 0] @ x[:, 1].T, torch.arange(len(x)))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return loss + F.cross_entropy(logits[:, 0], labels[:, 1].clamp(min=0)) if self.kind == "both" else loss


def trained(model: Model, spec: dict[str, object]) -> None:
    """Train two steps beside one process, and compare losses and gradients."""
    serial = Model(model.kind, model.reduction).double()
    batch = dict(input_ids=IDS, labels=LABELS)
    with Engine(model, spec, precision="fp64", optimizer=dict(name="sgd", lr=0.5)) as engine:
        for _ in range(2):
            wanted = serial(**batch)["loss"]
            serial.zero_grad()
            wanted.backward()
            assert engine.train_step(engine.shard_batch(batch)) == pytest.approx(float(wanted), rel=1e-12)
            with torch.no_grad():
                for parameter in serial.parameters():
                    parameter -= 0.5 * parameter.grad
        found = engine.full_state_dict()
    for name, value in serial.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)


@ranks(2)
@pytest.mark.parametrize("kind", ["next tokens", "labels", "rows", "ctc"])
def test_data_ranks_are_weighted_by_what_the_loss_is_a_mean_over(kind: str) -> None:
    trained(Model(kind), dict(data=2))


@pytest.mark.few(2)
@ranks(2)
@pytest.mark.parametrize(("kind", "reduction"), [("next tokens", "mean"), ("ctc", "mean"), ("ctc", "sum")])
def test_micro_batches_are_weighted_alike(kind: str, reduction: str) -> None:
    trained(Model(kind, reduction), dict(pipeline=2))


@ranks(2)
def test_a_sum_over_rows_is_summed_over_ranks() -> None:
    trained(Model("ctc", "sum"), dict(data=2, zero=dict(stage=3)))


def refused(kind: str, spec: dict[str, object]) -> None:
    """Try a step."""
    with Engine(Model(kind), spec, precision="fp64", optimizer=dict(name="sgd", lr=0.5)) as engine:
        engine.train_step(engine.shard_batch(dict(input_ids=IDS, labels=LABELS)))


@pytest.mark.parametrize(
    ("kind", "spec", "said"),
    [
        ("both", dict(data=2), r"SpecError: .*takes means over 13, 10 and 3, 2 targets \(data ranks"),
        pytest.param(
            "both",
            dict(pipeline=2),
            r"SpecError: .*takes means over 13, 10 and 3, 2 targets \(micro-batches",
            marks=pytest.mark.slow,
        ),
        ("contrastive", dict(data=2), "SpecError: .*compares every row of the batch with all others"),
        pytest.param(
            "labels",
            dict(pipeline=2),
            "SpecError: .*model.loss_type = 'ForTokenClassification'",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_cannot_be_combined_is_refused_in_the_first_forward(kind: str, spec: dict[str, object], said: str) -> None:
    with pytest.raises(RankFailure, match=said):
        run_on_ranks(2, refused, kind, spec)
