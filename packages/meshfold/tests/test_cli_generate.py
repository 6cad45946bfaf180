"""``meshfold generate``: prompts from arguments, files and a pipe; the texts are transformers'."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from meshfold.cli import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randn_like(weight) * 0.3)
    place = tmp_path_factory.mktemp("models") / "llama"
    model.save_pretrained(place)
    return place


def expected(folder: Path, prompt: str, count: int) -> str:
    from transformers import LlamaForCausalLM

    model: Any = LlamaForCausalLM.from_pretrained(folder)
    ids = torch.tensor([list(prompt.encode())])
    out = model.generate(ids, max_new_tokens=count, do_sample=False)[0, ids.shape[1] :].tolist()
    out = out[: out.index(256)] if 256 in out else out
    return bytes(out).decode(errors="replace")


def test_prompts_are_continued(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    greedy = ["--temperature", "0", "--max-new-tokens", "6"]
    assert main(["generate", str(folder), "--prompt", "one", "--prompt", "and two", *greedy]) == 0
    printed = capsys.readouterr()
    wanted = {prompt: expected(folder, prompt, 6) for prompt in ("one", "and two")}
    assert printed.out == "".join(f"{prompt}{text}\n\n" for prompt, text in wanted.items())
    assert "tokens are bytes" in printed.err and "of 2 texts in" in printed.err and "tokens/s" in printed.err

    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "texts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "{prompt}"}}\n' for prompt in wanted))
    assert main(["generate", str(folder), "--prompts", str(prompts), "--out", str(out), "--n", "2", *greedy]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["prompt"], row["text"]) for row in rows] == [pair for pair in wanted.items() for _ in range(2)]
    assert {row["finish"] for row in rows} <= {"length", "stop"}
    assert main(["generate", str(folder), "--prompt", "one", "--quantize", "int8", "--memory", *greedy]) == 0
    said = capsys.readouterr().err
    assert "15 layers in int8: " in said and "memory: " in said and " a rank: weights " in said


@pytest.mark.slow  # starts ranks
@pytest.mark.usefixtures("warm_commands")
@pytest.mark.parametrize(
    "spec",
    [
        "tensor=2",
        "pipeline=2",
        "tensor=dict(mode='2d', size=4)",
        "tensor=dict(mode='2.5d', size=4, depth=4)",
        "tensor=dict(mode='3d', grid=(2, 2, 1))",
    ],
)
def test_ranks_write_the_same_texts(folder: Path, spec: str, tmp_path: Path) -> None:
    out, words = tmp_path / "texts.jsonl", ["--temperature", "0", "--max-new-tokens", "5", "--device", "cpu"]
    prompts = ["--prompt", "one", "--prompt", "and two"]
    assert main(["generate", str(folder), *prompts, "--parallel", spec, "--out", str(out), *words]) == 0
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["prompt"], row["text"]) for row in found] == [(p, expected(folder, p, 5)) for p in ("one", "and two")]


def test_prompts_come_line_by_line(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\nand two\n\nnot this\n"))
    assert main(["generate", str(folder), "--temperature", "0", "--max-new-tokens", "5"]) == 0
    printed = capsys.readouterr()
    texts = {prompt: expected(folder, prompt, 5) for prompt in ("one", "and two")}
    assert printed.out == "".join(f"{prompt}{text}\n\n" for prompt, text in texts.items())


def test_what_cannot_be_generated_is_said(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty, wrong = tmp_path / "empty.txt", tmp_path / "wrong.jsonl"
    empty.write_text("\n")
    wrong.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((folder / "config.json").read_text())
    cases = [
        ([str(folder), "--prompts", str(empty)], "no prompt in it"),
        ([str(folder), "--prompts", str(wrong)], "line 2: write"),
        (
            [str(folder), "--prompts", "gone.txt"],
            "--prompts gone.txt cannot be read: No such file or directory; give a file",
        ),
        ([str(folder), "--prompt", "a", "--out", "gone/x.jsonl"], "there is no folder gone; make it first"),
        ([str(folder), "--prompt", "a", "--out", str(bare)], "is a folder: name a file in it, such as"),
        ([str(folder), "--prompt", "a", "--top-p", "2"], "--top-p 2.0: a probability above 0, at most 1"),
        ([str(folder), "--prompt", "a", "--tokens", "8"], "write --tokens 16 or more"),
        ([str(folder), "--prompt", "a", "--max-new-tokens", "99"], "write --max-new-tokens 64 or a shorter prompt"),
        ([str(folder), "--parallel", "tensor=2"], "2 ranks cannot read one terminal"),
        ([str(folder), "--prompt", "a", "--max-new-tokens", "100"], "the model has 64 positions"),
        ([str(bare), "--prompt", "a"], "has no weights"),
        ([str(folder), "--prompt", "a", "--quantize", "int4"], "groups of 128 do not divide the 32 columns"),
    ]
    for words, sentence in cases:
        assert main(["generate", *words]) != 0
        assert sentence in capsys.readouterr().err, words


def test_without_a_number_a_text_ends_where_the_model_does(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(folder), "--prompt", "one", "--prompt", "and two", "--temperature", "0"]) == 0
    wanted = {prompt: expected(folder, prompt, 64 + 1 - len("and two")) for prompt in ("one", "and two")}
    assert capsys.readouterr().out == "".join(f"{prompt}{text}\n\n" for prompt, text in wanted.items())


@pytest.mark.parametrize("inside", ["", "checkpoint", "step-00000006/policy"])
def test_a_checkpoint_is_told_from_a_folder(tmp_path: Path, inside: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / inside).mkdir(parents=True, exist_ok=True)
    (tmp_path / inside / "state.json").write_text("{}")
    assert main(["generate", str(tmp_path), "--prompt", "one"]) == 1
    said = capsys.readouterr().err
    assert "a checkpoint of Meshfold" in said and f"meshfold convert {tmp_path / inside} NEW" in said
