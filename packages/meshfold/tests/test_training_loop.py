"""The loop of ``meshfold train`` leaves nothing open, whatever ends it."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from meshfold.checkpoint.tensors import TensorWriter
from meshfold.cli import main
from meshfold.cli.arguments import read_parallel
from meshfold.engine import Engine
from meshfold.engine.checkpoints.checkpoint import Checkpoint
from meshfold.mesh import CollectiveError, processes
from meshfold.mesh.recording import flight_recorder
from meshfold.mesh.testing import close_pools, run_on_ranks
from meshfold.mesh.watchdog import diagnosis
from meshfold.train import loop
from meshfold.train.progress import Progress
from meshfold.train.settings import TrainSettings

SECONDS = 0.3  # that the disk takes for a file


class Hole(Exception):
    """Of the tests."""


class Breaks(Progress):
    """Raises in a step."""

    def __init__(self, at: int) -> None:
        self.at, self.closed = at, False

    def step(self, step: int, numbers: dict[str, float]) -> None:
        if step == self.at:
            raise Hole("a hole in the data")

    def close(self) -> None:
        self.closed = True


class Kept:
    """A tracker that remembers."""

    def __init__(self) -> None:
        self.closed = False

    def add(self, step: int, numbers: Any) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def settings_in(folder: Path, **changes: Any) -> TrainSettings:
    text = folder / "text.txt"
    if not text.exists():
        text.write_text("".join(f"sentence {number} of the text to train on. " for number in range(200)))
    small: dict[str, Any] = dict(hidden=16, layers=1, heads=2)
    settings: dict[str, Any] = dict(
        data=str(text),
        out=str(folder / "out"),
        model="gpt-tiny",
        changes=small,
        batch_size=4,
        seq_len=16,
        steps=6,
        device="cpu",
    )
    return TrainSettings(**{**settings, **changes})


def slow_disk(close: Any = TensorWriter.close) -> Any:
    def slow(self: TensorWriter) -> None:
        time.sleep(SECONDS)
        close(self)

    return slow


def test_an_error_closes_all_and_the_save_under_way_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines: list[Engine] = []

    def keeping(*given: Any, **named: Any) -> Engine:
        engines.append(Engine(*given, **named))
        return engines[0]

    tracker = Kept()
    monkeypatch.setattr(loop, "Engine", keeping)
    monkeypatch.setattr(loop, "open_trackers", lambda *given, **named: [tracker])
    monkeypatch.setattr(TensorWriter, "close", slow_disk())
    settings = settings_in(tmp_path, save_every=2, save_asynchronously=True)
    progress = Breaks(at=3)
    with pytest.raises(Hole):
        loop.train(settings, loop.open_inputs(settings, progress), progress)
    assert progress.closed and tracker.closed
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("save ")]
    assert engines[0].mesh.is_closed
    assert not engines[0].saver._buffers
    found = Checkpoint(tmp_path / "out" / "checkpoint")
    found.verify()
    assert found.state["step"] == 2
    assert sorted(path.name for path in (tmp_path / "out").glob("*checkpoint*")) == ["checkpoint"]

    monkeypatch.undo()
    again = settings_in(tmp_path, resume=True)
    rows = loop.train(again, loop.open_inputs(again, Progress()), Progress())
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5, 6]


def one_rank_fails(folder: str) -> tuple[str, float, bool]:
    """What a rank's run ends with, after how many seconds, and whether its watchdog is still at work."""
    diagnosis._BEAT_S = 0.1  # of this pool's ranks, which end after the test
    settings = settings_in(Path(folder), parallel=dict(data=2), watchdog=300.0)
    inputs = loop.open_inputs(settings, Progress())
    began = time.monotonic()
    # Rank 0 alone writes metrics, say, and finds its disk full.
    try:
        loop.train(settings, inputs, Breaks(at=3) if dist.get_rank() == 0 else Progress())
    except (Hole, CollectiveError) as error:
        return (
            f"{type(error).__name__}: {error}",
            time.monotonic() - began,
            flight_recorder.active is not None,
        )
    return "no error", time.monotonic() - began, flight_recorder.active is not None


