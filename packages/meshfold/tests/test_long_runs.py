"""What a run of weeks meets: requests to stop, restarts, other numbers of ranks, several nodes, and people who look on."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from meshfold.cli import main
from meshfold.engine.long_runs.stopping import resize_data_axis
from meshfold.engine.world import crossing, warn_of_crossing
from meshfold.mesh import Environment, LaunchError, Mesh, SpecError
from meshfold.mesh.processes.launcher import launch_node
from meshfold.models import build
from meshfold.train.metrics import check_trackers, flops_per_token, read_metrics
from meshfold.train.progress import Lines, line

SMALL = [
    "--model",
    "gpt-tiny",
    "--set",
    "hidden=16",
    "layers=1",
    "heads=2",
    "--seq-len",
    "16",
    "--batch-size",
    "4",
]
LIMIT_S = 120.0
pytestmark = pytest.mark.usefixtures("warm_commands")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("".join(f"sentence {number} of the text to train on. " for number in range(200)))
    return file


def losses(out: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(out / "metrics.jsonl") if "loss" in row]


def started(folder: Path, *words: object, log: str = "log.txt") -> subprocess.Popen[bytes]:
    """The command, in a process group of its own, writing into a file."""
    with (folder / log).open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "meshfold.cli", *map(str, words)],
            cwd=folder,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )


def wait_for_steps(out: Path, steps: int, *jobs: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while len(losses(out)) < steps:
        assert time.monotonic() < deadline and all(job.poll() is None for job in jobs), "it did not come so far"
        time.sleep(0.02)


def free_port() -> int:
    """A port that nobody listens on, and that the system gives to nobody who asks for any."""
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def ranks_in(work: Path) -> list[int]:
    """The processes of the ranks that were started in a folder."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            there = (folder / "cwd").readlink()
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if there == work and b"_bootstrap" in command:
            found.append(int(folder.name))
    return sorted(found)


def test_sigterm_ends_with_a_checkpoint_that_fewer_ranks_go_on_from(
    text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "--data", str(text), *SMALL, "--no-plan", "--steps", "100000", "--parallel", "data=2"]
    job = started(tmp_path, *words, "--out", "run", "--resume", "auto")
    out = tmp_path / "run"
    wait_for_steps(out, 3, job)
    job.send_signal(signal.SIGTERM)  # to the launcher alone
    assert job.wait(LIMIT_S) == 75
    log = (tmp_path / "log.txt").read_text()
    done = len(losses(out))
    assert 3 <= done < 100_000
    assert f"stopped on request after step {done}, checkpoint: run/checkpoint; resume with --resume" in log
    assert "Traceback" not in log and "exited with" not in log
    assert json.loads((out / "checkpoint" / "state.json").read_text())["step"] == done

    # On one rank, with the same words; that data shrinks is said. And without ever having stopped, for comparison.
    more = ["--stop-after", str(done + 3)]
    assert main([*words, *more, "--out", str(out), "--resume", "auto", "--ranks", "1"]) == 0
    said = capfd.readouterr().out
    assert "the world size is 1 now: data=1 in place of 2; the global batch stays as it is" in said
    assert f"resuming from step {done} " in said
    assert main([*words, *more, "--out", str(tmp_path / "whole"), "--ranks", "2", "--parallel", "dict()"]) == 0
    assert losses(out) == pytest.approx(losses(tmp_path / "whole"), abs=1e-5)


def test_a_process_alone_stops_too_and_a_second_process_asks_for_a_new_folder(text: Path, tmp_path: Path) -> None:
    words = ["train", "--data", str(text), *SMALL, "--no-plan", "--steps", "5000", "--out", "run"]
    job = started(tmp_path, *words)
    wait_for_steps(tmp_path / "run", 2, job)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(LIMIT_S) == 75
    assert (tmp_path / "run" / "checkpoint" / "state.json").exists()


def test_resume_auto_starts_where_there_is_nothing_and_refuses_what_is_damaged(
    text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [
        "train",
        "--data",
        str(text),
        *SMALL,
        "--no-plan",
        "--steps",
        "2",
        "--out",
        str(tmp_path / "run"),
    ]
    assert main([*words, "--resume", "auto"]) == 0
    assert len(losses(tmp_path / "run")) == 2
    (tmp_path / "run" / "checkpoint" / "state.json").unlink()
    assert main([*words, "--resume", "auto"]) == 1
    assert "is no complete checkpoint" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("parallel", "ranks", "data"),
    [
        (dict(data=4, tensor=2), 6, 3),
        (dict(data=1, tensor=2), 8, 4),
        (dict(data=2, pipeline=2, tensor=dict(mode="2d", size=4)), 8, 1),
    ],
    ids=["shrinks", "grows", "to one"],
)
def test_data_follows_the_ranks(parallel: dict[str, Any], ranks: int, data: int) -> None:
    fitted, said = resize_data_axis(parallel, ranks)
    assert fitted == {**parallel, "data": data}
    assert f"data={data} in place of {parallel['data']}" in said


