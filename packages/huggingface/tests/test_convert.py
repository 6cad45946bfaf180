"""``meshfold convert`` and ``Engine.save_hugging_face``: nothing of a model changes on the way, and transformers loads it."""

from __future__ import annotations

import json
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshfold.checkpoint.tensors import TensorInfo, TensorWriter, open_weights
from meshfold.cli import main
from meshfold.engine import CheckpointError, Engine
from meshfold.huggingface import convert_folder, open_model
from meshfold.mesh.testing import run_on_ranks, tensor_memory
from meshfold.models import build

sys.path.append(str(Path(__file__).parent))  # for the helpers beside this file, on every rank
sys.path.append(str(Path(__file__).parents[2] / "engine" / "tests"))
from checkpoint_edits import edit_state

transformers: Any = pytest.importorskip("transformers", reason="needs meshfold[hf]")

LLAMA: dict[str, Any] = dict(
    vocab_size=37,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=1,
)
GPT2: dict[str, Any] = dict(
    vocab_size=37,
    n_embd=32,
    n_layer=2,
    n_head=4,
    n_positions=32,
    bos_token_id=0,
    eos_token_id=1,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
)


def folder_of(kind: str, folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A folder as transformers writes it, in several shards, with a file that belongs to a tokenizer."""
    config = {
        "llama": lambda: transformers.LlamaConfig(**{**LLAMA, **changes}),
        "gpt2": lambda: transformers.GPT2Config(**{**GPT2, **changes}),
    }[kind]()
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder, max_shard_size="20KB")
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    return folder


def logits(folder: Path) -> Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()
    ids = torch.randint(0, 37, (2, 8), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found: Tensor = model(ids).logits
    return found


def same_bytes(a: Path, b: Path) -> bool:
    first, second = open_weights(a), open_weights(b)
    return set(first) == set(second) and all(
        first[name].dtype == second[name].dtype and torch.equal(first[name], second[name]) for name in first
    )


def through_an_engine(source: str, target: str, parallel: dict[str, Any]) -> None:
    with Engine(open_model(source).load(), parallel, optimizer="sgd") as engine:
        engine.save_hugging_face(target, like=source)


SPECS: list[tuple[int, dict[str, Any]]] = [
    (4, dict(tensor=dict(mode="2d", size=4))),  # which pads a vocabulary of 37
    (2, dict(tensor=2)),
    (2, dict(pipeline=2)),
    (2, dict(data=2, zero=dict(stage=3))),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("kind", "dtype"), [("llama", torch.bfloat16), ("gpt2", torch.float32)], ids=["llama", "gpt2"])
def test_a_folder_comes_back_as_it_was_under_every_spec(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    source = folder_of(kind, tmp_path / "source", dtype)
    assert len([*source.glob("model-*.safetensors")]) > 1
    for number, (size, parallel) in enumerate(SPECS):
        target = tmp_path / f"target{number}"
        run_on_ranks(size, through_an_engine, str(source), str(target), parallel)
        assert same_bytes(source, target), parallel
        assert (target / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
        config, was = (json.loads((one / "config.json").read_text()) for one in (target, source))
        assert config["dtype"] == was["dtype"] == str(dtype).removeprefix("torch.")
        assert torch.equal(logits(target), logits(source))


def test_experts_are_in_files_one_by_one(tmp_path: Path) -> None:
    config = transformers.MixtralConfig(**LLAMA, num_local_experts=4)
    source = tmp_path / "source"
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(source)
    experts = [name for name in open_weights(source) if ".experts." in name]
    assert len(experts) == 2 * 4 * 3  # layers, experts, matrices; in memory there are two to a layer
    engine = Engine(open_model(source).load(), optimizer="sgd")
    engine.save_hugging_face(tmp_path / "exported")
    engine.save(tmp_path / "checkpoint")
    convert_folder(tmp_path / "checkpoint", tmp_path / "converted", to="hf")
    for made in ("exported", "converted"):
        assert same_bytes(source, tmp_path / made)
        assert torch.equal(logits(source), logits(tmp_path / made))


def train_and_save(folder: str, parallel: dict[str, Any], model: str) -> None:
    with Engine(lambda: build(model), parallel, optimizer="adamw") as engine:
        ids = torch.randint(256, (4, 16), generator=torch.Generator().manual_seed(0))
        engine.train_step(engine.shard_batch(ids))
        engine.save(f"{folder}/checkpoint", asynchronous=True)
        engine.save_hugging_face(f"{folder}/exported")


OWN_MODELS: dict[str, dict[str, Any]] = {
    "gpt-tiny": dict(tensor=2),
    "llama-tiny": dict(pipeline=2),
    "llama-moe-tiny": dict(data=2, expert=2),  # Mixtral
}


@pytest.mark.few(2)
@pytest.mark.parametrize("model", OWN_MODELS)
def test_our_own_models_are_theirs(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_on_ranks(2, train_and_save, str(tmp_path), OWN_MODELS[model], model)
    assert main(["convert", f"{tmp_path}/checkpoint", f"{tmp_path}/converted", "--shard-size", "100KB"]) == 0
    assert "a Hugging Face folder; " in capsys.readouterr().out
    assert same_bytes(tmp_path / "exported", tmp_path / "converted")
    engine = Engine(lambda: build(model))
    engine.load(tmp_path / "checkpoint")
    ids = torch.randint(0, 37, (2, 8), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = engine.model.eval()(ids).logits
    assert torch.allclose(logits(tmp_path / "converted"), ours, atol=1e-6)
    back = [
        "convert",
        f"{tmp_path}/converted",
        f"{tmp_path}/back",
        "--to",
        "checkpoint",
        "--names",
        "meshfold",
    ]
    assert main(back) == 0
    other = Engine(lambda: build(model), seed=1)
    other.load(tmp_path / "back", weights_only=True)
    for name, value in engine.full_state_dict().items():
        assert torch.equal(other.full_state_dict()[name], value), name


@pytest.mark.parametrize("tied", ["transformer.wte.weight", "lm_head.weight"])
def test_bin_files_with_either_name_of_a_tied_tensor(tied: str, tmp_path: Path) -> None:
    source = folder_of("gpt2", tmp_path / "source")
    state = {name: value.clone() for name, value in open_weights(source).items()}
    state[tied] = state.pop("transformer.wte.weight")
    state["transformer.h.0.attn.bias"] = torch.ones(1, 1, 32, 32)  # a mask, as old files have
    names = sorted(state)
    old = tmp_path / "old"
    old.mkdir()
    shutil.copyfile(source / "config.json", old / "config.json")
    where = {}
    for number, part in enumerate((names[:5], names[5:])):
        file = f"pytorch_model-0000{number + 1}-of-00002.bin"
        torch.save({name: state[name] for name in part}, old / file)
        where.update(dict.fromkeys(part, file))
    (old / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    safe = convert_folder(old, tmp_path / "safe", to="hf", dtype="bfloat16")
    assert (safe.tensors, safe.files, safe.kind) == (len(state), 1, "hf")
    for name, value in open_weights(tmp_path / "safe").items():
        assert torch.equal(value, state[name].bfloat16())
    assert json.loads((tmp_path / "safe" / "config.json").read_text())["dtype"] == "bfloat16"
    convert_folder(old, tmp_path / "ours", to="checkpoint", names="meshfold")
    engine = Engine(lambda: build("gpt-tiny", vocab_size=37, hidden=32, max_positions=32))
    engine.load(tmp_path / "ours", weights_only=True)
    ids = torch.randint(0, 37, (2, 8), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(engine.model.eval()(ids).logits, logits(source), atol=1e-6)


def test_what_is_no_tensor_is_not_loaded(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "ran",)

    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "source" / "pytorch_model.bin").write_bytes(pickle.dumps({"weight": Evil()}, protocol=2))
    with pytest.raises(CheckpointError, match=r"cannot read .*pytorch_model\.bin"):
        convert_folder(tmp_path / "source", tmp_path / "target", to="hf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_what_cannot_be_converted_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = folder_of("gpt2", tmp_path / "source")

    def said(*words: str) -> str:
        capsys.readouterr()
        assert main(["convert", *words]) != 0
        text = capsys.readouterr().err
        assert text.count("\n") == 1
        return text

    there, new = str(source), str(tmp_path / "new")
    assert "there is no such folder" in said(str(tmp_path / "nowhere"), new)
    (tmp_path / "empty").mkdir()
    assert "no state.json and no weights" in said(str(tmp_path / "empty"), new)
    assert "already exists: remove it" in said(there, there)
    assert "goes with --to checkpoint" in said(there, new, "--names", "meshfold")
    assert "has no config.json" in said(there, new, "--like", str(tmp_path / "empty"))
    assert "name the preset" in said(there, new, "--set", "layers=2")
    with pytest.raises(SystemExit, match="2"):
        main(["convert", there, new, "--shard-size", "much"])
    assert "'much' is not an amount of memory: write 24GiB" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["convert", there, new, "--shard-size", "5"])
    assert "'5' has no unit: write 5GiB" in capsys.readouterr().err
    config = source / "config.json"
    text = config.read_text()
    ours = (there, new, "--to", "checkpoint", "--names", "meshfold")
    for old, changed, message in [
        ('"gelu_new"', '"relu"', "activation_function='relu', and our model computes with 'gelu_new'"),
        ('"gpt2"', '"opt"', "no model of ours like 'opt'"),
        ('"n_layer": 2', '"n_layer": 3', "lacks 'transformer.h.2"),
        ('"n_layer": 2', '"n_layer": 1', "has 'transformer.h.1"),
    ]:
        assert old in text
        config.write_text(text.replace(old, changed))
        assert message in said(*ours)
    config.write_text(text)
    shard = sorted(source.glob("model-*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-8])
    assert f"{shard.name} is truncated" in said(there, new)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "source"]


def test_an_old_checkpoint_is_told_what_it_is_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = Engine(lambda: build("gpt-tiny", layers=1))
    engine.save(tmp_path / "checkpoint")
    edit_state(tmp_path / "checkpoint", lambda state: state.pop("model"))
    words = ["convert", str(tmp_path / "checkpoint"), str(tmp_path / "new")]
    assert main(words) == 1
    assert "does not say which GPT or Llama it belongs to" in capsys.readouterr().err
    assert main([*words, "--model", "gpt-tiny", "--set", "layers=1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tensors"] == 16
    engine.save_hugging_face(tmp_path / "exported")
    assert same_bytes(tmp_path / "new", tmp_path / "exported")


def test_no_more_than_a_tensor_is_in_memory(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text('{"model_type": "opt"}')
    announced = {f"layer{n}": TensorInfo(dtype=torch.float32, shape=(2**20,)) for n in range(40)}
    with TensorWriter(source / "model.safetensors", announced) as writer:
        for name in writer.order:
            writer.write(name, torch.randn(2**20))
    with tensor_memory() as memory:
        convert_folder(source, tmp_path / "target", to="hf", dtype="bfloat16", shard_bytes=10 * 2**20)
    # Of 160 MiB in tensors of 4, which are read from a mapped file: one in bfloat16, and what makes it.
    assert 2 * 2**20 <= memory.peak < 12 * 2**20, memory
