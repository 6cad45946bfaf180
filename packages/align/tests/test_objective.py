"""An objective in an engine equals one process with whole logits: loss, metrics, every weight, scores; under every spec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from align_models import SPECS, SPECS_OF_4, gpt, hugging_face, llama, masked_batch, plain_log_probs

from meshfold.align import Objective, Terms, TokenValues, mean_of_sequences, mean_of_tokens
from meshfold.engine import Engine
from meshfold.mesh import SpecError
from meshfold.mesh.testing import Operators, ranks
from meshfold.models import Llama, LlamaConfig


def terms(values: TokenValues, batch: Mapping[str, Any]) -> Terms:
    """A loss that no mean of means gives: over tokens, over rows, and of entropies; with weights of the batch."""
    mask = batch["labels"] != -100
    by_row = (values.log_probs * mask).sum(-1) * batch["weights"]
    tokens = mean_of_tokens(-values.log_probs * batch["weights"][:, None], mask)
    loss = [tokens, mean_of_sequences(by_row.square(), mask.any(-1)).times(0.01)]
    if values.entropy is not None:
        loss.append(mean_of_tokens(values.entropy, mask).times(-0.1))
    return Terms(loss=loss, metrics=dict(likelihood=mean_of_tokens(values.log_probs.exp(), mask)))


def batches_of(seed: int) -> list[dict[str, Any]]:
    """Two micro-steps, the second of which has fewer rows than ranks."""
    both = [masked_batch(5, seed=seed), masked_batch(1, seed=seed + 10)]
    for batch in both:
        rows = len(batch["labels"])
        batch["weights"] = torch.linspace(0.5, 1.5, rows, dtype=torch.float64)
    return both


def check(make: Any, spec: Mapping[str, Any], *, within: float = 1e-9, **options: Any) -> None:
    close = dict(rtol=within, atol=within)
    objective = Objective(terms, fields=("weights",), entropy=True)
    settings: dict[str, Any] = dict(precision="fp64", optimizer=dict(name="sgd", lr=0.3), gradient_accumulation=2)
    with Engine(make, spec, loss_fn=objective, **settings, **options) as engine:
        objective.attach(engine)
        serial = make().double()
        serial.load_state_dict(engine.full_state_dict())
        for seed, trains in ((0, True), (1, False)):
            batches = batches_of(seed)
            scored = objective.score(batches[0])
            logs, entropy = plain_log_probs(serial, batches[0])
            counts = batches[0]["labels"] != -100
            torch.testing.assert_close(scored.log_probs * counts, logs.detach().double(), **close)
            assert scored.entropy is not None
            torch.testing.assert_close(scored.entropy * counts, entropy.detach().double(), **close)

            if not trains:
                continue
            found = objective.step(batches)
            all_terms = []
            for batch in batches:
                logs, entropy = plain_log_probs(serial, batch)
                all_terms.append(terms(TokenValues(log_probs=logs, entropy=entropy), batch))
            loss = sum(
                each[0].weight * sum(t.total for t in each) / sum(t.count for t in each)
                for each in zip(*(t.loss for t in all_terms), strict=True)
            )
            likelihood = [t.metrics["likelihood"] for t in all_terms]
            assert found["loss"] == pytest.approx(float(loss.detach()), rel=within)
            assert found["likelihood"] == pytest.approx(
                float(sum(m.total.detach() / sum(n.count for n in likelihood) for m in likelihood)), rel=within
            )
            serial.zero_grad()
            loss.backward()  # type: ignore[union-attr]
            with torch.no_grad():
                for parameter in serial.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.3 * parameter.grad
            for name, value in engine.full_state_dict().items():
                torch.testing.assert_close(
                    value, serial.state_dict()[name], **close, msg=lambda text, n=name: f"{n}: {text}"
                )
        objective.close()


FUSED = dict(kernels=dict(loss=True))


def test_objective_on_one_rank() -> None:
    for make in (gpt, hugging_face):
        check(make, {}, **FUSED)
        check(make, {}, kernels="off")


@ranks(2)
def test_objective_of_own_models() -> None:
    for spec in SPECS.values():
        check(llama, spec, **FUSED)
    check(gpt, SPECS["tensor"], kernels="off")


@pytest.mark.parametrize(
    "names", [("tensor", "pipeline"), pytest.param(("data", "sequence"), marks=pytest.mark.slow)], ids=" and ".join
)
@ranks(2)
def test_objective_of_hugging_face(names: tuple[str, ...]) -> None:
    for name in names:
        check(hugging_face, SPECS[name], within=2e-6, **FUSED)  # it takes norms in float32


@ranks(4)
def test_objective_on_4() -> None:
    check(llama, SPECS_OF_4["zero 3 and tensor"], **FUSED)


@pytest.mark.slow
@ranks(4)
def test_objective_on_4_in_more_specs() -> None:
    for name in ("2d", "2.5d", "3d", "data and pipeline", "ulysses and data"):
        check(llama, SPECS_OF_4[name], **FUSED)


def test_no_step_makes_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is as large as the logits of 8 rows of 128 tokens and 512 words; without the kernels they are there."""
    for name in ("CHUNK_BYTES", "LARGE_CHUNK_BYTES"):
        monkeypatch.setattr(f"meshfold.kernels.logit_chunks.{name}", 8192)
    config = LlamaConfig(vocab_size=512, hidden=16, layers=1, heads=2, kv_heads=2)
    batch = masked_batch(8, 128)
    batch["weights"] = torch.ones(8, dtype=torch.float64)
    largest = {}
    for kernels in (dict(loss=True), "off"):
        objective = Objective(terms, fields=("weights",), entropy=True)
        with Engine(
            lambda: Llama(config), loss_fn=objective, kernels=kernels, optimizer=dict(name="sgd", lr=0.1)
        ) as engine:
            objective.attach(engine)
            with Operators() as seen:
                objective.step([batch])
                objective.score(batch)
            largest[str(kernels)] = seen.largest
    assert largest["off"] >= 8 * 128 * 512
    assert largest["{'loss': True}"] <= 8 * 128 * 512 / 4


def test_mistakes() -> None:
    with pytest.raises(SpecError, match="temperature=0"):
        Objective(terms, temperature=0)
    with pytest.raises(SpecError, match="attach"):
        Objective(terms).step([masked_batch()])
    with pytest.raises(SpecError, match="reads='logits'"):
        Objective(terms, reads="logits")
    objective = Objective(terms)
    with (
        Engine(torch.nn.Linear(2, 2), loss_fn=objective) as engine,
        pytest.raises(SpecError, match="no loss to take log-probabilities from"),
    ):
        objective.attach(engine)