def test_a_spec_that_fits_stays_and_one_that_cannot_fit_says_how_many_ranks_can() -> None:
    for parallel in (dict(data=2, tensor=2), dict(tensor=4)):
        assert resize_data_axis(parallel, 4) == (parallel, "")
    with pytest.raises(SpecError, match=r"on 7 ranks: .* need a multiple of 4 ranks. Start 4, or give another"):
        resize_data_axis(dict(data=4, tensor=4), 7)


# -- several nodes ----------------------------------------------------------------------------------------------------


def test_a_restart_goes_on_with_the_same_losses(text: Path, tmp_path: Path) -> None:
    """One node, whose agent starts all ranks anew when one is killed."""
    train = ["train", "--data", str(text), *SMALL, "--no-plan", "--steps", "30"]
    job = started(
        tmp_path,
        "run",
        "--ranks",
        2,
        "--restarts",
        1,
        "-m",
        "meshfold.cli",
        *train,
        "--parallel",
        "data=2",
        "--out",
        "run",
        "--save-every",
        1,
        "--resume",
        "auto",
    )
    wait_for_steps(tmp_path / "run", 4, job)
    os.kill(ranks_in(tmp_path)[1], signal.SIGKILL)
    assert job.wait(LIMIT_S) == 0, (tmp_path / "log.txt").read_text()[-3000:]
    assert "resuming from step " in (tmp_path / "log.txt").read_text()
    assert main([*train, "--out", str(tmp_path / "whole")]) == 0
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), abs=1e-5)


@pytest.mark.slow  # two agents and four ranks, twice
def test_two_nodes_meet_and_meet_again_after_a_kill(text: Path, tmp_path: Path) -> None:
    train = ["train", "--data", str(text), *SMALL, "--no-plan", "--steps", "40"]
    node = [
        "run",
        "--ranks",
        2,
        "--nodes",
        2,
        "--rendezvous",
        f"127.0.0.1:{free_port()}",
        "--restarts",
        3,
        "-m",
        "meshfold.cli",
        *train,
        "--parallel",
        "data=2",
        "tensor=2",
        "--out",
        tmp_path / "run",
        "--save-every",
        1,
        "--resume",
        "auto",
    ]
    folders = [tmp_path / f"node{number}" for number in range(2)]
    for folder in folders:
        folder.mkdir()
    jobs = [started(folder, *node) for folder in folders]
    try:
        wait_for_steps(tmp_path / "run", 4, *jobs)
        os.kill(ranks_in(folders[1])[-1], signal.SIGKILL)  # not rank 0, which serves the store
        codes = [job.wait(2 * LIMIT_S) for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    logs = [(folder / "log.txt").read_text() for folder in folders]
    assert codes == [0, 0], logs
    assert any("is gone" in log for log in logs) and any("resuming from step " in log for log in logs)
    assert main([*train, "--out", str(tmp_path / "whole")]) == 0
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), abs=1e-5)


