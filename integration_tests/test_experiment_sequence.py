"""The experiment sequence-parallelism: counted, planned and run anew, a measurement, and what its layers are."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from experiments.report import rounded
from experiments.sequence_parallelism import claims, counting, exact, measured, plan, run, simulated
from experiments.sequence_parallelism.bert import LARGE, SelfAttention
from experiments.sequence_parallelism.counting import RING, RING_SELF, TENSOR
from meshfold.mesh.testing import ranks


def committed() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run.EXPERIMENT.folder / "results" / "simulated.json").read_text())
    return found


def test_counts_are_as_committed() -> None:
    then, rows = committed(), plan.published()
    now = counting.volumes((2, 12), (4,), (8,))
    some = {("BERT-Base", 2), ("BERT-Base", 8), ("BERT-Base", 12), ("BERT-Large", 4), ("BERT-Large", 8)}
    found = [row for row in then["volumes"] if (row["model"], row["N"]) in some]
    assert now == [row for row in found if (row["model"], row["N"], row["scheme"]) != ("BERT-Large", 8, TENSOR)]
    assert counting.blocks((2, 8)) == [row for row in then["blocks"] if row["N"] in (2, 8)]
    assert counting.activations(rows[3::4]) == then["kept"][3::4]
    assert rounded(list(counting.causal_work())) == then["work"]


def test_the_plan_is_as_committed() -> None:
    then, rows = committed(), plan.published()
    found = plan.fit(rows)
    assert rounded(plan.memory(rows, found)) == then["memory"]
    assert rounded(plan.clock(rows)) == then["clock"]
    assert plan.sizes(found) == then["sizes"]
    assert rounded(simulated.a_score(rows)) == then["scores"]


def test_runs_are_as_committed() -> None:
    assert rounded(exact.everything((2,))) == committed()["runs"][:3]


@pytest.mark.few(3)
@pytest.mark.parametrize("n", [1, 2, 8])
@pytest.mark.parametrize("scheme", [TENSOR, RING_SELF, RING])
def test_the_closed_form_is_what_autograd_keeps(scheme: str, n: int) -> None:
    """But for the norms' means and deviations (and our ring's sums, our float32 scores)."""
    batch, length = 4, 256
    kept = counting.count(scheme, n, LARGE, batch, length).kept
    tokens = batch * length // (1 if scheme == TENSOR else n)
    scores = batch * LARGE.heads * length**2 // n
    ours = {TENSOR: 0, RING_SELF: -scores, RING: 4 * LARGE.heads * tokens}[scheme]  # float32: 4, not 5
    norms = 2 * 2 * 4 * tokens
    assert kept == plan.layer_bytes(scheme, n, batch, length, LARGE) + ours + norms


def test_the_layer_attends_as_it_should() -> None:
    torch.manual_seed(0)
    module = SelfAttention(16, 4, dropout=0.5).double().eval()
    x = torch.randn(2 * 6, 16, dtype=torch.float64)
    q, k, v = (part.view(2, 6, 4, 4).transpose(1, 2) for part in module.qkv(x).split(16, -1))
    wanted = module.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(12, 16))
    torch.testing.assert_close(module(x, 6), wanted, rtol=1e-12, atol=1e-12)
    assert not torch.equal(module.train()(x, 6), wanted)


def test_the_largest_that_fits() -> None:
    for bound in (0, 1, 2, 7, 8, 1000):
        assert plan.most(bound.__ge__) == bound
    found = plan.fit(plan.published())
    size = plan.largest(TENSOR, 16, LARGE, found, length=512)
    room = plan.CARD - plan.CONTEXT
    assert plan.model_bytes(TENSOR, 16, size, 512, LARGE, found) <= room
    assert plan.model_bytes(TENSOR, 16, size + 1, 512, LARGE, found) > room


def test_ranks_that_differ_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter([1, 2])
    monkeypatch.setattr(counting, "_on_rank", lambda *_: next(calls))
    with pytest.raises(counting.CountError, match="ring on 4 ranks: the first rank 1, the last 2"):
        counting.count(RING, 4, LARGE, 1, 64)


def test_formulas_are_read_from_the_paper() -> None:
    row = {"N": 4, "B": 2, "L": 8, "H": 6, "Z": 3}
    printed = claims.formulas()
    assert claims.value(printed["rsa-backward"], row) == 6 * 3 * 2 * 3 * 2 * 2
    assert claims.value(printed["mlp-sp"], row) == 32 * 36 + 5 * 2 * 8 * 6 / 4


# -- a measurement --------------------------------------------------------------------------------------------------


@ranks(2)
def test_weak_scaling_is_measured() -> None:
    sizes = dict(layers=1, hidden=16, heads=2, batch=2, length=8, repeats=1)
    words = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    found = measured.MEASURED.take(measured.MEASURED.options(words), 2, torch.device("cpu"))
    rows = {(row["scheme"], row["scaled"], row["N"]): row for row in found["rows"]}
    assert len(rows) == 3 * 2 * 2
    assert all(row["seconds"] > 0 and row["off"] < 1e-5 for row in rows.values())
    for scheme in (RING_SELF, RING):
        assert rows[scheme, "batch", 2]["bytes"] == rows[scheme, "batch", 1]["bytes"]
    assert rows[TENSOR, "batch", 2]["bytes"] > rows[TENSOR, "batch", 1]["bytes"]
    assert (rows[RING, "sequence", 2]["batch"], rows[RING, "sequence", 2]["length"]) == (2, 8)
    text = measured.page(found)
    assert "2 ranks on CPU" in text and "within 0.0% of one rank's" in text


def test_what_was_measured_is_judged_by_the_numbers() -> None:
    def row(scheme: str, scaled: str, n: int, size: float) -> dict[str, Any]:
        return {"scheme": scheme, "scaled": scaled, "N": n, "bytes": size, "off": 1e-3 * n}

    found: dict[str, Any] = {"device": "CPU", "ranks": 4, "cores": 2}
    found["rows"] = [
        row(RING_SELF, "batch", 1, 100.0),
        row(RING_SELF, "batch", 4, 110.0),
        row(TENSOR, "sequence", 4, 200.0),
        row(RING_SELF, "sequence", 4, 150.0),
        row(RING, "sequence", 4, 60.0),
    ]
    said = measured.said(found)
    assert "within 10.0% of one rank's" in said and "0.75 of tensor parallelism's, our ring's 0.30" in said
    assert "at most 4e-03 off" in said and "4 ranks shared 2 cores" in said
    assert "shared" not in measured.said({**found, "device": "a GPU"})


def test_sizes_belong_to_a_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.main(["--hidden", "4"])
    assert "unrecognized arguments: --hidden 4" in capsys.readouterr().err
