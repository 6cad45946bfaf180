"""Experiments whose ``--measure`` trains on ever more ranks: megatron-2019, torchtitan and fastfold, tiny and on CPU ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from experiments.all_measured import names
from experiments.fastfold import measured as folding
from experiments.measuring import ON_CPU
from experiments.megatron_2019 import measured as scaling
from experiments.torchtitan import measured as titan
from meshfold.folding.axial.redistribute import Redistribution
from meshfold.mesh import Layout, Mesh, Pending
from meshfold.mesh.testing import ranks

CPU = torch.device("cpu")


def test_they_are_measured_with_all_others() -> None:
    assert {"fastfold", "megatron-2019", "torchtitan"} <= set(names())


@ranks(2)
def test_weak_scaling_is_measured() -> None:
    found = scaling.MEASURED.take(scaling.MEASURED.options(["--steps", "1"]), 2, CPU)
    one, two = found["rows"]
    assert [(row["tensor"], row["data"]) for row in found["rows"]] == [(1, 2), (2, 1)]
    # One rank alone sends a few numbers, no activations and no gradients; with data, gradients of all parameters, in float32.
    assert one["sent"]["tensor"] < 1000 < 4 * (128 * 64 + 16 * 64 + 12 * 64**2) <= one["sent"]["data"]
    rows = 2 * 16 * 80 * 4
    assert two["sent"]["tensor"] >= 6 * rows  # half of six all-reduces of the stream, twice
    assert all(row["losses"][1] < row["losses"][0] for row in found["rows"])
    assert all(row["TFLOP/s"]["tensor"] > 0 for row in found["rows"])
    text = scaling.page(found)
    assert "2 ranks on CPU" in text and "| 2.5 | 2 |" in text and ON_CPU in text


def test_efficiency_is_judged_by_its_direction() -> None:
    def said(*rates: float) -> str:
        rows = [
            {"tensor": n, "published": {"tensor": share}, "TFLOP/s": {"tensor": rate}}
            for n, share, rate in zip((1, 2, 4), (100.0, 95.0, 82.0), rates, strict=True)
        ]
        return scaling.said({"device": "a GPU", "ranks": 4, "cores": 8, "rows": rows})

    assert "falls, as published: 100, 80, 60 % with 1, 2, 4 GPUs (published 100, 95, 82 %)" in said(500.0, 400.0, 300.0)
    assert "does not fall" in said(500.0, 400.0, 450.0)


@ranks(2)
def test_llama_is_trained_in_every_way() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(titan.HOW, titan.COMPILED)
        trained_in_every_way()


@pytest.mark.slow
@ranks(2)
def test_llama_is_trained_in_every_way_compiled_too() -> None:
    trained_in_every_way()


def trained_in_every_way() -> None:
    found = titan.MEASURED.take(titan.MEASURED.options(["--context", "8"]), 2, CPU)
    made = [(row["part"], row["how"]) for row in found["rows"]]
    assert made == [
        *(("FSDP", how) for how in titan.HOW),
        ("context", "1 ranks a sequence"),
        ("context", "2 ranks a sequence"),
        *(("tensor", how) for how in titan.OVERLAPS),
    ]
    losses: dict[str, list[float]] = {}
    for row in found["rows"]:
        assert row["fits"] and row["TPS"] > 0
        losses.setdefault(row["part"], []).append(row["loss"])
    for part in ("FSDP", "tensor"):  # the same model and batch
        assert max(losses[part]) - min(losses[part]) < 1e-5
    assert [row["tokens"] for row in found["rows"] if row["part"] == "context"] == [8, 16]
    assert ON_CPU in titan.page(found)


def test_ways_to_train_are_judged_by_their_direction() -> None:
    rates = {
        ("FSDP", "eager"): 6000.0,
        ("FSDP", "compiled"): 6900.0,
        ("context", "1 ranks a sequence"): 4000.0,
        ("context", "2 ranks a sequence"): 2800.0,
        ("context", "4 ranks a sequence"): 4400.0,
        ("tensor", "gather"): 4000.0,
        ("tensor", "ring"): 3600.0,
        ("tensor", "push"): 4400.0,
    }
    rows: list[dict[str, Any]] = [
        {"part": part, "how": how, "fits": True, "TPS": rate} for (part, how), rate in rates.items()
    ]
    rows.append({"part": "FSDP", "how": "fused kernels", "fits": False})
    said = titan.said({"device": "a GPU", "rows": rows})
    assert "1.15 times as fast (published 1.16): the published direction" in said
    assert "over 2 ranks leave 0.70 of the speed (published 0.65): the published direction, 7% off" in said
    assert "over 4 ranks leave 1.10 of the speed (published 0.28): not the published direction" in said
    assert "by push is 1.10 times as fast as by gather (published for asynchronous traffic 1.10): the published" in said


@ranks(2)
def test_blocks_of_folding_are_measured() -> None:
    words = ["--shrink", "32", "--length", "4", "--msa", "2"]
    counted = {("initial training", 2): 1e9, ("fine-tuning", 2): 1e9}
    with pytest.MonkeyPatch.context() as patch:
        for name, channels in (("C_M", 32), ("C_Z", 16)):
            patch.setattr(folding, name, channels)
        found = folding.MEASURED.take(folding.MEASURED.options(words), 2, CPU, plan=counted)
    training = [row for row in found["rows"] if row["what"] != folding.PREDICTION]
    assert [(row["N"], row["order"]) for row in training] == [(1, "async"), (2, "async"), (2, "sync")] * 2
    assert all(row["sent"] == pytest.approx(row["planned"]) for row in training)
    assert [row["residues"] for row in found["rows"] if row["what"] == folding.PREDICTION] == [4, 4, 8, 8, 16, 16]
    split = [row for row in found["rows"] if row["N"] == 2]
    assert all(0 < row["off"] < 1e-5 for row in split)  # blocks that return what they are given would be exact
    for one, split_rows in ((training[0], split[:2]), (training[3], split[2:4])):
        assert all(0.4 * one["bytes"] < row["bytes"] < 0.8 * one["bytes"] for row in split_rows)
    assert "as claimed" in folding.page(found) and ON_CPU in folding.page(found)


def test_bytes_of_tensor_parallelism_are_counted_before_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    made = folding.planned(folding.MEASURED.options(["--shrink", "32"]))
    assert list(made) == [(name, n) for name in ("initial training", "fine-tuning") for n in (2, 4)]
    # six all-reduces of a whole MSA or pair tensor each way
    assert made["initial training", 4] == 2 * 2 * 3 / 4 * 3 * 8 * (4 * 256 + 8 * 128)


def test_sync_waits_where_a_change_of_layout_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    class Flight(Pending):
        def wait(self) -> torch.Tensor:
            seen.append("wait")
            return super().wait()

    def begin(_: Redistribution, x: torch.Tensor) -> Pending:
        return Flight(x, None)

    for name in ("start", "start_adjoint"):
        monkeypatch.setattr(Redistribution, name, begin)
    nothing = Layout.parse("m k")
    move, x = Redistribution(nothing, nothing, Mesh({}), {}), torch.zeros(1)
    for starts in (move.start, move.start_adjoint):
        starts(x)
    assert seen == []
    with folding.waiting():
        move.start(x)
        move.start_adjoint(x)
    assert seen == ["wait", "wait"]
    move.start(x)
    assert seen == ["wait", "wait"] and Redistribution.start is begin