def test_an_agent_shows_the_traceback_and_the_code(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("import os\nif os.environ['RANK'] == '1':\n    raise ValueError('not today')\n")
    job = started(tmp_path, "run", "--ranks", 2, "--rendezvous", "localhost:0", "fails.py")
    assert job.wait(LIMIT_S) == 1
    log = (tmp_path / "log.txt").read_text()
    assert "rank 1 of 2 raised; the other ranks were ended." in log and "ValueError: not today" in log


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(nodes=(2, 1)), "the least and the largest number of nodes"),
        (dict(rendezvous="node1"), "write host:port, such as node1:29500"),
        (dict(nodes=(2, 2), rendezvous="node1:0"), "several nodes need a port that all of them know"),
        (dict(restarts=-1), "restarts=-1"),
    ],
    ids=["nodes", "no port", "any port", "restarts"],
)
def test_nodes_that_cannot_meet(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        launch_node([__file__], 2, **settings)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nodes", "2"], "--nodes 2 without --rendezvous: say where they meet"),
        (["--nodes", "two", "--rendezvous", "a:1"], "--nodes 'two': write a number"),
        (["--restarts", "1", "--port", "5000"], "--port goes with local ranks alone"),
    ],
    ids=["no place", "no number", "port"],
)
def test_what_run_refuses(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--ranks", "2", *words, __file__]) == 2
    assert message in capsys.readouterr().err


def test_tensor_axes_that_leave_their_node_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    mesh = Mesh(dict(data=2, row=2, col=4), rank=0)
    assert crossing(mesh, ("row", "col"), 8) == []
    assert crossing(mesh, ("row", "col"), 4) == ["row"]
    assert crossing(mesh, ("row", "col"), 2) == ["row", "col"]
    assert crossing(mesh, ("row", "col"), 6) == ["row", "col"]
    here = Environment(rank=0, world_size=16, local_world_size=4, source="torchrun")
    warn_of_crossing(mesh, ("row", "col"), here)
    assert "a node has 4 ranks, and the tensor axes row go from node to node" in capsys.readouterr().err
    warn_of_crossing(mesh, ("row", "col"), Environment(world_size=16, local_world_size=8, source="torchrun"))
    assert capsys.readouterr().err == ""


# -- people who look on -----------------------------------------------------------------------------------------------


def test_mfu_counts_what_multiplies() -> None:
    """gpt-tiny by hand: each block has 12 h² weights and 13 h of biases and norms; the tied table is the output's matmul."""
    model = build("gpt-tiny")
    h, layers, vocabulary = model.config.hidden, model.config.layers, model.config.vocab_size
    blocks = sum(p.numel() for p in model.blocks.parameters())
    rest = sum(p.numel() for p in model.parameters()) - blocks - vocabulary * h
    positions = model.config.max_positions * h
    counted = flops_per_token(lambda: build("gpt-tiny"), 64)
    wanted = 6 * (blocks + vocabulary * h + rest - positions) + 12 * layers * h * 64
    assert counted == wanted
    assert blocks > 12 * h * h * layers


def test_mfu_counts_the_heads_there_are_and_not_the_width_of_the_stream() -> None:
    narrow, wide = (
        build("gpt-tiny", hidden=32, heads=4, head_dim=head_dim) for head_dim in (8, 32)
    )  # the second attends with 4 times the stream's width

    def attention(model: torch.nn.Module, length: int) -> float:
        return flops_per_token(lambda: model, length) - flops_per_token(lambda: model, 0)

    assert attention(wide, 64) == 4 * attention(narrow, 64) > 0
    for model in (narrow, wide):
        counted = model.config.flops_per_token(64) - model.config.flops_per_token(0)
        assert attention(model, 64) == counted


def test_progress_shows_mfu_and_what_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from meshfold.train import progress as module

    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    numbers = dict(loss=2.5, tokens_per_s=1234.0, memory_bytes=2.0**30, mfu=0.417)
    assert line(1, 9, numbers) == "step 1/9  loss 2.5000  1,234 tokens/s  MFU 41.7%  1,024 MiB"
    lines = Lines(1001)
    for step in (1, 2):
        lines.step(step, numbers)
        now[0] += 40.0
    assert [said.rpartition("  ")[2] for said in capsys.readouterr().out.splitlines()] == [
        "1,024 MiB",
        "11:06:00 left",
    ]


def test_tensorboard_gets_every_number(text: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="an extra of meshfold: pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    words = [
        "train",
        "--data",
        str(text),
        *SMALL,
        "--no-plan",
        "--out",
        str(tmp_path / "run"),
        "--metrics",
        "tensorboard",
    ]
    assert main([*words, "--steps", "3", "--peak-tflops", "0.1"]) == 0
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    seen = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    seen.Reload()
    for name in ("loss", "lr", "grad_norm", "tokens_per_s", "mfu"):
        wanted = [(row["step"], row[name]) for row in rows if name in row]
        found = [(event.step, event.value) for event in seen.Scalars(name)]
        assert [step for step, _ in found] == [1, 2, 3]
        assert [value for _, value in found] == pytest.approx([value for _, value in wanted], rel=1e-6)
    assert [event.step for event in seen.Scalars("validation_loss")] == [3]


def test_wandb_goes_on_with_its_run(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a module with the three calls that are made: what each is given."""
    begun: list[dict[str, Any]] = []
    logged: list[tuple[int, float]] = []

    class Run:
        id = "abc"

        def log(self, numbers: dict[str, Any], step: int) -> None:
            logged.append((step, numbers.get("loss", -1.0)))

        def finish(self) -> None:
            logged.append((-1, 0.0))

    def init(**given: Any) -> Run:
        begun.append(given)
        return Run()

    wandb = types.ModuleType("wandb")
    wandb.init = init  # type: ignore[attr-defined]
    wandb.setup = lambda: types.SimpleNamespace(settings=types.SimpleNamespace(project=None))  # type: ignore[attr-defined]
    wandb.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    words = [
        "train",
        "--data",
        str(text),
        *SMALL,
        "--no-plan",
        "--out",
        str(tmp_path / "run"),
        "--metrics",
        "wandb",
    ]
    assert main([*words, "--steps", "1"]) == 0
    assert main([*words, "--steps", "2", "--resume"]) == 0
    assert [(given["project"], given["id"]) for given in begun] == [("meshfold", None), ("meshfold", "abc")]
    assert begun[0]["config"]["lr"] == 3e-4
    assert [step for step, _ in logged] == [1, 1, -1, 2, 2, -1]


@pytest.mark.parametrize(
    ("name", "message"),
    [("tensorbord", "Did you mean 'tensorboard'"), ("wandb", "wandb is not installed: pip install wandb")],
)
def test_a_tracker_that_is_not_there(name: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    with pytest.raises(SpecError, match=message):
        check_trackers([name])


def test_no_peak_is_known_of_a_cpu() -> None:
    from meshfold.train.metrics import peak_flops

    assert peak_flops(torch.device("cpu"), "fp32") is None
