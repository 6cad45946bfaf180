"""``meshfold align``: from completions to preferences to rewards, each stage from the weights of the one before."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from meshfold.cli import main
from meshfold.train.start import checkpoint_of, settings_of

SMALL = ["--model", "gpt-tiny", "--set", "layers=1", "hidden=16", "heads=2", "--lr", "1e-3", "--batch-size", "4"]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    records = {
        "chats": [dict(prompt=f"{n}+1=", completion=f"{n + 1}" * (1 + n % 4)) for n in range(8)],
        "pairs": [dict(prompt=f"{n}+1=", chosen=str(n + 1), rejected="x" * (1 + n % 5)) for n in range(8)],
        "judged": [dict(prompt=f"{n}", completion="ab" * (1 + n % 3), label=n % 2 == 0) for n in range(8)],
        "prompts": [dict(prompt="a" * (1 + n % 3), wanted="b") for n in range(6)],
    }
    for name, rows in records.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text(
        "def letters(completions, wanted, **columns):\n"
        "    return [text.count(w) / 4 - len(text) / 8 for text, w in zip(completions, wanted)]\n"
    )
    return tmp_path


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_from_completions_to_rewards(
    data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stage(trainer: str, records: str, *more: str, steps: int = 2) -> list[dict[str, float]]:
        out = data / trainer
        words = [trainer, "--data", str(data / f"{records}.jsonl"), "--out", str(out), "--steps", str(steps), *more]
        assert main(["align", *words, *SMALL]) == 0, capsys.readouterr().err
        return metrics(out)

    first = stage("sft", "chats", "--length", "12", steps=3)
    assert len(first) == 3 and first[-1]["loss"] < first[0]["loss"]
    start = ["--start", str(data / "sft")]
    assert stage("dpo", "pairs", "--beta", "0.3", *start)[0]["loss"] == pytest.approx(0.693147, abs=1e-5)
    assert stage("kto", "judged", *start)[0]["loss"] == pytest.approx(0.5, abs=1e-5)
    assert "accuracy" in stage("reward", "pairs", *start)[-1]
    sampling = ["--reward", f"{data}/rewards.py:letters", "--max-new-tokens", "4"]
    found = stage("grpo", "prompts", *start, *sampling, "--group", "2", "--loss", "dapo", "--beta", "0.1")
    assert found[0]["reward"] < 0.01 and found[0]["tokens"] <= 4
    found = stage("ppo", "prompts", *start, *sampling, "--critic-start", str(data / "reward"), "--epochs", "1")
    assert "value_loss" in found[0]
    said = capsys.readouterr().out
    assert "ppo of gpt-tiny" in said and "checkpoint:" in said

    settings = (data / "sft" / "settings.json").read_text()
    assert main(["align", "sft", "--data", str(data / "chats.jsonl"), "--out", str(data / "sft")]) == 2
    assert "has a run of 3 steps: continue it with --resume" in capsys.readouterr().err
    with monkeypatch.context() as torchrun:
        for name, value in dict(RANK=0, LOCAL_RANK=0, WORLD_SIZE=1, MASTER_ADDR="127.0.0.1", MASTER_PORT=0).items():
            torchrun.setenv(name, str(value))
        assert main(["align", "sft", "--data", str(data / "chats.jsonl"), "--out", str(data / "sft")]) == 2
    assert "rank 0: --out" in capsys.readouterr().err
    assert (data / "sft" / "settings.json").read_text() == settings

    monkeypatch.chdir(data)  # where the folder has the trainer's name
    words = ["align", "sft", "--out", "sft", "--resume", "--steps", "5"]
    assert main(words) == 0
    assert [row["step"] for row in metrics(data / "sft")] == [1, 2, 3, 4, 5]


def test_a_run_in_a_folder_with_the_name_of_another_trainer(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(data)
    assert (
        main(["align", "--out", "reward", "--data", "chats.jsonl", "--steps", "1", "sft", "--length", "12", *SMALL])
        == 0
    )
    assert main(["align", "sft", "--resume", "--out", "reward", "--steps", "2"]) == 0
    assert settings_of("reward")["trainer"] == "sft" and len(metrics(data / "reward")) == 2


LIKE_SMALL = ["--model", "llama-tiny", "--set", "layers=1", "hidden=16", "heads=2", "kv_heads=1", "ffn=24"]


def weights(folder: Path) -> dict[str, Any]:
    from meshfold.engine.checkpoints import Checkpoint

    return dict(Checkpoint(str(checkpoint_of(str(folder)))).model)


@pytest.mark.parametrize("kind", ["llama", "gpt"])
def test_a_folder_is_all_that_the_next_stage_needs(kind: str, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sizes come from the checkpoint, not from the default model; a reward model gets all weights but the head's."""
    model = LIKE_SMALL if kind == "llama" else SMALL[:6]  # the head of a GPT is its table of words

    def stage(trainer: str, records: str, out: str, *more: str) -> None:
        words = [trainer, "--data", str(data / f"{records}.jsonl"), "--out", str(data / out), "--steps", "1"]
        assert main(["align", *words, "--batch-size", "4", *more]) == 0, capsys.readouterr().err

    still, sampling = ["--lr", "1e-30"], ["--max-new-tokens", "3"]
    stage("sft", "chats", "sft", "--length", "12", *model)
    start = ["--start", str(data / "sft")]
    stage("reward", "pairs", "judge", *start, *still)
    before, after = weights(data / "sft"), weights(data / "judge")
    assert after["head.weight"].shape == (1, 16)
    body = [name for name in after if name != "head.weight"]
    assert body and all(torch.allclose(after[name], before[name], rtol=0, atol=1e-20) for name in body)
    stage("dpo", "pairs", "dpo", *start)
    judged = ["--reward-model", str(data / "judge")]
    stage("grpo", "prompts", "grpo", *start, *judged, *sampling, "--group", "2")
    stage("ppo", "prompts", "ppo", *start, *judged, *sampling, "--critic-start", str(data / "judge"))
    stage("ppo", "prompts", "critic", *start, *judged, *sampling, "--critic-start", str(data / "sft"), *still)
    critic = weights(data / "critic" / "step-00000001" / "critic")
    assert all(torch.allclose(critic[name], before[name], rtol=0, atol=1e-20) for name in body)
    trained = ["--critic-start", str(data / "ppo")]  # its critic, not its policy
    stage("ppo", "prompts", "again", *start, *judged, *sampling, *trained, *still)
    first, again = (weights(data / run / "step-00000001" / "critic") for run in ("ppo", "again"))
    assert first["head.weight"].shape == (1, 16)
    assert all(torch.allclose(again[name], first[name], rtol=0, atol=1e-20) for name in first)
    assert f"dpo of the {kind} of {data / 'sft'}" in capsys.readouterr().out
    folder = str(data / "sft")
    for trainer, more, said in (
        ("dpo", ["--start", str(data / "judge")], "is a reward model, which generates nothing"),
        (
            "ppo",
            [*start, "--reward-model", folder],
            "is a run of sft, which scores nothing: give a run of meshfold align reward",
        ),
        (
            "dpo",
            [*start, "--model", "gpt-tiny"],
            "Without --model, --set and --hf a run has the model that it starts from",
        ),
        ("dpo", [*start, "--set", "layers=2"], "--set layers with --start"),
        ("dpo", ["--start", str(data)], "has no checkpoint: a run writes its first one at its end"),
    ):
        records = "prompts" if trainer == "ppo" else "pairs"
        words = [trainer, "--data", str(data / f"{records}.jsonl"), "--out", str(data / "no"), *more]
        assert main(["align", *words]) != 0
        assert said in capsys.readouterr().err


