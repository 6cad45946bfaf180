"""What a plan says is what a real run does; the picture and the words of it."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
import torch

from meshfold.cli import main
from meshfold.engine import Engine
from meshfold.folding import PRESETS, EsmFoldStack, FoldingOutline
from meshfold.mesh import ParallelSpec, record
from meshfold.mesh.testing import run_on_ranks
from meshfold.models import build, preset
from meshfold.planner import MACHINES, Estimate, Machine, estimate, find_machine, step_times
from meshfold.planner.efficiency import Launches
from meshfold.planner.report import memory_table, mesh_picture
from meshfold.planner.step_bytes import WORKSPACE_BYTES

SIZES: dict[str, Any] = dict(hidden=32, layers=2, heads=4, vocab_size=40, max_positions=16)
SPECS: dict[str, dict[str, Any]] = {
    "data": dict(data=4),
    "1d": dict(data=2, tensor=2),
    "sequence": dict(data=2, tensor=2, sequence=dict(mode="megatron")),
    "ring": dict(data=2, sequence=dict(mode="ring", size=2)),
    "ring and ulysses": dict(sequence=dict(mode="ring_ulysses", size=4, ulysses=2)),
    "2d": dict(tensor=dict(mode="2d", size=4)),
    "2.5d": dict(tensor=dict(mode="2.5d", size=4, depth=1)),
    "3d": dict(tensor=dict(mode="3d", grid=(2, 2, 1))),
}


def planned(name: str, precision: str, accumulate: int = 1) -> Estimate:
    spec = ParallelSpec.parse(SPECS[name], 4)
    return estimate(
        lambda: build("llama-tiny", **SIZES, kv_heads=2, ffn=64),
        spec,
        batch_size=8,
        seq_len=16,
        precision=precision,
        accumulate=accumulate,
    )


def real(name: str, precision: str, accumulate: int) -> tuple[dict[tuple[Any, ...], tuple[int, float]], int, int]:
    """Collectives that a second step hands over: (kind, axes) to (calls, bytes); bytes of parameters and master weights."""
    engine = Engine(
        lambda: build("llama-tiny", **SIZES, kv_heads=2, ffn=64),
        SPECS[name],
        optimizer="adamw",
        precision=precision,
        gradient_accumulation=accumulate,
    )
    batch = torch.randint(40, (8, 16), generator=torch.Generator().manual_seed(0))

    def step() -> None:
        for part in batch.chunk(accumulate):
            engine.train_step(engine.shard_batch(part))

    step()  # ranks compare what they were given in the first one
    with record() as log:
        step()
    found: dict[tuple[Any, ...], tuple[int, float]] = {}
    for entry in log.entries:
        calls, sent = found.get((entry.kind, entry.axes), (0, 0.0))
        found[entry.kind, entry.axes] = calls + 1, sent + float(entry.bytes)
    held = sum(p.numel() * p.element_size() for p in engine.model.parameters())
    assert engine.optimizer is not None
    state = sum(t.numel() * t.element_size() for s in engine.optimizer.state.values() for t in s.values() if t.dim())
    return found, held, state


@pytest.mark.few(1)
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(("precision", "accumulate"), [("fp32", 1), ("bf16", 2)])
def test_a_real_step_moves_and_holds_what_was_planned(name: str, precision: str, accumulate: int) -> None:
    plan = planned(name, precision, accumulate)
    found, held, state = run_on_ranks(4, real, name, precision, accumulate)[0]
    expected: dict[tuple[Any, ...], tuple[int, float]] = {}
    for entry in plan.traffic:
        calls, sent = expected.get((entry.kind, entry.axes), (0, 0.0))
        expected[entry.kind, entry.axes] = calls + entry.calls, sent + entry.bytes
    assert {key: calls for key, (calls, _) in found.items()} == {key: calls for key, (calls, _) in expected.items()}
    for key, (_, sent) in found.items():
        assert expected[key][1] == pytest.approx(sent, abs=8), key  # each line of a plan is rounded to bytes
    assert (plan.memory.parameters, plan.memory.optimizer) == (held, state)
    assert (plan.memory.masters > 0) == (precision == "bf16")


def test_flops_are_those_of_the_model_shared_out() -> None:
    config = preset("gpt-small")
    serial = estimate(lambda: build(config), ParallelSpec.parse({}, 1), batch_size=4, seq_len=256)
    counted = config.flops_per_token(256) * serial.tokens
    assert counted < serial.flops < 1.1 * counted  # flash attention computes the scores again in backward
    split = estimate(lambda: build(config), ParallelSpec.parse(dict(data=2, tensor=4)), batch_size=4, seq_len=256)
    assert split.flops * 8 == serial.flops
    assert split.memory.total - WORKSPACE_BYTES < (serial.memory.total - WORKSPACE_BYTES) / 3


def test_activations_are_those_that_are_alive_at_the_peak_beside_state() -> None:
    class Once(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Linear(8, 16, bias=False)
            self.loss = torch.nn.Linear(16, 1)

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            x = torch.nn.functional.one_hot(input_ids, 8).float()
            return dict(loss=self.loss(torch.relu(self.a(x))).mean())

    found = estimate(Once, ParallelSpec.parse({}, 1), batch_size=4, seq_len=8)
    # x [4 8 8] for a's weight, relu's output [4 8 16] once for itself and the next layer; its gradient, and that of a's output
    kept, made = 4 * (4 * 8 * 8 + 4 * 8 * 16), 4 * 2 * (4 * 8 * 16)
    assert kept < found.memory.activations - WORKSPACE_BYTES < kept + made + 4096


def test_times_add_up() -> None:
    plan = planned("1d", "bf16")
    flat = Machine(
        name="flat",
        devices=2,
        memory=1,
        memory_rate=1e9,
        host=MACHINES["laptop"].host,
        flops={"bf16": 1e6},
        inside=1e3,
        between=1e2,
        latency=0.0,
        launches=Launches.of_all(0.0),
        source="made up",
    )
    took = step_times(plan, flat, "bf16")
    links = {("data",): 1e2, ("data", "tensor"): 2e2}  # both ranks of a node send to the other node
    tensor = sum(e.bytes / links.get(e.axes, 1e3) for e in plan.traffic if e.phase != "gradients")
    gradients = sum(e.bytes / 1e2 for e in plan.traffic if e.phase == "gradients")
    assert took.compute == plan.work.seconds(flat, "bf16")
    assert took.compute == pytest.approx(plan.flops / (0.86 * 1e6), rel=0.2)  # attention, which is causal, apart
    assert took.optimizer == pytest.approx((2 * 4 + 2 * 4 + 2 * 8 + 2) * plan.local_parameters / (0.82 * 1e9))
    assert (took.tensor, took.data) == (pytest.approx(tensor), pytest.approx(gradients))
    assert took.overlapped == max(took.compute + took.tensor, took.data) + took.optimizer < took.apart


def test_machines_know_where_a_group_lies() -> None:
    for name in MACHINES:
        machine = find_machine(name)
        assert machine.inside > machine.between or machine.devices == 1
    h200 = find_machine("h200x8")
    assert h200.bandwidth((0, 1, 7)) == h200.inside
    assert h200.bandwidth((7, 8)) == h200.between


@pytest.mark.parametrize(
    ("axes", "lines"),
    [
        (dict(data=1), ["   data", "   0", "   0"]),
        (dict(data=3), ["   data", "   0 1 2", "   0 1 2"]),
        (
            dict(data=1, row=2, col=2),
            ["        col", "        0 1", "row 0   0 1", "row 1   2 3"],
        ),
        (
            dict(data=2, pipe=1, row=2, col=2),
            [
                "data 0         data 1",
                "        col            col",
                "        0 1            0 1",
                "row 0   0 1    row 0   4 5",
                "row 1   2 3    row 1   6 7",
            ],
        ),
    ],
)
def test_pictures(axes: dict[str, int], lines: list[str]) -> None:
    assert mesh_picture(axes).splitlines() == lines


def test_a_large_picture_keeps_to_the_page() -> None:
    shown = mesh_picture(dict(data=64, depth=4, row=8, col=16))
    assert max(map(len, shown.splitlines())) <= 100
    assert "..." in shown and str(math.prod((64, 4, 8, 16)) - 1) in shown


def test_plan_in_words_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "plan",
        "--model",
        "gpt-tiny",
        "--parallel",
        "dict(data=2, tensor=dict(mode='2d', size=4))",
        "--report",
    ]
    assert main(words) == 0
    shown = capsys.readouterr().out
    for part in (
        "gpt-tiny, 8 sequences of 128 tokens, bf16",
        "row 1   2 3    row 1   6 7",
        "blocks.0.attn.qkv  column",
        "optimizer state",
        "gradients  all_reduce      data",
        "tensor traffic",
        "it fits",
    ):
        assert part in shown
    assert main([*words, "--json", "--machine", "a100x8"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["axes"] == dict(data=2, row=2, col=2)
    assert answer["moved_bytes"] == sum(row["bytes"] for row in answer["traffic"]) > 0
    held = answer["memory_bytes"]
    assert held["masters"] == 2 * held["parameters"] == held["optimizer"] / 2
    assert held["gradients"] in (0, held["masters"])  # the first forward may be the fullest
    assert answer["seconds"]["overlapped"] <= answer["seconds"]["apart"]


def test_one_rank_needs_no_picture_and_one_number_no_range(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "gpt-tiny", "--machine", "h200"]) == 0
    shown = capsys.readouterr().out
    assert "   data\n" not in shown and "world      1 " in shown
    assert "on h200, 1 node of 1 device (" in shown
    assert re.search(
        r"\nfits: [\d.]+ MiB of 139.00 GiB a device; [\d.]+ ms a step, [\d,]+ tokens/s, MFU \d+% on h200\n", shown
    )
    assert re.search(r"\ntogether +[\d.]+ ms  [\d,]+ tokens/s\n", shown)
    assert "TFLOP a rank, as fast as the host launches operators\n" in shown  # of a model so small


def test_a_spec_for_more_ranks_than_there_are_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    parallel = "dict(data=8, tensor=dict(mode='3d', grid=(4, 4, 4)))"
    assert main(["plan", "--model", "llama-small", "--parallel", parallel, "--batch-size", "256", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["world_size"] == 512
    assert answer["local_parameters"] < answer["parameters"] / 30


def test_memory_table_leaves_out_what_is_not_there() -> None:
    plan = planned("1d", "fp32")
    assert "master weights" not in memory_table(plan)
    assert "together" in memory_table(plan)


# -- a plan that does not fit: a failure, with a change that makes it fit and was not made already ----------------------

MODEL = ["plan", "--model", "gpt-tiny", "--seq-len", "256", "--precision", "fp32"]


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The text on standard error for a plan that does not fit."""
    assert main([*MODEL, *words]) == 1
    said = capsys.readouterr().err
    assert said.startswith("meshfold plan: it does not fit: ") and said.count("\n") == 1
    return said


