"""Hugging Face folders of every make, read straight into place: names, ties, prefixes, dtypes, memory, and what is missing."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshfold.engine import CheckpointError, Engine, pretrained
from meshfold.mesh import SpecError
from meshfold.mesh.testing import run_on_ranks, tensor_memory

sys.path.append(str(Path(__file__).parent))  # for the helpers beside this file, on every rank
from hugging_face_families import folder_of, model_of

if importlib.util.find_spec("transformers") is None:  # ranks import it, this process need not
    pytest.skip("transformers is not installed: pip install meshfold[hf]", allow_module_level=True)


def state_of(folder: Path | str, parallel: dict[str, Any] | None = None, **settings: Any) -> dict[str, Tensor]:
    """What an engine holds of a folder, as one process's state dict."""
    with Engine(pretrained(folder, **settings), parallel or {}) as engine:
        return engine.full_state_dict()


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


def rewrite(folder: Path, change: Any) -> None:
    """Change the names and tensors in a folder's only file."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


# -- kinds of files -----------------------------------------------------------------------------------------------


def as_torch_files(folder: Path, *, shards: int, old: bool) -> None:
    """Put torch's own files in the place of safetensors."""
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = list(tensors)
    where = {name: f"pytorch_model-{1 + i % shards:05}-of-{shards:05}.bin" for i, name in enumerate(names)}
    if shards == 1:
        where = dict.fromkeys(names, "pytorch_model.bin")
    else:
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    for file in set(where.values()):
        part = {name: tensors[name] for name in names if where[name] == file}
        torch.save(part, folder / file, _use_new_zipfile_serialization=not old)


@pytest.mark.parametrize("kind", ["one file", "safetensors in shards", "bin", "bin in shards", "bin of torch 1.5"])
def test_every_kind_of_file(kind: str, tmp_path: Path) -> None:
    model = model_of("llama")
    if kind == "safetensors in shards":
        model.save_pretrained(tmp_path, max_shard_size="20KB")
        assert len(list(tmp_path.glob("*.safetensors"))) > 2
    else:
        model.save_pretrained(tmp_path)
    if kind.startswith("bin"):
        as_torch_files(tmp_path, shards=3 if "shards" in kind else 1, old="1.5" in kind)
    assert_same(state_of(tmp_path), model.state_dict())


class Payload:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return print, ("code of the file ran",)


def test_a_bin_file_runs_no_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of("llama", tmp_path)
    (folder / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Payload()}, folder / "pytorch_model.bin")
    with pytest.raises(SpecError, match=r"weights cannot be loaded: cannot read .*pytorch_model\.bin"):
        pretrained(folder)
    assert "code of the file ran" not in capsys.readouterr().out


def test_the_folders_dtype_is_cast_to_the_one_asked_for(tmp_path: Path) -> None:
    model = model_of("llama").to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    wanted = {name: value.float() for name, value in model.state_dict().items()}
    assert_same(state_of(tmp_path), wanted)
    with Engine(pretrained(tmp_path), {}, precision="bf16", optimizer="adamw") as engine:
        assert {p.dtype for p in engine.model.parameters()} == {torch.bfloat16}
        assert_same(engine.full_state_dict(), wanted)


# -- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gpt2", "bert-classes"])
def test_a_base_models_prefix_may_be_missing_or_too_many(kind: str, tmp_path: Path) -> None:
    """The folder of a body gives the body of a model with a head, and the folder of that gives the body alone."""
    model = model_of(kind)
    base = getattr(model, model.base_model_prefix)
    model.save_pretrained(tmp_path / "with")
    base.save_pretrained(tmp_path / "without")
    with Quiet():  # a head that is not used, or new
        body = state_of(tmp_path / "with", model_class=type(base).__name__)
        whole = state_of(tmp_path / "without", model_class=type(model).__name__)
    assert_same(body, base.state_dict())
    wanted = model.state_dict()
    assert whole.keys() == wanted.keys()
    for name, value in wanted.items():
        if not name.startswith("classifier"):
            assert torch.equal(whole[name], value), name


class Quiet:
    """Whatever warning comes."""

    def __enter__(self) -> None:
        import warnings

        self._caught = warnings.catch_warnings()
        self._caught.__enter__()
        warnings.simplefilter("ignore")

    def __exit__(self, *error: Any) -> None:
        self._caught.__exit__(*error)


def test_old_names_of_norms(tmp_path: Path) -> None:
    folder = folder_of("bert", tmp_path)
    wanted = state_of(folder)

    def to_old(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
            for name, value in tensors.items()
        }

    rewrite(folder, to_old)
    assert_same(state_of(folder), wanted)


