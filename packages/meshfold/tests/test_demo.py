"""The demo: what a machine is shown, and a short one from beginning to end."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from meshfold.cli import main
from meshfold.train import demo, plots
from meshfold.train.metrics import MetricsFile, read_metrics


@pytest.mark.parametrize(
    ("gpus", "ranks", "device", "data"),
    [
        (0, 8, "cpu", 2),
        (1, 8, "cpu", 2),
        (3, 8, "cpu", 2),
        (4, 4, "cuda", 1),
        (7, 4, "cuda", 1),
        (8, 8, "cuda", 2),
        (16, 8, "cuda", 2),
    ],
)
def test_scenes(gpus: int, ranks: int, device: str, data: int) -> None:
    here = demo.scene(gpus)
    assert (here.ranks, here.device, here.parallel.get("data", 1)) == (ranks, device, data)
    assert here.parallel["tensor"] == dict(mode="2d", size=4)
    assert ("GPU" in here.why) and (("NCCL" in here.why) == (device == "cuda"))


OUTPUT = ("checkpoint/model.safetensors", "serial/checkpoint/state.json", "metrics.jsonl", "settings.json")


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def some_output(folder: Path) -> None:
    for name in (*OUTPUT, "tokens/a.npy", "mine.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")


def test_a_new_demo_clears_what_an_old_one_left_and_nothing_else(tmp_path: Path) -> None:
    some_output(tmp_path)
    assert {path.relative_to(tmp_path).as_posix() for path in demo.foreign_files(tmp_path)} == {*OUTPUT}
    demo.list_files(tmp_path)
    assert demo.foreign_files(tmp_path) == []
    for out in (tmp_path, tmp_path / "not there"):
        demo.remove_files(out)
        assert demo.foreign_files(out) == []
    assert files(tmp_path) == {"tokens/a.npy", "mine.txt", ".demo.json"}
    assert not (tmp_path / "checkpoint").exists() and not (tmp_path / "serial").exists()
    demo.list_files(tmp_path / "not there")
    assert not (tmp_path / "not there").exists()


@pytest.mark.parametrize(
    ("what", "theirs"),
    [
        ("another file", "out/checkpoint/thesis.tex"),
        ("trained on", "out/checkpoint/model.safetensors"),
        ("replaced by a link", "elsewhere/model.safetensors"),
        ("an odd list", "out/checkpoint/model.safetensors"),
        ("no list", "out/checkpoint/model.safetensors"),
    ],
)
def test_a_demo_removes_nothing_that_is_not_a_demos(
    what: str, theirs: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Not even what it knows by name: the user may have gone on from the demo's checkpoint, or trained where no demo was."""
    out = tmp_path / "out"
    some_output(out)
    weights = out / "checkpoint" / "model.safetensors"
    if what != "no list":
        demo.list_files(out)
    if what == "another file":
        (out / "checkpoint" / "thesis.tex").touch()
    elif what == "trained on":  # in as many bytes, at the same time
        was = weights.stat()
        weights.with_name("new").write_text("y")
        weights.with_name("new").replace(weights)
        os.utime(weights, ns=(was.st_atime_ns, was.st_mtime_ns))
    elif what == "replaced by a link":
        (out / "checkpoint").rename(tmp_path / "elsewhere")
        (out / "checkpoint").symlink_to(tmp_path / "elsewhere")
    elif what == "an odd list":
        (out / ".demo.json").write_text("[]")
    before = files(tmp_path) | {theirs}
    assert main(["demo", "--out", str(out)]) != 0
    said = capfd.readouterr().err
    assert f"--out {str(out)!r}: {out}/checkpoint" in said and "choose another --out, or move it away" in said
    assert files(tmp_path) == before
    demo.remove_files(out)  # nor where nobody has looked first
    assert theirs in files(tmp_path)


def test_a_comparison_in_words() -> None:
    found = demo.Comparison(steps=(1, 2), parallel=(5.0, 4.5), serial=(5.25, 4.5))
    assert found.largest_difference == 0.25
    assert str(found) == (
        "loss after 2 steps: 4.500000 in parallel, 4.500000 on one process; largest difference in these 2 steps 2.5e-01"
    )


def test_dots_lie_on_the_line_that_has_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="needs meshfold[plot]")
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, path: (drawn.append(self), save(self, path)))
    falling = [(step, 6.0 * 0.97**step) for step in range(1, 101)]
    plots.plot_loss(tmp_path / "loss.png", {"parallel": falling, "serial": falling[:20]}, "both")
    plots.plot_loss(tmp_path / "short.png", {"training": falling[:4]}, "four steps")
    axes, short = drawn[0].axes[0], drawn[1].axes[0]
    lines = {str(line.get_label()): line for line in axes.lines}
    assert list(lines) == ["parallel", "parallel, running average", "serial"]
    assert lines["parallel"].get_ydata().tolist() == [loss for _, loss in falling]
    assert lines["serial"].get_ydata().tolist() == lines["parallel"].get_ydata()[:20].tolist()
    assert lines["parallel, running average"].get_ydata()[50] > falling[50][1]
    assert all(float(tick).is_integer() for tick in short.get_xticks())


@pytest.mark.parametrize("ranks", [4, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("warm_commands")
def test_a_short_demo(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """That of a machine without GPUs, and its tensor part alone."""
    here = demo.scene(0)
    assert here.ranks == 8 and "8 processes share the CPU" in here.why
    if ranks == 4:
        here = replace(here, parallel=dict(tensor=demo.TENSOR))
    monkeypatch.setattr(demo, "scene", lambda gpus: here)
    monkeypatch.chdir(tmp_path)
    words = ["demo", "--steps", "3", "--serial-steps", "2", "--sample-tokens", "4"]
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "sample.txt").write_text("of the demo before")
    demo.list_files(tmp_path / "demo")
    code = main(words)
    printed, errors = capfd.readouterr()
    assert code == 0, errors
    out = tmp_path / "demo"
    for part in (here.why, "mode 2d places", "step 3/3  loss", "tokens/s", "MiB", "def "):
        assert part in printed
    for name in ("checkpoint/state.json", "metrics.jsonl", "sample.txt"):
        assert (out / name).stat().st_size
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    losses = {
        folder: [row["loss"] for row in read_metrics(out / folder / "metrics.jsonl") if "loss" in row]
        for folder in ("", "serial")
    }
    assert (len(losses[""]), len(losses["serial"])) == (3, 2)
    assert losses["serial"] == pytest.approx(losses[""][:2], abs=1e-4)
    assert demo.foreign_files(out) == []  # so that the next may begin
    largest = max(abs(a - b) for a, b in zip(losses[""], losses["serial"], strict=False))
    assert f"largest difference in these 2 steps {largest:.1e}" in printed


def test_metrics_survive_a_run_that_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path)
    for step in range(1, 5):
        first.add(step=step, loss=1.0 / step)
    with path.open("a") as file:
        file.write('{"step": 5, "lo')  # cut off
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3, 4]
    again = MetricsFile(path, keep=2)
    again.add(step=3, loss=7.0)
    assert [row["loss"] for row in read_metrics(path)] == [1.0, 0.5, 7.0]
    assert MetricsFile(path, write=False).rows == []