def test_without_zero_too(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "--batch-size", "8", "--gpu-memory", "1MiB")
    assert "a rank holds " in said and "and a device of h200 has 1.00 MiB." in said
    assert main([*MODEL, "--batch-size", "8", "--gpu-memory", "1MiB", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["fits"] is False
    assert main([*MODEL, "--batch-size", "8"]) == 0


def test_recompute_is_told_where_it_helps_and_was_not_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert "With recompute='blocks' (--recompute blocks) it fits" in refused(
        capsys, "--batch-size", "16", "--gpu-memory", "91MiB"
    )
    said = refused(capsys, "--batch-size", "16", "--gpu-memory", "80MiB", "--recompute", "blocks")
    assert said.endswith(" With --accumulate 2 it fits\n")
    said = refused(capsys, "--batch-size", "16", "--gpu-memory", "68MiB", "--recompute", "blocks")
    assert "recompute" not in said and "Split it over more ranks, take fewer tokens at once" in said
    assert "(not enough: zero=dict(stage=3); --accumulate 16)" in said
    said = refused(capsys, "--batch-size", "16", "--parallel", "zero.gpu_memory_limit=5MB", "--recompute", "blocks")
    assert "recompute" not in said


def test_fewer_tokens_at_once_are_told_where_they_help(capsys: pytest.CaptureFixture[str]) -> None:
    """The fewest micro-steps with which it fits, beside recomputation."""
    words = ["--batch-size", "16", "--gpu-memory", "72MiB"]
    said = refused(capsys, *words)
    assert "With --accumulate " in said and said.endswith(" and --recompute blocks it fits\n")
    count = int(said.partition("With --accumulate ")[2].split()[0])
    assert main([*MODEL, *words, "--recompute", "blocks", "--accumulate", str(count)]) == 0
    capsys.readouterr()
    if count > 2:
        assert main([*MODEL, *words, "--recompute", "blocks", "--accumulate", str(count // 2)]) == 1


def test_more_microbatches_are_told_where_they_help(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--batch-size", "16", "--parallel", "pipeline=2", "--gpu-memory"]
    said = refused(capsys, *words, "78MiB")
    assert "With pipeline.microbatches=" in said
    count = said.partition("pipeline.microbatches=")[2].split()[0]
    parallel = f"dict(pipeline=dict(size=2, microbatches={count}))"
    assert main([*MODEL, "--batch-size", "16", "--gpu-memory", "78MiB", "--parallel", parallel]) == 0


def test_the_published_palm_has_a_plan_in_2_5d(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: pip install meshfold[hf]")
    parallel = "dict(tensor=dict(mode='2.5d', size=4, depth=1))"
    small = ["--set", "layers=1", "hidden=64", "heads=4", "vocab_size=256"]
    words = ["plan", "--model", "palm-8b", *small, "--seq-len", "16", "--parallel", parallel]
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["world_size"] == 4
    assert main(["plan", "--model", "palm-8x"]) == 1
    assert "Did you mean 'palm-8b'?" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "zero", "gpu", "fits"),
    [
        ("palm-16b", "dict(stage=3, regime='B')", 24, True),
        ("palm-16b", "dict(stage=3, regime='C')", 24, True),
        ("palm-16b", "dict(stage=3)", 24, False),  # 200 GiB of state: more than GPU and host have together
        ("palm-1b", "dict(stage=3)", 6, True),
    ],
)
def test_published_palms_fit_the_gpus_of_the_published_chart(
    model: str, zero: str, gpu: int, fits: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """On an H200 of which a part is used, with 125 GiB of host memory."""
    pytest.importorskip("transformers", reason="transformers is not installed: pip install meshfold[hf]")
    sizes = ["--batch-size", "2", "--seq-len", "1024", "--precision", "bf16", "--recompute", "blocks"]
    limits = ["--machine", "h200", "--gpu-memory", f"{gpu}GiB", "--host-memory", "125GiB"]
    code = main(["plan", "--model", model, *sizes, *limits, "--parallel", f"dict(zero={zero})", "--json"])
    assert code == (0 if fits else 1)
    found = json.loads(capsys.readouterr().out)
    assert (found["memory_bytes"]["total"] <= gpu * 2**30) == fits
    if fits:
        assert 0 < found["memory_bytes"]["host"] <= 125 * 2**30


def test_a_folding_model_is_planned_over_residues_and_gpus(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def tiny() -> FoldingOutline:
        return FoldingOutline(name="folding:tiny", stack=EsmFoldStack(1, 8, 8, 4, 4), recycled_channels=8)

    monkeypatch.setitem(PRESETS, "folding:tiny", tiny)
    plan = ["plan", "--model", "folding:tiny", "--residues", "16"]
    assert main([*plan, "--gpus", "2,1", "--gpu-memory", "1GiB", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [(one["residues"], one["gpus"], one["fits"]) for one in answer["options"]] == [(16, 1, True), (16, 2, True)]
    assert main([*plan, "--gpus", "1", "--gpu-memory", "30KiB"]) == 1
    caught = capsys.readouterr()
    assert " 16     1    no " in caught.out and "nothing fits: 16 residues on one rank need 0.03 GiB" in caught.err
    refusals = {
        ("--parallel", "data=2"): "--parallel is what the plan of a folding model answers",
        ("--ranks", "4"): "--ranks is not for folding models",
        ("--residues", "12,x"): "'12,x' is not a list of whole numbers from 1 up",
        ("--model", "folding:esmfld"): "no folding model 'folding:esmfld'. Did you mean 'folding:esmfold'?",
        ("--model", "gpt-tiny"): "--residues is for folding models, and --model is gpt-tiny",
    }
    for words, message in refusals.items():
        try:
            code = main([*plan, *words])
        except SystemExit as left:
            code = int(left.code or 0)
        assert code != 0
        assert message in capsys.readouterr().err


def test_a_power_cap_slows_a_plan_and_a_wrong_one_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", "llama-1b", "--machine", "h100", "--batch-size", "4", "--seq-len", "2048", "--json"]
    seconds = []
    for cap in ([], ["--power-cap", "350"]):
        assert main([*words, *cap]) == 0
        seconds.append(json.loads(capsys.readouterr().out)["speed"]["seconds"])
    assert 1.1 * seconds[0] < seconds[1] < 1.4 * seconds[0]
    assert main([*words, "--power-cap", "900"]) == 1
    assert "and at most 700 W" in capsys.readouterr().err