@pytest.mark.parametrize("key", ["lm_head.weight", "model.embed_tokens.weight"])
def test_a_tied_weight_may_have_either_name(key: str, tmp_path: Path) -> None:
    folder = folder_of("qwen2", tmp_path)
    wanted = state_of(folder)

    def under(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        names = ("lm_head.weight", "model.embed_tokens.weight")
        table = next(tensors[name] for name in names if name in tensors)
        return {**{n: t for n, t in tensors.items() if n not in names}, key: table}

    rewrite(folder, under)
    for parallel in ({}, dict(pipeline=1)):
        assert_same(state_of(folder, parallel), wanted)


def test_tied_weights_that_differ_in_the_folder_are_refused(tmp_path: Path) -> None:
    folder = folder_of("qwen2", tmp_path)
    table = "model.embed_tokens.weight"
    rewrite(folder, lambda tensors: {**tensors, "lm_head.weight": tensors[table] + 1})
    with pytest.raises(SpecError, match="one tensor by the configuration, but the folder has two that differ"):
        Engine(pretrained(folder))
    found = state_of(folder, tie_word_embeddings=False)
    assert torch.equal(found["lm_head.weight"], found[table] + 1)


def test_experts_that_are_apart_in_the_folder_are_put_together(tmp_path: Path) -> None:
    folder = folder_of("mixtral", tmp_path)
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        assert any(".experts.3.w1.weight" in name for name in file.keys())  # noqa: SIM118
    assert_same(state_of(folder), model_of("mixtral").state_dict())


# -- what is missing, too many, or of another shape ------------------------------------------------------------------


def new_head(folder: str, parallel: dict[str, Any]) -> dict[str, Tensor]:
    with Quiet():
        return state_of(folder, parallel, model_class="BertForSequenceClassification", num_labels=5)


def test_a_new_head_is_the_same_under_every_spec_and_told(tmp_path: Path) -> None:
    folder = folder_of("bert", tmp_path)
    with pytest.warns(UserWarning, match="initialised from the seed") as caught:
        engine = Engine(pretrained(folder, model_class="BertForSequenceClassification", num_labels=5))
    assert engine.loaded is not None
    assert engine.loaded.new == (
        "bert.pooler.dense.weight",
        "bert.pooler.dense.bias",
        "classifier.weight",
        "classifier.bias",
    )
    assert any(name.startswith("cls.predictions.") for name in engine.loaded.unused)
    assert str(caught[0].message) == str(engine.loaded)
    wanted = engine.full_state_dict()
    assert wanted["classifier.weight"].shape == (5, 32)
    assert 0.01 < float(wanted["classifier.weight"].std()) < 0.03  # BERT's own initialization
    for parallel in (dict(tensor=2), dict(data=2, zero=dict(stage=3)), dict(pipeline=2)):
        for found in run_on_ranks(2, new_head, str(folder), parallel):
            assert_same(found, wanted)


def test_shapes_that_differ_are_refused_or_made_anew(tmp_path: Path) -> None:
    folder = folder_of("bert-classes", tmp_path)
    with pytest.raises(SpecError, match=r"classifier\.weight is \(3, 32\) in the folder and \(7, 32\) in the model"):
        Engine(pretrained(folder, num_labels=7))
    with pytest.warns(UserWarning, match="its shape is"):
        engine = Engine(pretrained(folder, num_labels=7, ignore_mismatched_sizes=True))
    assert engine.full_state_dict()["classifier.weight"].shape == (7, 32)
    assert engine.loaded is not None
    assert set(engine.loaded.mismatched) == {"classifier.weight", "classifier.bias"}


def test_what_is_wrong_with_a_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="there is no such folder; give a local folder"):
        pretrained(tmp_path / "nowhere")
    with pytest.raises(SpecError, match=r"the folder has no config\.json"):
        pretrained(tmp_path)
    folder = folder_of("llama", tmp_path)
    with pytest.raises(SpecError, match=r"LlamaConfig has no 'hidden_sise'\. Did you mean 'hidden_size'\?"):
        pretrained(folder, hidden_sise=3)
    with pytest.raises(SpecError, match="no model class 'LlamaForCasualLM', which model_class says"):
        pretrained(folder, model_class="LlamaForCasualLM")
    with pytest.raises(SpecError, match="a floating-point dtype"):
        pretrained(folder, dtype=torch.int8)
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(SpecError, match=r"none of its 21 tensors is one of GPT2LMHeadModel"):
        Engine(pretrained(folder))
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-10])
    with pytest.raises(SpecError, match=r"weights cannot be loaded: .* is truncated"):
        pretrained(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(SpecError, match="the folder has no weights"):
        pretrained(folder)


def one_reads_another_folder(folder: str, other: str) -> str:
    import torch.distributed

    with pytest.raises(CheckpointError) as raised:
        Engine(pretrained(other if torch.distributed.get_rank() == 1 else folder), dict(tensor=2))
    return str(raised.value)


def test_what_one_rank_cannot_read_fails_on_all(tmp_path: Path) -> None:
    folder, other = folder_of("qwen2", tmp_path), folder_of("qwen2", tmp_path / "other")
    rewrite(
        other,
        lambda tensors: {name: t[:, :16].contiguous() if "q_proj.weight" in name else t for name, t in tensors.items()},
    )
    for said in run_on_ranks(2, one_reads_another_folder, str(folder), str(other)):
        assert "rank 1: model " in said and "q_proj.weight is (32, 16) in the folder" in said


# -- memory ---------------------------------------------------------------------------------------------------------


def peak_of(folder: str, parallel: dict[str, Any]) -> int:
    with tensor_memory() as memory:
        engine = Engine(pretrained(folder), parallel)
    engine.close()
    return memory.peak


SHARED: dict[str, dict[str, Any]] = {
    "2d": dict(tensor=dict(mode="2d", size=4)),
    "zero 3": dict(data=4, zero=dict(stage=3)),
    "1d": dict(tensor=4),
    "pipeline": dict(pipeline=4),
}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "how", ["2d", "zero 3", *(pytest.param(how, marks=pytest.mark.slow) for how in ("1d", "pipeline"))]
)
def test_no_rank_ever_holds_the_whole_model(how: str, tmp_path: Path) -> None:
    sizes = dict(hidden_size=512, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=8)
    folder = folder_of("llama", tmp_path, **sizes, vocab_size=2000, num_key_value_heads=8)
    whole = (folder / "model.safetensors").stat().st_size
    largest = 4 * 512 * 2048
    assert whole > 140e6
    beside = 12 if how == "zero 3" else 5  # the chunk that is being filled has up to a quarter of the model
    for used in run_on_ranks(4, peak_of, str(folder), SHARED[how]):
        assert used < whole / 4 + beside * largest, f"{used / whole:.2f} of the model"