def test_a_hugging_face_folder_is_named_once(
    data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its runs say where it is, and so do those that start from them; adapters go on as adapters."""
    monkeypatch.chdir(data)

    def stage(trainer: str, records: str, out: str, *more: str) -> int:
        words = [trainer, "--data", f"{records}.jsonl", "--out", out, "--steps", "1", "--batch-size", "4"]
        return main(["align", *words, *more])

    assert (
        stage("sft", "chats", "own", "--model", "llama-tiny", "--set", "layers=1", "hidden=16", "heads=2", "ffn=24")
        == 0
    )
    assert main(["convert", "own/step-00000001/policy", "folder"]) == 0
    assert stage("sft", "chats", "sft", "--hf", "folder") == 0
    with pytest.warns(
        UserWarning, match="initialised from the seed"
    ):  # the head, and the rest comes from the checkpoint
        assert stage("reward", "pairs", "judge", "--start", "sft") == 0
    sampling = ["--reward-model", "judge", "--critic-start", "judge", "--max-new-tokens", "3"]
    with pytest.warns(UserWarning, match="initialised from the seed"):
        assert stage("ppo", "prompts", "ppo", "--start", "sft", *sampling) == 0
    assert stage("dpo", "pairs", "dpo", "--start", "ppo") == 0
    assert "dpo of Llama of folder" in capsys.readouterr().out
    assert stage("ppo", "prompts", "no", "--start", "own", *sampling) != 0
    assert "is not a model of ours, as the policy is" in capsys.readouterr().err
    pytest.importorskip("peft")
    assert stage("sft", "chats", "adapters", "--hf", "folder", "--lora", "2") == 0
    assert stage("dpo", "pairs", "more", "--start", "adapters") == 0
    assert stage("reward", "pairs", "no", "--start", "adapters") != 0
    assert "has adapters (--lora 2), and reward trains whole models" in capsys.readouterr().err


def test_a_run_of_train_is_a_start_too(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (data / "text.txt").write_text("one and two\n" * 60)
    train = ["train", "--data", str(data / "text.txt"), "--out", str(data / "run"), "--steps", "1", "--seq-len", "16"]
    assert main([*train, *SMALL[:6]]) == 0
    words = ["--data", str(data / "pairs.jsonl"), "--steps", "1", "--start", str(data / "run")]
    assert main(["align", "reward", *words, "--out", str(data / "judge")]) == 0
    assert f"reward of the gpt of {data / 'run'}" in capsys.readouterr().out
    sampled = [
        "--data",
        str(data / "prompts.jsonl"),
        "--reward",
        f"{data}/rewards.py:letters",
        "--start",
        str(data / "run"),
    ]
    assert main(["align", "grpo", *sampled, "--max-new-tokens", "900", "--out", str(data / "long")]) == 1
    assert "are longer than the 128 positions of model" in capsys.readouterr().err


def test_phases_of_memory(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are printed before anything starts, and a run within the limit makes the steps of one without."""
    words = ["align", "ppo", "--data", f"{data}/prompts.jsonl", "--reward", f"{data}/rewards.py:letters"]
    words += ["--max-new-tokens", "3", "--steps", "2", *SMALL, "--parallel", "zero.stage=3"]
    limit = ["--gpu-memory", "300KiB"]
    assert main([*words, "--out", str(data / "planned"), *limit, "--plan"]) == 1  # logits alone take more
    assert "phase 'score' needs" in capsys.readouterr().err
    assert main([*words, "--out", str(data / "planned"), "--gpu-memory", "1GiB", "--plan"]) == 0
    table = capsys.readouterr().out
    assert "train critic" in table and "nothing" in table and not (data / "planned").exists()
    assert main([*words, "--out", str(data / "a")]) == 0
    assert main([*words, "--out", str(data / "b"), "--gpu-memory", "1GiB", "--host-memory", "1GiB"]) == 0
    assert "train critic" in capsys.readouterr().out
    assert metrics(data / "a") == metrics(data / "b")


@pytest.mark.usefixtures("warm_commands")
def test_a_killed_run_goes_on(data: Path) -> None:
    """A process that is killed in the middle, and resumed, makes the steps of one that is not."""
    words = ["align", "grpo", "--data", str(data / "prompts.jsonl"), "--reward", f"{data}/rewards.py:letters"]
    words += ["--max-new-tokens", "3", "--steps", "4000", "--save-every", "2", "--precision", "fp64", *SMALL]
    command = [sys.executable, "-m", "meshfold.cli", *words, "--out", str(data / "killed")]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    latest = data / "killed" / "latest.json"
    until = time.monotonic() + 120
    while not latest.is_file() and running.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    running.kill()
    assert running.wait() == -signal.SIGKILL
    made = json.loads(latest.read_text())["step"]
    assert 0 < made < 4000
    steps = ["--steps", str(made + 3)]
    assert main(["align", "grpo", "--resume", "--out", str(data / "killed"), *steps]) == 0
    assert main([*words, "--out", str(data / "whole"), *steps]) == 0
    assert metrics(data / "killed") == metrics(data / "whole")
    assert [row["step"] for row in metrics(data / "whole")] == [*range(1, made + 4)]


@pytest.mark.usefixtures("warm_commands")
def test_on_two_ranks(data: Path) -> None:
    words = ["align", "dpo", "--data", str(data / "pairs.jsonl"), "--steps", "2", "--precision", "fp64", *SMALL]
    assert main([*words, "--out", str(data / "one")]) == 0
    assert main([*words, "--out", str(data / "two"), "--parallel", "data=2", "zero.stage=3"]) == 0
    for one, two in zip(metrics(data / "one"), metrics(data / "two"), strict=True):
        assert two == pytest.approx(one, rel=1e-9, abs=1e-12)


@pytest.mark.usefixtures("warm_commands")
def test_a_rank_that_only_samples(data: Path) -> None:
    judged = ["--data", str(data / "prompts.jsonl"), "--reward", f"{data / 'rewards.py'}:letters", "--group", "2"]
    words = ["align", "grpo", *judged, "--max-new-tokens", "3", "--steps", "2", "--precision", "fp64", *SMALL]
    assert main([*words, "--out", str(data / "one")]) == 0
    assert main([*words, "--out", str(data / "two"), "--rollout-ranks", "1"]) == 0
    for one, two in zip(metrics(data / "one"), metrics(data / "two"), strict=True):
        assert two == pytest.approx(one, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sft"], "required: --data"),
        (["dpo", "--data", "pairs", "--rollout-ranks", "1"], "--rollout-ranks with dpo"),
        *(
            (["grpo", "--data", "prompts", "--reward", "rewards.py:letters", *words], said)
            for words, said in (
                (["--rollout-every", "2"], "--max-staleness 1"),
                (["--rollout-parallel", "tensor=2"], "give --rollout-ranks N"),
                (["--rollout-ranks", "2", "--ranks", "2"], "of 2 processes leaves none to train"),
                (["--rollout-ranks", "1", "--rollout-parallel", "tensor=2"], "tensor=2 makes 2 ranks"),
                (["--rollout-ranks", "1", "--rollout", "http://a:1"], "sample with --rollout engine"),
            )
        ),
        (["sft", "--resume"], "--resume: there is no run in"),
        (["sft", "--data", "chats", "--length", "1"], "--length 1 leaves no token to predict: write --length 512"),
        (["dpo", "--data", "pairs", "--micro-steps", "99"], "each micro-step has a row at least; write --micro-steps"),
        (["spo", "--data", "x"], "invalid choice"),
        (["grpo", "--data", "prompts"], "needs --reward FILE.py:NAME"),
        (["sft", "--data", "chats", "--reward", "a.py:b"], "belongs to grpo and ppo"),
        (["sft", "--data", "chats", "--rollout", "transformers"], "--rollout with sft"),
        (["sft", "--data", "chats", "--shared-prompt", "yes"], "--shared-prompt yes with sft"),
        (
            ["grpo", "--data", "prompts", "--reward", "rewards.py:letters", "--rollout", "vllm"],
            "--rollout 'vllm': write engine",
        ),
        (
            ["grpo", "--data", "prompts", "--reward", "rewards.py:letters", "--rollout-sleep"],
            "give --rollout http://HOST:PORT",
        ),
        (
            ["grpo", "--data", "prompts", "--reward", "rewards.py:letters", "--importance-high", "0"],
            "leaves no token a weight",
        ),
        (["dpo", "--data", "pairs", "--plan"], "need --gpu-memory SIZE"),
        (["kto", "--data", "judged", "--gpu-memory", "1GiB"], "--gpu-memory with kto"),
        (["dpo", "--data", "pairs", "--gpu-memory", "1GiB"], "zero=dict(stage=3)"),
        (["sft", "--data", "chats", "--beta", "1"], "--beta with sft"),
        (["sft", "--data", "chats", "--lora", "4"], "--lora needs --hf"),
        (["sft", "--data", "chats", "--loss", "dpo"], "--loss with sft"),
        (["dpo", "--data", "chats"], "record 1: has 'prompt', 'completion'"),
        (["dpo", "--data", "pairs", "--loss", "sigmod"], "Did you mean 'sigmoid'"),
        (["grpo", "--data", "prompts", "--reward", "rewards.py:letters", "--group", "1"], "--group 1: completions"),
        (
            ["grpo", "--data", "prompts", "--reward", "rewards.py:letters", "--loss", "sigmoid"],
            "--loss 'sigmoid': use 'grpo'",
        ),
        (["sft", "--data", "nothing"], "cannot be read"),
        (["sft", "--data", "chats", "--start", "nowhere"], "--start 'nowhere': there is no such folder"),
        (["grpo", "--data", "prompts", "--reward", "rewards.py"], "write FILE.py:NAME"),
        (["grpo", "--data", "prompts", "--reward", "nowhere.py:letters"], "there is no file"),
        (["sft", "--data", "chats", "--resume"], "no checkpoint to resume from"),
    ],
)
def test_mistakes(
    words: list[str], said: str, data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(data)
    words = [
        f"{data / word}.jsonl" if place and words[place - 1] == "--data" else word for place, word in enumerate(words)
    ]
    try:
        code = main(["align", *words, "--out", str(data / "out"), *SMALL])
    except SystemExit as ended:
        code = int(ended.code or 0)
    assert code != 0
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error


def test_an_out_that_is_a_file_is_refused_before_the_data_is_read(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (data / "taken").write_text("mine")
    assert main(["align", "sft", "--data", "gone.jsonl", "--out", str(data / "taken")]) == 2
    assert "taken' is a file; give a folder to write to" in capsys.readouterr().err
    assert (data / "taken").read_text() == "mine"