def test_what_fails_in_the_loop_on_one_rank_ends_all_and_no_watchdog_stays(tmp_path: Path) -> None:
    settings_in(tmp_path)
    close_pools()  # ranks of other tests have had errors of their own
    try:
        (first, *_), (other, *_) = found = run_on_ranks(2, one_rank_fails, str(tmp_path))
    finally:
        close_pools()  # its connections are broken now
    assert first == "Hole: a hole in the data"
    assert other.startswith("CollectiveError: rank 0 failed in step 3, so the others end: Hole: a hole in the data\n")
    assert all(seconds < 60.0 for _, seconds, _ in found)
    assert not any(watched for *_, watched in found)


def test_linear_layers_in_fp8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("one line of text, " * 200)
    words = [
        "train",
        "--data",
        str(tmp_path / "text.txt"),
        "--model",
        "llama-tiny",
        "--steps",
        "2",
        "--batch-size",
        "2",
    ]
    words += ["--seq-len", "32", "--fp8", "rowwise", "--out", str(tmp_path / "run"), "--device", "cpu"]
    assert main([*words, "--precision", "bf16"]) == 0
    said = capsys.readouterr().out
    assert "fp8 (rowwise): blocks.0.attn.qkv and 7 more\nbf16: head: keep='head'\n" in said
    assert "step 2/2" in said
    assert main([*words, "--out", str(tmp_path / "other")]) == 2
    assert "write --fp8 rowwise --precision bf16" in capsys.readouterr().err


def test_biases_of_routers_move_each_step_and_a_resumed_run_goes_on_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "_draw", lambda *given: None)
    small: dict[str, Any] = dict(
        hidden=16, layers=1, heads=2, kv_heads=1, ffn=16, experts=4, router="sigmoid", balance=0.0
    )

    def biases(name: str, *runs: dict[str, Any]) -> torch.Tensor:
        (tmp_path / name).mkdir()
        short: dict[str, Any] = dict(steps=4, bias_rate=0.01, precision="fp64", eval_batches=1)
        for run in runs:
            settings = settings_in(tmp_path / name, model="llama-moe-tiny", changes=small, **short, **run)
            loop.train(settings, loop.open_inputs(settings, Progress()), Progress())
        found = Checkpoint(tmp_path / name / "out" / "checkpoint").model
        [bias] = [value for key, value in found.items() if key.endswith("selection_bias")]
        return bias

    whole = biases("whole", {})
    moves = (whole / 0.01).round()  # a step moves each by one rate, up or down
    assert torch.allclose(whole, moves * 0.01) and 2 <= moves.abs().max() <= 4
    assert torch.equal(whole, biases("halves", dict(stop_after=2), dict(resume=True)))


@pytest.mark.parametrize(("rows", "by_tokens"), [(4096, True), (8, False)])
def test_ranks_compute_attention_as_the_plan_says_is_faster(
    rows: int, by_tokens: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``overlap="auto"``: the batch is known here, so the choice is that of ``meshfold plan``."""
    tokens = tmp_path / "tokens.bin"
    np.random.default_rng(0).integers(0, 64, 400_000, dtype=np.uint16).tofile(tokens)
    started: list[list[str]] = []
    monkeypatch.setattr(processes, "launch", lambda program, *_, **__: started.append(program) or 0)
    tensor = dict(mode="1d", size=4, overlap="auto")
    model = [
        "--model",
        "llama-tiny",
        "--set",
        "hidden=512",
        "layers=2",
        "heads=8",
        "kv_heads=2",
        "ffn=512",
        "vocab_size=64",
    ]
    work = [*model, "--parallel", f"dict(tensor={tensor})", "--batch-size", str(rows), "--seq-len", "64"]
    work += ["--precision", "bf16"]
    assert main(["train", *work, "--data", str(tokens), "--out", str(tmp_path / "out"), "--device", "cpu"]) == 0
    said = capsys.readouterr()
    assert f"overlap='auto' chose attention by {'tokens' if by_tokens else 'heads'}" in said.out + said.err
    [program] = started
    written = [program[i + 1] for i, word in enumerate(program) if word == "--parallel"]
    chosen = read_parallel([written[-1]])
    assert chosen == dict(tensor=tensor | ({"attention": "tokens"} if by_tokens else {}))
    assert main(["plan", *work, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["attention"]["by_tokens"] == by_tokens
