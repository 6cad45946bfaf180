"""Which checkpoints of a run stay: the newest few that are complete, found again by --resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshfold.cli import main
from meshfold.engine import Engine
from meshfold.engine.checkpoints.checkpoint import Checkpoint
from meshfold.models import build
from meshfold.train.run_folder import KeptCheckpoints


def test_the_command_keeps_the_newest_few(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("All work and no play. " * 200)
    out = tmp_path / "out"
    words = [
        "train",
        "--data",
        str(tmp_path / "text.txt"),
        "--out",
        str(out),
        "--no-plan",
        "--save-every",
        "1",
    ]
    words += ["--seq-len", "8", "--batch-size", "1", "--steps", "9"]

    def there() -> list[str]:
        return sorted(path.name for path in out.glob("checkpoint*/step-*"))

    def losses() -> dict[int, float]:
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        return {row["step"]: row["loss"] for row in rows if "loss" in row}

    assert main([*words, "--resume", "auto", "--stop-after", "2"]) == 0
    assert [path.name for path in out.glob("checkpoint*")] == ["checkpoint"]  # one, unless more are asked for
    (out / ".checkpoint.old").mkdir()  # left by a death at the end of the last save
    assert main([*words, "--resume", "auto", "--stop-after", "2"]) == 0
    assert "nothing to do: the checkpoint is at step 2" in capfd.readouterr().out
    assert not [*out.glob(".checkpoint*")]
    assert main([*words, "--resume", "auto", "--stop-after", "3", "--keep", "2"]) == 0
    assert f"resuming from step 2 of {out}/checkpoint\n" in capfd.readouterr().out
    assert (there(), Checkpoint(out / "checkpoint").state["step"]) == (["step-00000003"], 2)  # two in all
    assert main([*words, "--resume", "auto", "--stop-after", "5", "--save-asynchronously"]) == 0
    assert there() == ["step-00000004", "step-00000005"]  # the folder remembers that there are two
    assert not (out / "checkpoint").exists()
    first = losses()
    (out / "checkpoints/step-00000005/state.json").write_text("{")
    capfd.readouterr()
    assert main([*words, "--resume", "auto", "--stop-after", "5"]) == 0
    said = capfd.readouterr().out
    assert f"warning: {out}/checkpoints/step-00000005 is not complete, and is passed over" in said
    assert f"resuming from step 4 of {out}/checkpoints/step-00000004" in said
    assert losses() == first  # the lost step again
    for path in out.glob("checkpoints/step-*"):
        (path / "state.json").write_text("{")
    assert main([*words, "--resume", "auto"]) != 0  # not from the start: a person has to look at it
    assert "step-00000005" in capfd.readouterr().err
    assert main(words) != 0
    assert "already exists: resume it with --resume" in capfd.readouterr().err


def test_older_checkpoints_stay_until_a_newer_one_is_complete(tmp_path: Path) -> None:
    kept = KeptCheckpoints(tmp_path, 2)
    engine = Engine(lambda: build("gpt-tiny"), optimizer=dict(name="sgd", lr=1e-2))
    assert (kept.to_go_on_from(), kept.there()) == (None, [])
    for step in (1, 2):
        engine.save(kept.place(step))
    kept.place(3).mkdir()  # nothing in it yet
    (tmp_path / "checkpoints" / ".step-00000003.writing").mkdir()
    assert kept.prune() == []
    assert (kept.to_go_on_from(), kept.damaged()) == (kept.place(2), [kept.place(3)])
    engine.save(kept.place(4))
    assert kept.prune() == [kept.place(1)]
    kept.place(4).rename(kept.place(4).with_name(".step-00000004.old"))  # a death between two renames
    assert (kept.there()[:2], kept.to_go_on_from()) == ([kept.place(4), kept.place(3)], kept.place(4))
    kept.place(4).with_name(".step-00000004.old").rename(kept.place(4))
    one = KeptCheckpoints(tmp_path, 1)
    engine.runner.steps = 5
    engine.save(one.place(5))
    assert one.to_go_on_from() == tmp_path / "checkpoint"
    assert one.prune() == [kept.place(4), kept.place(2)]
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-00000003"]
    engine.close()
