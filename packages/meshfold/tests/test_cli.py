"""The command ``meshfold`` as a person types it: what works, and one sentence for what does not."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from meshfold.cli import COMMANDS, main, write_what_it_can
from meshfold.cli.arguments import Failure, read_parallel
from meshfold.cli.train_arguments import OPTIMIZER_NAMES, configure, settings_of, words_of
from meshfold.engine.optimizers import OPTIMIZERS
from meshfold.planner.optimizer_state import MOMENTS
from meshfold.train.metrics import read_metrics

Run = Callable[..., subprocess.CompletedProcess[str]]
TRAIN = ["train", "--data", "t", "--out", "x"]
TINY = [
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


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A folder with some text."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(4):
        (folder / f"{number}.txt").write_text(f"number {number} of the documents to train on. " * 20)
    return folder


@pytest.fixture
def meshfold(tmp_path: Path, warm_python: str) -> Run:
    """Runs a command in a process of its own, in a folder of its own."""

    def run(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [warm_python, "-m", "meshfold.cli", *map(str, words)],
            cwd=tmp_path,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


def losses(out: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(out / "metrics.jsonl") if "loss" in row]


# -- help and mistakes ----------------------------------------------------------------------------------------------


def test_help_is_there_at_once() -> None:
    code = (
        "import sys\nfrom meshfold.cli import main\nmain(['--help'])\n"
        "print('torch' in sys.modules)\nmain(['train', '--help'])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    overview, _, rest = found.stdout.partition("False\n")
    assert all(f"  {name}" in overview for name in COMMANDS)
    assert "--parallel" in rest


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: meshfold {name}")


def test_a_terminal_without_utf8_gets_what_it_can_show() -> None:
    written = io.BytesIO()
    with io.TextIOWrapper(written, encoding="ascii") as stream:
        write_what_it_can(stream)
        print("12 µs", file=stream, flush=True)
        assert written.getvalue() == b"12 ?s\n"


def test_the_version_is_there_without_an_installation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.metadata.version", _not_installed)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == "meshfold from source\n"


def _not_installed(name: str) -> str:
    raise PackageNotFoundError(name)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "there is no command 'trian'. Did you mean 'train'?"),
        (["export", "x"], "there is no command 'export'. Write 'meshfold convert CHECKPOINT FOLDER'."),
        (["dpo"], "there is no command 'dpo'. Write 'meshfold align dpo'."),
        (["train", "--out", "x"], "the following arguments are required: --data"),
        (["train", "--data", "nowhere", "--out", "x"], "there is no file or folder 'nowhere' to train on"),
        (["train", "--data", "empty", "--out", "x"], "no text in 'empty': it has no files"),
        ([*TRAIN, "--steps", "0"], "argument --steps: 0 is not a whole number from 1 up"),
        ([*TRAIN, "--seq-len", "1"], "argument --seq-len: 1 is not a whole number from 2 up"),
        ([*TRAIN, "--config", "c.yaml"], "unrecognized arguments: --config c.yaml. See meshfold train --help"),
        (["demo", "--out", "t/0.txt"], "--out 't/0.txt' is a file; give a folder"),
        ([*TRAIN, "--lr", "fast"], "argument --lr: 'fast' is not a number from 0 up"),
        ([*TRAIN, "--lr", "0"], "argument --lr: '0' changes no weight; give a number above 0, such as 3e-4"),
        ([*TRAIN, "--precision", "fp8"], "argument --precision: invalid choice: 'fp8'"),
        ([*TRAIN, "--schedule", "cosin"], "(choose from 'cosine', 'linear', 'constant'). Did you mean 'cosine'?"),
        ([*TRAIN, "--device", "gpu"], "It is called 'cuda' here."),
        ([*TRAIN, "--learning-rate", "3"], "unrecognized arguments: --learning-rate 3. It is called '--lr' here."),
        ([*TRAIN, "--world-size", "2"], "unrecognized arguments: --world-size 2. It is called '--ranks' here."),
        (["run", "-n", "2", "t.py"], "unrecognized arguments: -n. It is called '--ranks' here."),
        ([*TRAIN, "--tp", "2"], "unrecognized arguments: --tp 2. Write --parallel tensor=2."),
        ([*TRAIN, "--zero", "3"], "unrecognized arguments: --zero 3. Write --parallel zero.stage=3."),
        (["version"], "there is no command 'version'. Write 'meshfold --version'."),
        (["run", "--ranks", "2", "-m"], "nothing to run: give a script"),
        (
            ["run", "--ranks", "2", "-m", "nowhere.module"],
            "there is no module 'nowhere.module' to run: no 'nowhere' is installed",
        ),
        (["run", "--ranks", "2", "t"], "'t' is a folder without a __main__.py: give a script, such as t/train.py"),
        ([*TRAIN, "--precision", "float16"], "It is called 'fp16' here. See meshfold train --help"),
        ([*TRAIN, "--parallel", "data:2"], "--parallel 'data:2' is not a spec: write"),
        ([*TRAIN, "--parallel", "dict(data=2,"], "is not a spec: its brackets do not match; write"),
        (
            [*TRAIN, "--parallel", "dict(tensor=dict(mode=2d, size=4))"],
            "names within brackets need quotes, as in mode='2d'",
        ),
        (
            [*TRAIN, "--paralel", "tensor=2"],
            "unrecognized arguments: --paralel tensor=2. Did you mean '--parallel'? See",
        ),
        (
            [*TRAIN, "--parallel", "mode=2d", "size=4"],
            "'mode' goes into tensor, sequence or axial, as tensor=dict(mode='2d', ...)",
        ),
        ([*TRAIN, "--parallel", "gone.py"], "--parallel 'gone.py': there is no such file"),
        ([*TRAIN, "--parallel", "bad.py"], "running it raised ZeroDivisionError"),
        ([*TRAIN, "--parallel", "none.py"], "the file must define parallel = dict(...)"),
        ([*TRAIN, "--parallel", "pipelin=2"], "Did you mean 'pipeline'?"),
        ([*TRAIN, "--parallel", "data=0"], "data=0 is zero; the minimum is 1"),
        (
            [*TRAIN, "--parallel", "tensor.mode=2d", "tensor.size=6"],
            "tensor=dict(mode='2d', size=6)",
        ),
        ([*TRAIN, "--parallel", "data=3", "--ranks", "4"], "the world size is 4"),
        (["plan", "--parallel", "pipeline=2", "--model", "gpt-tiny", "--set", "layers=1"], "cannot be cut into stages"),
        (
            [*TRAIN, "--parallel", "sequence.mode=ulysses", "sequence.size=3"],
            "4 query heads cannot be split over 3 ranks",
        ),
        ([*TRAIN, "--parallel", "tensor=3"], "heads"),
        ([*TRAIN, "--model", "gpt-tny"], "no model 'gpt-tny'. Did you mean 'gpt-tiny'?"),
        ([*TRAIN, "--set", "layer=2"], "no setting 'layer'. Did you mean 'layers'?"),
        ([*TRAIN, "--set", "layers"], "--set 'layers': write key=value"),
        ([*TRAIN, "--set", "heads=3"], "3 heads do not divide 64"),
        (
            [*TRAIN, "--set", "max_positions=8"],
            "sequences of 128 tokens are longer than the 8 positions of model 'gpt-tiny'",
        ),
        ([*TRAIN, "--set", "vocab_size=100"], "the tokenizer has 257 tokens"),
        ([*TRAIN, "--rule", "*.attn"], "--rule '*.attn': write pattern=role, such as --rule '*.self_attn=replicate'"),
        ([*TRAIN, "--rule", "*.attn=replicat"], "'replicat' is not a role. Did you mean 'replicate'? Roles are column"),
        ([*TRAIN, "--rule", "a=row", "--rule", "a=column"], "--rule 'a=column': another rule says that 'a' is 'row'"),
        (
            [*TRAIN, "--parallel", "tensor=2", "--rule", "*.atn=replicate"],
            "parallel=dict(tensor=2): rule '*.atn' matches no submodule. Did you mean '",
        ),
        ([*TRAIN, "--rule", "*.atn=replicate"], "rule '*.atn' matches no submodule. Did you mean '"),
        (["plan", "--rule", "*.atn=replicate"], "rule '*.atn' matches no submodule. Did you mean '"),
        (
            ["plan", "--parallel", "tensor=2", "--rule", "*.attn.out=replicate"],
            "keep all of the attention whole: 'blocks.0.attn': 'replicate'. Rules are typed so: --rule 'NAME OR PATTERN=ROLE'",
        ),
        ([*TRAIN, "--hf", "nowhere"], "--hf 'nowhere': there is no such folder"),
        ([*TRAIN, "--hf", "empty"], "--hf 'empty': the folder has no config.json"),
        (["plan", "--hf", "empty"], "--hf 'empty': the folder has no config.json"),
        ([*TRAIN, "--hf", "bert", "--tokenizer", "byte"], "has no causal language model"),
        ([*TRAIN, "--hf", "broken", "--tokenizer", "byte"], "its config.json cannot be read"),
        ([*TRAIN, "--tokenizer", "empty"], "tokenizer 'empty': the folder has no tokenizer files (tokenizer.json, "),
        ([*TRAIN, "--accumulate", "3"], "accumulate=3 does not divide batch_size=8"),
        ([*TRAIN, "--batch-size", "800"], "for a batch of 800 windows of 128: it takes 102527 at least"),
        ([*TRAIN, "--device", "cuda", "--parallel", "data=99"], "needs a GPU for each of 99 ranks, and torch sees"),
        (
            ["train", "--data", "ids.bin", "--out", "x"],
            "the token id 700, and model 'gpt-tiny' has a vocabulary of 256",
        ),
        (
            [*TRAIN, "--warmup", "9", "--steps", "4", "--lr", "1e-3"],
            "--warmup 9 with --steps 4: the learning rate would never reach --lr 0.001; write a --warmup of 4 at most",
        ),
        ([*TRAIN, "--resume"], "--resume: there is no checkpoint in 'x' to resume from; leave --resume out"),
        ([*TRAIN, "--optimizer", "AdamW"], "Did you mean 'adamw'?"),
        ([*TRAIN, "--fp8", "rowwise"], "write --fp8 rowwise --precision bf16"),
        (["train", "--data", "t", "--out", "t"], "--out 't' is the folder of --data: files of the run would lie among"),
        (
            ["train", "--data", "t", "--out", "done", "--parallel", "auto", "--machine", "no-such-machine"],
            "already exists: resume it with --resume",
        ),
        (
            ["plan", "--parallel", "zero.stage=3", "--timeline", "gone/plan.svg", "--machine", "no-such-machine"],
            "--timeline 'gone/plan.svg': there is no folder 'gone'; make it (mkdir -p gone)",
        ),
        (["plan", "--parallel", "zero.stage=3", "--trace", "t"], "--trace 't' is a folder; give a file in it"),
        (
            ["suggest", "--batch-size", "8", "--plot", "plan.xyz", "--machine", "no-such-machine"],
            "--plot 'plan.xyz': a picture is drawn as .svg, .png, .pdf; give a name that ends so",
        ),
        (
            ["suggest", "--batch-size", "8", "--plot", "gone/plan.svg", "--machine", "no-such-machine"],
            "--plot 'gone/plan.svg': there is no folder 'gone'; make it (mkdir -p gone)",
        ),
        (["plan", "--residues", "512"], "--residues is for folding models, and no --model is given: write --model"),
        (["generate", "t", "--precision", "float16"], "It is called 'fp16' here"),
        (["train", "--data", "t", "--out", "done"], "already exists: resume it with --resume"),
        (["train", "--data", "t", "--out", "damaged", "--resume"], "cannot read"),
        (["train", "--data", "t", "--out", "t/0.txt/x"], "--out 't/0.txt/x' cannot be made: "),
        (["train", "--data", "t", "--out", "t/0.txt"], "--out 't/0.txt' is a file; give a folder"),
        (["plan", "--machine", "h20x8"], "there is no machine 'h20x8'. Did you mean 'h200x8'?"),
        (["plan", "--parallel", "tensor.mode=3d", "tensor.size=4"], "tensor=dict(mode='3d', size=4)"),
        (["plan", "--batch-size", "8", "--accumulate", "3"], "3 micro-steps do not divide the global batch of 8"),
        (["run"], "nothing to run: give a script"),
        (["run", "--ranks", "2", "gone.py"], "there is no file 'gone.py' to run"),
        (["run", "gone.py"], "there is no file 'gone.py' to run"),
        (["run", "--ranks", "2", "--", "gone.py"], "there is no file 'gone.py' to run"),
        (["run", "--ranks", "2", "python", "gone.py"], "python is started for you: leave it out"),
        (["run", "--ranks", "two", "gone.py"], "argument --ranks: 'two' is not a whole number"),
        (["run", "--ranks", "0", "t/0.txt"], "cannot start 0 ranks"),
        (
            ["run", "--ranks", "1", "--log-dir", "t/0.txt/x", "t/0.txt"],
            "log_dir='t/0.txt/x' cannot be made (Not a directory)",
        ),
        (["reproduce", "no-such-paper"], "no 'no-such-paper' in experiments. There are: attention-schemes, "),
        (
            ["reproduce", "gpipe", "--render", "--output", "empty"],
            "meshfold reproduce gpipe: empty/simulated.json is not there: run it once without --render, which makes it",
        ),
        (["reproduce", "gpipe", "--output", "t/0.txt"], "meshfold reproduce gpipe: t/0.txt: File exists"),
        (
            ["plan", "--model", "gpt-tiny", "--parallel", "pipeline=3"],
            "meshfold plan: pipeline=dict(size=3, schedule='1f1b', chunks=1): 2 blocks cannot be cut into 3 stages",
        ),
        (
            ["plan", "--model", "gpt-tiny", "--parallel", "pipeline=2", "--timeline", "plan.txt"],
            "'plan.txt': give a name that ends in one of .",
        ),
        (["convert", "t/0.txt", "x"], "it is a file; give the folder of a checkpoint or of a Hugging Face model"),
        (["convert", "damaged", "x"], "Did you mean damaged/checkpoint?"),
        (
            ["bench"],
            "say which one; there are: align, attention, cpu-adam, ",
        ),
        (["bench", "tensor-paralel"], "Did you mean 'tensor-parallel'?"),
        (["bench", "Tensor_Paralel"], "Did you mean 'tensor-parallel'?"),
        (["reproduce", "megatron-2020"], "Did you mean 'megatron-2019'?"),
        (["align", "gpro"], "argument TRAINER: invalid choice: 'gpro' (choose from"),
        (["align", "gpro"], "Did you mean 'grpo'? See meshfold align --help"),
        (["align", "DPO"], "Did you mean 'dpo'?"),
        (["align", "rm"], "It is called 'reward' here."),
        (["align", "orpo"], "It is called 'dpo --loss orpo' here."),
        (["align", "generate"], "Write 'meshfold generate'."),
        (["train", "sft"], "required: --out. Write 'meshfold align sft'. See meshfold train --help"),
        (["plan", "suggest"], "unrecognized arguments: suggest. Write 'meshfold suggest'."),
        (["generate", "t", "hello", "you"], 'unrecognized arguments: hello you. Write --prompt "hello you". See'),
        (["plan", "data=2,tensor=3"], "unrecognized arguments: data=2,tensor=3. Write --parallel data=2,tensor=3. See"),
        (["plan", "gpt2"], "unrecognized arguments: gpt2. Write --model gpt2. See"),
        ([*TRAIN, "t"], "unrecognized arguments: t. Write --data t. See"),
        (["generate", "nowhere", "--prompt", "x"], "FOLDER 'nowhere': there is no such folder; give a local folder"),
        ([*TRAIN, "--set", "layers=x"], "is neither a number nor true or false; write --set layers=4, say"),
        (["doctor", "all"], "unrecognized arguments: all. See meshfold doctor --help"),
        (["doctor", "--all"], "unrecognized arguments: --all"),
    ],
)
def test_a_mistake_is_one_sentence(
    words: list[str],
    message: str,
    tmp_path: Path,
    text: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import numpy as np

    monkeypatch.chdir(tmp_path)
    text.rename("t")
    for folder in ("empty", "bert", "broken", "done/checkpoint", "damaged/checkpoint"):
        Path(folder).mkdir(parents=True)
    Path("bad.py").write_text("1 / 0\n")
    Path("none.py").write_text("spec = {}\n")
    Path("bert/config.json").write_text('{"model_type": "vit"}')
    Path("broken/config.json").write_text("{")
    Path("damaged/checkpoint/state.json").write_text("{")
    np.array([1, 700] * 2000, dtype=np.uint16).tofile("ids.bin")
    try:
        code: object = main(words)
    except SystemExit as end:  # argparse
        code = end.code
    out, err = capsys.readouterr()
    last = err.strip().splitlines()[-1]
    assert code not in (0, None)
    assert message in last, err
    assert last.startswith("meshfold"), "not said by the command"
    assert "Traceback" not in err and "step 1" not in out
    if "--out" in message:
        assert "tokenising" not in out, "found only after the work"
    assert not Path("x/checkpoint").exists()


@pytest.mark.parametrize(
    ("words", "parallel"),
    [
        (["dict()"], {}),
        (['dict(data=2, tensor=dict(mode="2d", size=4))'], dict(data=2, tensor=dict(mode="2d", size=4))),
        (["{'data': 2, 'tensor': {'mode': '2d', 'grid': (2, 3)}}"], dict(data=2, tensor=dict(mode="2d", grid=(2, 3)))),
        (["data=2,", "tensor=dict(mode='2d',", "size=4)"], dict(data=2, tensor=dict(mode="2d", size=4))),
        (["data=2,tensor=4"], dict(data=2, tensor=4)),
        (
            ["data=2", "tensor.mode=2.5d", "tensor.size=8", "tensor.depth=2"],
            dict(data=2, tensor=dict(mode="2.5d", size=8, depth=2)),
        ),
        (["tensor.mode=2d,tensor.grid=2x3"], dict(tensor=dict(mode="2d", grid=(2, 3)))),
        (["tensor.mode=1d+sequence", "tensor.size=2"], dict(tensor=dict(mode="1d+sequence", size=2))),
        (["sequence.mode=megatron", "tensor=2"], dict(sequence=dict(mode="megatron"), tensor=2)),
        (["data=true"], dict(data=True)),
    ],
)
def test_parallel_as_it_is_typed(words: list[str], parallel: dict[str, Any]) -> None:
    assert read_parallel(words) == parallel


@pytest.mark.parametrize(
    "words",
    [
        ["data"],
        ["2"],
        ["data=2=3"],
        ["dict(2)"],
        ["dict(**x)"],
        ["list(data=2)"],
        ["dict(data=print(1))"],
        ["dict(data=__import__('os').getpid())"],
        ["data=1", "data.size=2"],
        ["tensor.size=1", "tensor.size=2"],
        ["{'data': 1, 'data': 2}"],
    ],
)
def test_what_is_no_spec_is_said(words: list[str]) -> None:
    with pytest.raises(Failure, match="--parallel"):
        read_parallel(words)


def test_settings_as_words_and_back() -> None:
    import argparse

    words = [
        "--data=x",
        "--out=y",
        "--parallel",
        "dict(data=2, tensor=dict(mode='2d', size=4))",
        "--set",
        "layers=3",
    ]
    words += ["--rule", "*.attn=replicate", "--rule=*.up=column"]
    words += ["--extensions", ".py", ".md", "--resume", "--lr=0.01", "--prompt=-- def", "--stop-after=3"]
    parser = argparse.ArgumentParser()
    configure(parser)
    settings = settings_of(parser.parse_args(words))
    assert (settings.prompt, settings.extensions, settings.last_step) == ("-- def", (".py", ".md"), 3)
    assert settings.rules == {"*.attn": "replicate", "*.up": "column"}
    assert settings_of(parser.parse_args(words_of(settings))) == settings


# -- run ------------------------------------------------------------------------------------------------------------


def test_run_starts_ranks_and_passes_arguments_on(meshfold: Run, tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text(
        "import os, sys\nprint(os.environ['RANK'], os.environ['WORLD_SIZE'], sys.argv[1:])\n"
    )
    words = ("run", "--ranks", 2, "--log-dir", "logs")
    by_file = meshfold(*words, "hello.py", "--ranks", 7, "-m", "x")
    assert (by_file.returncode, by_file.stdout) == (0, "0 2 ['--ranks', '7', '-m', 'x']\n"), by_file.stderr
    assert (tmp_path / "logs" / "rank1.out").read_text() == "1 2 ['--ranks', '7', '-m', 'x']\n"
    by_module = meshfold(*words, "-m", "hello", "--port", 3)
    assert (by_module.returncode, by_module.stdout) == (0, "0 2 ['--port', '3']\n"), by_module.stderr


def test_run_shows_the_first_failing_ranks_traceback(meshfold: Run, tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(
        "import os, time\nif os.environ['RANK'] == '1':\n    raise ValueError('a hole')\ntime.sleep(250)\n"
    )
    begin = time.monotonic()
    found = meshfold("run", "--ranks", 2, "fails.py")
    assert time.monotonic() - begin < 110
    assert found.returncode == 1
    assert "rank 1 of 2 raised" in found.stderr
    assert found.stderr.rstrip().endswith("ValueError: a hole")


def test_run_under_torchrun_just_runs(
    meshfold: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hello.py").write_text("import os\nprint('rank', os.environ['RANK'])\n1 / 0\n")
    place = dict(RANK="3", WORLD_SIZE="4", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2", MASTER_ADDR="h", MASTER_PORT="1")
    found = meshfold("run", "hello.py", **place)
    assert (found.returncode, found.stdout) == (1, "rank 3\n")
    assert "ZeroDivisionError" in found.stderr
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    assert main(["run", "--ranks", "2", "hello.py"]) == 2
    said = capsys.readouterr().err
    assert said == "meshfold run: --ranks 2, but torchrun started 4: leave --ranks out\n"


# -- train ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("warm_commands")
def test_train_here_and_on_ranks_and_resume_under_another_spec(
    meshfold: Run, text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "--data", str(text), *TINY, "--steps", "6", "--accumulate", "2"]
    assert main([*words, "--out", str(tmp_path / "alone"), "--parallel", "dict()"]) == 0
    whole = losses(tmp_path / "alone")
    assert len(whole) == 6 and whole[-1] < whole[0]

    split = tmp_path / "split"
    first = meshfold(
        *words,
        "--out",
        "split",
        "--stop-after",
        3,
        "--parallel",
        "data=2",
        "--save-every",
        2,
        "--prompt",
        "num",
    )
    assert first.returncode == 0, first.stderr
    for part in (
        "a rank holds",
        "gradients  all_reduce  data",
        "step 1/3",
        "validation loss",
        "a sample of what",
    ):
        assert part in first.stdout
    assert (split / "sample.txt").read_text().startswith("num")
    for name in ("checkpoint/state.json", "loss.png", "metrics.jsonl"):
        assert (split / name).stat().st_size

    capfd.readouterr()
    assert main([*words, "--out", str(split), "--resume", "--parallel", "tensor=2", "--json"]) == 0
    out, err = capfd.readouterr()
    assert "resuming from step 3" in err
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["step"] for row in rows] == [4, 5, 6]
    assert losses(split) == pytest.approx(whole, abs=1e-5)
    assert rows[-1]["loss"] == losses(split)[-1]

    assert main([*words, "--set", "hidden=32", "--out", str(split), "--resume"]) == 2
    assert "split/checkpoint belongs to another model: " in capfd.readouterr().err.splitlines()[-1]
    assert main([*words, "--out", str(split), "--resume"]) == 0
    assert "nothing to do: the checkpoint is at step 6" in capfd.readouterr().out


def rates(out: Path) -> list[float]:
    return [row["lr"] for row in read_metrics(out / "metrics.jsonl") if "lr" in row]


def test_a_resumed_run_follows_the_schedule_of_its_settings(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(*words: object) -> int:
        return main(["train", "--data", str(text), *TINY, "--no-plan", *map(str, words)])

    out = tmp_path / "run"
    assert train("--out", out, "--steps", 4, "--lr", 2e-3, "--warmup", 2, "--weight-decay", 0.2) == 0
    assert train("--out", tmp_path / "long", "--steps", 9, "--lr", 2e-3, "--warmup", 2) == 0
    whole = rates(tmp_path / "long")
    assert rates(out)[3] != whole[3]

    # Longer: what was not given is as in the run so far, and no step has a rate of the shorter schedule.
    capsys.readouterr()
    assert train("--out", out, "--resume", "--steps", 9, "--stop-after", 6) == 0
    assert "--steps is 9 from here on; it was 4" in capsys.readouterr().out
    assert rates(out)[4:] == whole[4:6]
    kept = json.loads((out / "settings.json").read_text())
    assert (kept["lr"], kept["steps"], kept["weight_decay"]) == (2e-3, 9, 0.2)

    assert train("--out", out, "--resume", "--lr", 4e-3) == 0
    assert "--lr is 0.004 from here on; it was 0.002" in capsys.readouterr().out
    assert rates(out)[6:] == pytest.approx([2 * rate for rate in whole[6:]])
    state = json.loads((out / "checkpoint" / "state.json").read_text())
    assert {group["initial_lr"] for group in state["optimizer"]["groups"]} == {4e-3}


@pytest.mark.parametrize("name", ["lamb", "came", "adafactor_hf"])
def test_a_run_with_another_optimizer_is_planned_and_goes_on(
    name: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["train", "--data", str(text), *TINY, "--optimizer", name, "--lr", "1e-2", "--parallel", "zero.stage=1"]
    out = tmp_path / "run"
    assert main([*run, "--out", str(out), "--steps", "1"]) == 0
    assert main(["train", "--out", str(out), "--resume", "--steps", "2"]) == 0
    state = json.loads((out / "checkpoint" / "state.json").read_text())
    assert state["optimizer"]["class"] == OPTIMIZERS[name].__name__
    assert main(["train", "--out", str(out), "--resume", "--steps", "3", "--optimizer", "lion"]) != 0
    assert f"holds the state of {name}; type --optimizer {name}" in capsys.readouterr().err
    assert OPTIMIZERS.keys() == MOMENTS.keys() == set(OPTIMIZER_NAMES)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seed", "7"], "--seed 7: the run in 'run' has --seed 0, and continues in the order of its data"),
        (["--batch-size", "2"], "--batch-size 2: the run in 'run' has --batch-size 4,"),
        (["--seq-len", "8"], "--seq-len 8: the run in 'run' has --seq-len 16,"),
        (["--optimizer", "sgd"], "--optimizer sgd: run/checkpoint holds the state of adamw; type --optimizer adamw"),
    ],
)
def test_what_cannot_change_where_a_run_goes_on_is_said(
    words: list[str],
    message: str,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    run = ["train", "--data", str(text), *TINY, "--no-plan", "--out", "run"]
    assert main([*run, "--steps", "1"]) == 0
    assert main([*run, "--steps", "2", "--resume", *words]) != 0
    assert message in capsys.readouterr().err
    assert len(losses(tmp_path / "run")) == 1


def test_an_out_folder_that_cannot_be_written_to_is_said_first(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # the superuser may write anywhere
    assert main(["train", "--data", str(text), *TINY, "--out", str(tmp_path)]) == 2
    assert main(["train", "--data", str(text), *TINY, "--out", str(tmp_path / "new" / "run")]) == 2
    out, err = capsys.readouterr()
    first, second = err.splitlines()
    assert "tokenising" not in out
    assert first == f"meshfold train: --out {str(tmp_path)!r} cannot be written to; give another folder"
    assert second.endswith(f"cannot be made: {tmp_path} cannot be written to; give another folder")


def torchrun(ranks: int, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--master-port=0"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "-m", "meshfold.cli", "train"]
    return subprocess.run([*command, *map(str, words)], capture_output=True, text=True, timeout=120)


@pytest.mark.usefixtures("warm_commands")
def test_a_mistake_under_torchrun_is_a_sentence_of_each_rank(text: Path, tmp_path: Path) -> None:
    found = torchrun(3, "--data", text, *TINY, "--out", tmp_path / "out", "--parallel", "tensor=2")
    assert found.returncode != 0
    said = [line for line in found.stderr.splitlines() if line.startswith("meshfold train: rank ")]
    assert 1 <= len(said) <= 3 and all("the world size is 3" in line for line in said), found.stderr
    assert "SpecError" not in found.stderr and "engine/cli/train.py" not in found.stderr


@pytest.mark.usefixtures("warm_commands")
def test_train_under_torchrun(text: Path, tmp_path: Path) -> None:
    words = ("--data", text, *TINY, "--steps", 2, "--out", tmp_path / "out", "--parallel", "tensor=2")
    found = torchrun(2, *words)
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("a rank holds") == 1 and "step 2/2" in found.stdout


def test_token_ids_and_a_spec_in_a_file(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import numpy as np

    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(40, size=2000))
    (tmp_path / "spec.py").write_text("parallel = dict(data=1)\n")
    words = ["train", "--data", str(tmp_path / "ids.npy"), "--model", "llama-tiny", "--set", "vocab_size=40"]
    words += [
        "--seq-len",
        "16",
        "--steps",
        "2",
        "--precision",
        "fp16",
        "--parallel",
        str(tmp_path / "spec.py"),
    ]
    assert main([*words, "--out", str(tmp_path / "out")]) == 0
    assert "llama-tiny" in capsys.readouterr().out
    assert {"loss_scale", "skipped"} <= read_metrics(tmp_path / "out" / "metrics.jsonl")[0].keys()


# A spec file is Python, and so can make a rank fail in the middle of its training.
SABOTAGE = """
import os
parallel = dict(data=2)
if os.environ.get("RANK") == "1":
    from meshfold.train.progress import Progress
    def step(self, step, numbers):
        if step == 3:
            raise ValueError('a hole in the data')
    Progress.step = step
