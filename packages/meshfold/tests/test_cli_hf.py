"""Hugging Face models from a local folder: with weights, without, and planned."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from meshfold.engine import Engine
from meshfold.huggingface import open_model
from meshfold.mesh import ParallelSpec, SpecError
from meshfold.mesh.testing import run_on_ranks
from meshfold.planner import estimate
from meshfold.train.metrics import read_metrics
from meshfold.train.model_choice import choose_model

transformers: Any = pytest.importorskip("transformers", reason="needs meshfold[hf]")

COMMON: dict[str, Any] = dict(vocab_size=260, bos_token_id=0, eos_token_id=1, pad_token_id=1)
LLAMA_LIKE: dict[str, Any] = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
)
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "opt": (
        "OPTConfig",
        dict(
            hidden_size=32,
            num_hidden_layers=2,
            ffn_dim=64,
            num_attention_heads=4,
            max_position_embeddings=32,
            word_embed_proj_dim=32,
            dropout=0.1,
        ),
    ),
    "gpt2": ("GPT2Config", dict(n_embd=32, n_layer=2, n_head=4, n_positions=32)),
    "llama": ("LlamaConfig", LLAMA_LIKE),
    "qwen2": ("Qwen2Config", LLAMA_LIKE),
}
NEEDS_A_RULE: dict[str, tuple[str, dict[str, Any]]] = {"phi3": ("Phi3Config", LLAMA_LIKE)}


def folder_of(family: str, root: Path, *, weights: bool) -> Path:
    """A folder with a tiny configuration, and random weights if wanted."""
    name, sizes = {**CONFIGS, **NEEDS_A_RULE}[family]
    config = getattr(transformers, name)(**COMMON, **sizes)
    folder = root / family
    config.save_pretrained(folder)
    if weights:
        torch.manual_seed(7)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def a_batch() -> torch.Tensor:
    return torch.randint(0, 260, (4, 16), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", CONFIGS)
def test_without_weights_a_model_is_planned_and_starts_from_the_seed(family: str, tmp_path: Path) -> None:
    found = open_model(folder_of(family, tmp_path, weights=False))
    assert (found.vocab_size, found.max_positions, found.has_weights) == (260, 32, False)
    plan = estimate(found.build, ParallelSpec.parse(dict(data=2, tensor=2)), batch_size=4, seq_len=16)
    assert plan.local_parameters < plan.parameters
    assert {entry.phase for entry in plan.traffic} >= {"forward", "backward", "gradients", "norm"}
    engine = Engine(found.build, {}, optimizer="adamw", seed=3)
    assert 4.5 < engine.train_step(a_batch()) < 7.0
    assert sum(p.numel() for p in engine.model.parameters()) == plan.parameters


def loss_on_ranks(folder: str) -> list[float]:
    engine = Engine(open_model(folder).load(), dict(tensor=2), optimizer=dict(name="adamw", lr=1e-2))
    return [engine.train_step(a_batch()) for _ in range(2)]


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_with_weights_ranks_start_from_them(family: str, tmp_path: Path) -> None:
    folder = folder_of(family, tmp_path, weights=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    choice = choose_model(None, str(folder), {}, vocab_size=257, seq_len=16)
    assert choice.load is not None
    alone = Engine(choice.source, {}, optimizer=dict(name="adamw", lr=1e-2))
    losses = [alone.train_step(a_batch()) for _ in range(2)]
    if family == "llama":  # GPT-2's default is to drop
        assert losses[0] == pytest.approx(model(a_batch(), labels=a_batch()).loss.item(), abs=1e-5)
    assert run_on_ranks(2, loss_on_ranks, str(folder))[1] == pytest.approx(losses, abs=1e-5)


def test_train_a_folder_with_its_own_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    from meshfold.cli import main

    folder = folder_of("gpt2", tmp_path, weights=True)
    text = "one two three four " * 200
    pairs = Tokenizer(models.BPE())
    pairs.pre_tokenizer, pairs.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=260, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    pairs.train_from_iterator([text], trainer)
    transformers.GPT2TokenizerFast(tokenizer_object=pairs).save_pretrained(folder)
    (tmp_path / "text.txt").write_text(text)
    out = tmp_path / "out"
    train = [
        "train",
        "--data",
        str(tmp_path / "text.txt"),
        "--hf",
        str(folder),
        "--out",
        str(out),
        "--lr",
        "1e-2",
    ]
    assert main([*train, "--seq-len", "16", "--batch-size", "4", "--steps", "8", "--prompt", "one two"]) == 0
    rows = [row["loss"] for row in read_metrics(out / "metrics.jsonl") if "loss" in row]
    assert rows[-1] < rows[0] - 1
    assert (out / "sample.txt").read_text().startswith("one two")


def test_a_folder_without_a_tokenizer_is_trained_on_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from meshfold.cli import main

    folder = folder_of("qwen2", tmp_path, weights=False)
    (tmp_path / "text.txt").write_text("one two three four " * 200)
    train = ["train", "--data", str(tmp_path / "text.txt"), "--hf", str(folder), "--seq-len", "16"]
    train += ["--batch-size", "4", "--steps", "1", "--no-plan"]
    assert main([*train, "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert f"{folder} has no tokenizer files: tokens are bytes" in said
    assert "3,611 tokens to train on, 190 to validate with" in said  # 3800 bytes and an end

    assert main([*train, "--out", str(tmp_path / "two"), "--tokenizer", str(folder)]) == 1
    assert "the folder has no tokenizer files (tokenizer.json" in capsys.readouterr().err

    # A configuration alone names a tokenizer and brings no vocabulary.
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|endoftext|>"}')
    assert main([*train, "--out", str(tmp_path / "three")]) == 0
    assert f"{folder} has a tokenizer without a vocabulary: tokens are bytes" in capsys.readouterr().out
    assert main([*train, "--out", str(tmp_path / "four"), "--tokenizer", str(folder)]) == 1
    assert "of 16 words of text: its vocabulary, of" in capsys.readouterr().err


@pytest.mark.slow  # 2d and rules are compared with the serial model in packages/tensor_parallel
def test_a_rule_keeps_whole_what_cannot_be_split(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Phi-3 counts its heads by its configuration; the refusal says what to type."""
    from meshfold.cli import main

    folder = folder_of("phi3", tmp_path, weights=False)
    (tmp_path / "text.txt").write_text("one two three four " * 200)
    train = ["train", "--data", str(tmp_path / "text.txt"), "--hf", str(folder), "--seq-len", "16"]
    train += ["--batch-size", "4", "--steps", "2"]
    assert main([*train, "--out", str(tmp_path / "alone"), "--rule", "*.self_attn=replicate"]) == 0
    split = [*train, "--out", str(tmp_path / "split"), "--parallel", "tensor.mode=2d", "tensor.size=4"]
    assert main(split) == 1
    said = capfd.readouterr().err
    assert "with the rule '*.self_attn': 'replicate'; MLPs and tables are split all the same. Rules are" in said
    assert main([*split, "--rule", "*.self_attn=replicate"]) == 0
    alone, whole = (
        [row["loss"] for row in read_metrics(tmp_path / out / "metrics.jsonl") if "loss" in row]
        for out in ("alone", "split")
    )
    assert whole == pytest.approx(alone, abs=1e-5)
    capfd.readouterr()
    plan = ["plan", "--hf", str(folder), "--parallel", "tensor.mode=2d", "tensor.size=4", "--report"]
    assert main([*plan, "--rule", "*.self_attn=replicate"]) == 0
    assert re.search(r"model\.layers\.0\.self_attn +replicate +Phi3Attention", capfd.readouterr().out)


def test_what_a_folder_lacks_is_said(tmp_path: Path) -> None:
    folder = folder_of("llama", tmp_path, weights=False)
    with pytest.raises(SpecError, match=r"the tokenizer has 300 tokens and model .* a vocabulary of 260"):
        choose_model(None, str(folder), {}, vocab_size=300, seq_len=16)
    with pytest.raises(SpecError, match="sequences of 64 tokens are longer than the 32 positions"):
        choose_model(None, str(folder), {}, vocab_size=None, seq_len=64)
    with pytest.raises(SpecError, match="--set layers changes a model of our own"):
        choose_model(None, str(folder), dict(layers=3), vocab_size=None, seq_len=16)
    (folder / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(SpecError, match="its weights cannot be loaded"):
        open_model(folder).load()
