"""``meshfold convert --experts``: a dense folder becomes a mixture that transformers loads, and that computes the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshfold.cli import main
from meshfold.engine import CheckpointError, Engine
from meshfold.huggingface import convert_folder, pretrained
from meshfold.mesh import SpecError
from meshfold.models import build

transformers: Any = pytest.importorskip("transformers", reason="needs meshfold[hf]")

SMALL: dict[str, Any] = dict(
    vocab_size=37,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
)
DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", dict(rope_parameters=dict(rope_type="linear", factor=2.0, rope_theta=10000.0))),
    "mistral": ("MistralConfig", dict(sliding_window=4, tie_word_embeddings=True)),
    "qwen3": ("Qwen3Config", dict(head_dim=8)),
}


def folder_of(kind: str, folder: Path) -> Path:
    name, more = DENSE[kind]
    torch.manual_seed(3)
    config = getattr(transformers, name)(**SMALL, **more)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64).save_pretrained(folder)
    return folder


def logits(folder: Path) -> Tensor:
    more = dict(experts_implementation="eager") if "moe" in str(folder) else {}  # the default takes no float64
    model = transformers.AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float64, **more).eval()
    ids = torch.randint(0, 37, (2, 8), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found: Tensor = model(ids).logits
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "becomes"), [("llama", "mixtral"), ("mistral", "mixtral"), ("qwen3", "qwen3_moe")], ids=[*DENSE]
)
def test_a_dense_folder_becomes_a_mixture_that_computes_the_same(kind: str, becomes: str, tmp_path: Path) -> None:
    dense, moe = folder_of(kind, tmp_path / "dense"), tmp_path / "moe"
    words = ["convert", str(dense), str(moe), "--experts", "4", "--top-k", "3", "--shard-size", "20KB"]
    assert main(words) == 0
    config = json.loads((moe / "config.json").read_text())
    assert config["model_type"] == becomes and config["num_experts_per_tok"] == 3
    # Rounding in the sum of weights alone: routers compute in float32.
    torch.testing.assert_close(logits(moe), logits(dense), rtol=1e-6, atol=1e-6)
    with Engine(pretrained(moe), device="cpu") as engine:  # which has its experts stacked
        assert sum("expert" in name for name, _ in engine.model.named_parameters()) == 4


def test_a_checkpoint_of_ours_becomes_one_and_routers_are_drawn_for_each_layer(tmp_path: Path) -> None:
    torch.manual_seed(0)
    with Engine(build("llama-tiny"), precision="fp32", device="cpu") as engine:
        engine.save(tmp_path / "checkpoint")
    done = convert_folder(tmp_path / "checkpoint", tmp_path / "moe", to="hf", experts=4, top_k=2)
    assert done.kind == "hf"
    found = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / "moe"))
    first, second = (layer.mlp.gate.weight for layer in found.model.layers)
    assert 0.01 < first.std() < 0.03 and not torch.equal(first, second)
    one, *others = found.model.layers[0].mlp.experts.down_proj
    assert all(torch.equal(one, other) for other in others)


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense = folder_of("llama", tmp_path / "dense")

    def refused(words: list[str], said: str) -> None:
        assert main(["convert", str(dense), str(tmp_path / "out"), *words]) != 0
        assert said in capsys.readouterr().err

    refused(["--top-k", "2"], "--top-k 2 goes with --experts")
    refused(["--experts", "4", "--to", "checkpoint"], f"meshfold convert {tmp_path / 'out'} CHECKPOINT --to checkpoint")
    refused(["--experts", "4", "--top-k", "5"], "top_k=5: a token goes to 1 to 4 of 4 experts")
    refused(["--experts", "1"], "experts=1: a mixture has at least 2 experts")
    config = json.loads((dense / "config.json").read_text())
    for changes, said in (
        (dict(model_type="qwen2"), "only llama, mistral, qwen3 have one"),
        (dict(mlp_bias=True), "config.json says mlp_bias=True, and Mixtral computes with False"),
        (
            dict(num_hidden_layers=3),
            "6 weights of gate, up and down in 2 layers, and config.json says num_hidden_layers=3",
        ),
    ):
        (dense / "config.json").write_text(json.dumps(config | changes))
        refused(["--experts", "4"], said)
    assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError, match="then convert that folder to a checkpoint"):
        convert_folder(dense, tmp_path / "out", to="checkpoint", experts=4)
    (dense / "config.json").write_text(json.dumps(config))
    with pytest.raises(SpecError, match="at least 2 experts"):
        convert_folder(dense, tmp_path / "out", to="hf", experts=1)