"""


def test_a_rank_that_fails_in_the_middle_ends_the_job(meshfold: Run, text: Path, tmp_path: Path) -> None:
    (tmp_path / "spec.py").write_text(SABOTAGE)
    begin = time.monotonic()
    found = meshfold("train", "--data", text, *TINY, "--steps", 10**6, "--out", "out", "--parallel", "spec.py")
    assert time.monotonic() - begin < 115
    assert found.returncode == 1
    assert "rank 1 of 2 raised" in found.stderr
    assert found.stderr.rstrip().endswith("ValueError: a hole in the data")
    assert "1/1000000  loss" in found.stdout


@pytest.mark.parametrize(
    ("start", "ranks"), [("warm", 1), ("warm", 2), *(pytest.param("cold", n, marks=pytest.mark.slow) for n in (1, 2))]
)
def test_ctrl_c_leaves_a_checkpoint_and_no_process_behind(
    start: str, ranks: int, text: Path, tmp_path: Path, warm_python: str
) -> None:
    words = [
        "train",
        "--data",
        text,
        *TINY,
        "--steps",
        10**6,
        "--out",
        tmp_path / "out",
        "--parallel",
        f"data={ranks}",
    ]
    process = subprocess.Popen(
        [warm_python if start == "warm" else sys.executable, "-m", "meshfold.cli", *map(str, words)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        start_new_session=True,
        preexec_fn=_heed_ctrl_c,
    )
    try:
        deadline = time.monotonic() + 120
        while len(read_metrics(tmp_path / "out" / "metrics.jsonl")) < 2:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        children = _processes_in(tmp_path) - {process.pid}
        processes = 3 if ranks == 2 else 1  # the warm Python has a stand-in for each
        assert len(children) == processes * (2 if start == "warm" else 1) - 1
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=120) == 130
        deadline = time.monotonic() + 60
        while any(Path(f"/proc/{pid}").exists() for pid in children) or _processes_in(tmp_path):
            assert time.monotonic() < deadline  # the kernel ends them a moment later
            time.sleep(0.02)
        assert process.stderr is not None
        assert "asked to stop; Ctrl-C again ends" in process.stderr.read()
        assert (tmp_path / "out" / "checkpoint" / "state.json").exists()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_ctrl_c_while_a_command_is_imported_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("importlib.import_module", interrupted)
    assert main(["plan", "--model", "gpt-tiny"]) == 130
    assert capsys.readouterr().err == "meshfold plan: interrupted\n"


def _heed_ctrl_c() -> None:
    """A process that was started in the background ignores Ctrl-C, and so would what it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _processes_in(folder: Path) -> set[int]:
    """Return the processes whose working folder it is: those of a command that was started there."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if (process / "cwd").resolve() == folder.resolve():
                found.add(int(process.name))
    return found


# -- doctor, reproduce, bench ---------------------------------------------------------------------------------------


def test_doctor(capfd: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json"])
    out, err = capfd.readouterr()
    assert code == 0, err
    answer = json.loads(out)
    assert answer["problems"] == []
    assert answer["distributions"]["meshfold-mesh"] is not None
    assert {row["family"] for row in answer["kernels"]} >= {"norms", "cross_entropy"}
    everything = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "shift"]
    assert answer["collectives"][0]["passed"] == everything


def test_doctor_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--no-test"]) == 0
    out = capsys.readouterr().out
    assert "meshfold-tensor-parallel" in out and out.endswith("no problems found\n")


def test_reproduce_and_bench_find_programs_above(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "packages" / "engine").mkdir(parents=True)
    paper, area = tmp_path / "experiments" / "some_paper", tmp_path / "benchmarks"
    paper.mkdir(parents=True)
    area.mkdir()
    (paper / "run.py").write_text(
        '"""``meshfold reproduce some-paper``: what a paper says.\n\nMore."""\ndef main(argv):\n    print(argv)\n    return 3\n'
    )
    (paper / "helper.py").write_text("")
    (area / "speed_test.py").write_text('"""How fast."""\ndef main(argv):\n    print("measured", *argv)\n')
    (area / "common.py").write_text('"""No benchmark: it has no main."""\n')
    (tmp_path / "deep" / "inside").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "deep" / "inside")
    monkeypatch.setattr(sys, "path", sys.path.copy())
    assert main(["reproduce", "--list"]) == 0
    assert capsys.readouterr().out == "some-paper  What a paper says.\n"
    assert main(["reproduce", "some-paper", "--ranks", "4", "--list"]) == 3
    assert capsys.readouterr().out == "['--ranks', '4', '--list']\n"
    assert main(["bench", "--list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == ["speed-test"]
    assert main(["bench", "speed-test", "now"]) == 0
    assert capsys.readouterr().out == "measured now\n"


@pytest.mark.usefixtures("warm_commands")
def test_ranks_without_a_row_are_said_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.txt").write_text("words to train on, more of them than one batch takes\n" * 40)
    words = ["train", "--data", "t.txt", "--out", "run", *TINY, "--parallel", "data=2", "--steps", "1"]
    assert main([*words, "--batch-size", "1"]) == 0
    said = "1 of 2 data ranks get a row in a forward, the others one that does not count. Write a --batch-size of 2 at least"
    assert said in capfd.readouterr().out
    assert main([*words, "--out", "other"]) == 0
    assert "does not count" not in capfd.readouterr().out
