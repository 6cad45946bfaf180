"""Folders that somebody else has made: nothing of them is run, they reach no file outside, and damage is one sentence."""

from __future__ import annotations

import ast
import builtins
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshfold.checkpoint.tensors import TensorFile, TensorInfo, TensorWriter, open_tensors, open_weights
from meshfold.engine import CheckpointError, Engine, pretrained
from meshfold.mesh import SpecError

sys.path.append(str(Path(__file__).parent))  # for the helpers beside this file, on every rank
from checkpoint_edits import edit_state, relist

PACKAGES = Path(__file__).parents[2]


class Bomb:
    """Runs a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


# -- code -------------------------------------------------------------------------------------------------------------


def gpt2(folder: Path) -> Path:
    transformers = pytest.importorskip("transformers", reason="needs meshfold[hf]")
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, n_positions=16, vocab_size=17)
    torch.manual_seed(1)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def edited(folder: Path, **entries: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))
    return folder


def test_code_of_a_folder_is_not_run_and_nobody_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal transformers asks [y/N], and y runs it."""
    asked: list[object] = []

    def yes(*said: object) -> str:
        asked.append(said)
        return "y"

    monkeypatch.setattr(builtins, "input", yes)
    folder = edited(
        gpt2(tmp_path / "model"),
        model_type="evil",
        auto_map={
            "AutoConfig": "evil.EvilConfig",
            "AutoModelForCausalLM": "evil.Evil",
            "AutoTokenizer": "evil.Evil",
        },
    )
    (folder / "evil.py").write_text(
        f"import pathlib; pathlib.Path({str(tmp_path / 'ran')!r}).touch()\n"
        "from transformers import PretrainedConfig, GPT2LMHeadModel\n"
        "class EvilConfig(PretrainedConfig):\n    model_type = 'evil'\n"
        "class Evil(GPT2LMHeadModel): pass\n"
    )
    from meshfold.data.tokenizers import HuggingFaceTokenizer
    from meshfold.huggingface import open_model

    with pytest.raises(SpecError, match=r"asks for its own code \(auto_map\), which Meshfold never runs"):
        pretrained(folder)
    with pytest.raises(SpecError, match="which Meshfold never runs"):
        open_model(folder)
    (folder / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["evil.Evil", null]}}')
    with pytest.raises(SpecError):
        HuggingFaceTokenizer(folder)
    edited(folder, model_type="gpt2", architectures=["AutoModelForCausalLM"])
    Engine(pretrained(folder)).close()  # transformers' own class
    assert not asked and not (tmp_path / "ran").exists()


def test_every_call_of_transformers_refuses_code() -> None:
    calls = []
    for path in sorted(PACKAGES.glob("*/src/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if (
                node.func.attr not in ("from_pretrained", "from_config")
                or ast.unparse(node.func) == "PeftConfig.from_pretrained"
            ):
                continue
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            calls.append(given.get("trust_remote_code") == "False" or given.get(None) == "NO_REMOTE_CODE")
            assert calls[-1], f"{path}:{node.lineno} may run code of the folder's: {ast.unparse(node)}"
    assert len(calls) >= 4


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    folder = gpt2(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    torch.save({"w": Bomb(tmp_path / "ran")}, folder / "pytorch_model.bin")
    with pytest.raises(SpecError, match="cannot be loaded: cannot read"):
        pretrained(folder)
    assert not (tmp_path / "ran").exists()


def engine_of() -> Engine:
    torch.manual_seed(0)
    return Engine(
        nn.Linear(2, 2),
        optimizer=dict(name="adamw", lr=0.1),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1),
        loss_fn=lambda out, batch: out.sum(),
    )


@pytest.mark.parametrize("name", ["scheduler.pt", "extra_state.pt"])
def test_pickles_of_a_checkpoint_are_not_run(name: str, tmp_path: Path) -> None:
    engine = engine_of()
    engine.train_step(torch.ones(2, 2))
    engine.save(tmp_path / "ckpt")
    torch.save({"x": Bomb(tmp_path / "ran")}, tmp_path / "ckpt" / name)
    edit_state(tmp_path / "ckpt", lambda state: (state["files"].update({name: 0}), state["sums"].update({name: ""})))
    relist(tmp_path / "ckpt")
    with pytest.raises(CheckpointError, match=f"cannot read .*{name}"):
        engine.load(tmp_path / "ckpt")
    assert not (tmp_path / "ran").exists()
    engine.close()


def test_the_pickle_of_a_folder_of_lightning_is_not_run(tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="needs meshfold[lightning]")
    from meshfold.lightning import consolidate

    saved = Path(__file__).parent / "saved_before"
    consolidate(saved / "lightning", tmp_path / "whole.ckpt")  # one of an earlier version, too
    whole = torch.load(tmp_path / "whole.ckpt", weights_only=True)
    expected = torch.load(saved / "lightning_state_dict.pt", weights_only=True)
    assert all(torch.equal(whole["state_dict"][name], expected[name]) for name in expected)
    shutil.copytree(saved / "lightning", tmp_path / "ckpt")
    torch.save({"x": Bomb(tmp_path / "ran")}, tmp_path / "ckpt" / "lightning.pt")
    state = json.loads((tmp_path / "ckpt" / "state.json").read_text())
    state["files"]["lightning.pt"] = (tmp_path / "ckpt" / "lightning.pt").stat().st_size
    (tmp_path / "ckpt" / "state.json").write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match=r"trust whoever has written it, load it with weights_only=False"):
        consolidate(tmp_path / "ckpt", tmp_path / "evil.ckpt")
    assert not (tmp_path / "ran").exists() and not (tmp_path / "evil.ckpt").exists()


def test_a_folder_that_lightning_removes_keeps_what_is_not_the_checkpoints(tmp_path: Path) -> None:
    """ModelCheckpoint removes all but the best few."""
    pytest.importorskip("lightning", reason="needs meshfold[lightning]")
    from meshfold.lightning import MeshfoldStrategy

    for name in ("clean", "noted"):
        shutil.copytree(Path(__file__).parent / "saved_before" / "lightning", tmp_path / name)
    (tmp_path / "noted" / "notes.md").write_text("why")
    (tmp_path / "last.ckpt").touch()
    for name in ("clean", "noted", "last.ckpt"):
        MeshfoldStrategy({}).remove_checkpoint(tmp_path / name)
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == [
        "noted",
        "noted/notes.md",
    ]


# -- files outside ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("file", ["../private/w.safetensors", "/etc/passwd", ".", "..", "x\0y", "", 5, ["x"], None])
def test_an_index_names_files_of_its_folder(name: str, file: Any, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / f"{name}.index.json").write_text(json.dumps({"weight_map": {"w": file}}))
    with pytest.raises(CheckpointError, match=r"says that 'w' is in .*, which is not a file of its folder"):
        open_weights(tmp_path / "model")


@pytest.mark.parametrize("text", ["[1]", '{"weight_map": null}', '{"weight_map": 5}', "{", "\xff", "[" * 100_000, "{}"])
def test_an_index_that_is_damaged(text: str, tmp_path: Path) -> None:
    for name in ("model.safetensors", "pytorch_model.bin"):
        (tmp_path / f"{name}.index.json").write_bytes(text.encode("latin-1"))
        with pytest.raises(CheckpointError, match=r"cannot read .*index.json"):
            open_weights(tmp_path)
        (tmp_path / f"{name}.index.json").unlink()


def test_weights_that_are_links_to_somewhere_else(tmp_path: Path) -> None:
    gpt2(tmp_path / "private")
    gpt2(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    (tmp_path / "model" / "model.safetensors").symlink_to(tmp_path / "private" / "model.safetensors")
    with pytest.raises(SpecError, match=r"is a link to .*, which is not in the folder"):
        pretrained(tmp_path / "model")
    (tmp_path / "other").symlink_to(tmp_path / "private")
    Engine(pretrained(tmp_path / "other")).close()  # the folder itself may be a link


# -- damage -----------------------------------------------------------------------------------------------------------


def header(entries: Any, tail: bytes = b"\0" * 16) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + tail


def tensor(dtype: Any = "F32", shape: Any = (4,), data_offsets: Any = (0, 16), **more: Any) -> dict[str, Any]:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": data_offsets, **more}}


ODD: dict[str, bytes] = {
    "negative offsets": header(tensor(data_offsets=[-16, 0])),
    "offsets before the file": header(tensor(data_offsets=[-20, -4])),
    "shape is not offsets": header(tensor(shape=[1000])),
    "negative shape": header(tensor(shape=[-1])),
    "two negative dims": header(tensor(shape=[-2, -2])),
    "shape of text": header(tensor(shape=["x"])),
    "shape of bools": header(tensor(shape=[True] * 4)),
    "shape is a number": header(tensor(shape=4)),
    "no shape": header({"a": {"dtype": "F32", "data_offsets": [0, 16]}}),
    "no offsets": header({"a": {"dtype": "F32", "shape": [4]}}),
    "one offset": header(tensor(data_offsets=[0])),
    "offsets are floats": header(tensor(data_offsets=[0.0, 16.0])),
    "offsets the wrong way round": header(tensor(data_offsets=[16, 0])),
    "offsets beyond the file": header(tensor(shape=[8], data_offsets=[0, 32])),
    "entry is a list": header({"a": [1]}),
    "dtype is a list": header(tensor(dtype=[])),
    "metadata is a list": header({"__metadata__": [1], **tensor()}),
    "a note is a number": header({"__metadata__": {"crc32": 5}, **tensor()}),
    "empty tensor of a huge shape": header(tensor(shape=[0, 1 << 62], data_offsets=[0, 0])),
    "0 bytes of a huge shape": header(tensor(shape=[1 << 40], data_offsets=[0, 0])),
    "nested": header(b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"),
    "overlap": header({**tensor(), "b": tensor(data_offsets=[8, 24])["a"]}, b"\0" * 24),
    "a hole": header({**tensor(), "b": tensor(data_offsets=[20, 36])["a"]}, b"\0" * 36),
    "bytes of no tensor": header(tensor(), b"\0" * 32),
    "a header longer than the file": (1 << 62).to_bytes(8, "little") + b"{}",
    "no header": b"\0" * 8,
    "no UTF-8": header(b'{"\xff": 1}'),
    "an array": header([1]),
    "nothing": b"",
}


@pytest.mark.parametrize("kind", ODD)
def test_an_odd_header_is_refused(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", None)  # nothing is allocated
    (tmp_path / "odd.safetensors").write_bytes(ODD[kind])
    with pytest.raises(CheckpointError, match=r"odd.safetensors"):
        TensorFile(tmp_path / "odd.safetensors")


def test_a_right_header_is_not_refused(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(header(tensor()))
    assert TensorFile(tmp_path / "a.safetensors")["a"].tolist() == [0.0] * 4
    (tmp_path / "a.safetensors").unlink()
    os.mkfifo(tmp_path / "a.safetensors")  # would wait for ever
    with pytest.raises(CheckpointError, match="is not a file"):
        TensorFile(tmp_path / "a.safetensors")


def test_a_header_that_has_changed_is_seen(tmp_path: Path) -> None:
    """Two names that changed places are right by themselves: both tensors are of one shape."""
    engine = engine_of()
    engine.train_step(torch.ones(2, 2))
    engine.save(tmp_path / "ckpt")
    path = tmp_path / "ckpt" / "optimizer.safetensors"
    whole = path.read_bytes()
    swapped = whole.replace(b'"weight/exp_avg"', b'"weight/exp_xxx"').replace(
        b'"weight/exp_avg_sq"', b'"weight/exp_avg"'
    )
    path.write_bytes(swapped.replace(b'"weight/exp_xxx"', b'"weight/exp_avg_sq"'))
    assert path.stat().st_size == len(whole)
    with pytest.raises(CheckpointError, match="the checksum of its header does not match"):
        open_tensors(tmp_path / "ckpt", "optimizer.safetensors")
    with pytest.raises(CheckpointError, match="is damaged or another checkpoint's"):
        engine.load(tmp_path / "ckpt")
    engine.close()


def test_a_file_of_another_checkpoint_is_not_taken(tmp_path: Path) -> None:
    engine = engine_of()
    for step in (1, 2):
        engine.train_step(torch.ones(2, 2))
        engine.save(tmp_path / str(step))
    before = engine.full_state_dict()
    for name in ("model.safetensors", "optimizer.safetensors", "scheduler.pt"):
        shutil.copytree(tmp_path / "1", tmp_path / "mixed")
        shutil.copy(tmp_path / "2" / name, tmp_path / "mixed")
        with pytest.raises(CheckpointError, match=f"{name} is damaged or another checkpoint's"):
            engine.load(tmp_path / "mixed")
        shutil.rmtree(tmp_path / "mixed")
    after = engine.full_state_dict()
    assert engine.steps == 2 and all(torch.equal(before[name], after[name]) for name in before)
    engine.close()


@pytest.mark.parametrize(
    "change",
    [
        {"architectures": [5]},
        {"architectures": "GPT2LMHeadModel"},
        {"architectures": ["os.system"]},
        {"architectures": ["pipeline"]},
        {"architectures": {}},
        {"n_embd": "x"},
        {"vocab_size": None},
        {"attn_implementation": "someone/kernels"},
        {"model_type": 5},
        {"model_type": []},
        {"rope_scaling": 7},
    ],
    ids=str,
)
def test_an_odd_configuration(change: dict[str, Any], tmp_path: Path) -> None:
    """What transformers takes all the same is a model of its own; all else is one sentence of ours."""
    folder = edited(gpt2(tmp_path / "model"), **change)
    try:
        engine = Engine(pretrained(folder))
    except SpecError as error:
        said = str(error)
        assert str(folder) in said and not said.endswith(":") and "\n" not in said, said
    else:
        engine.close()
        assert change in ({"architectures": "GPT2LMHeadModel"}, {"architectures": {}})  # by some versions


def without_seal(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change ``state.json`` of a checkpoint as an earlier version has written them: without checksums."""
    state = json.loads((folder / "state.json").read_text())
    for key in ("checksum", "sums"):
        state.pop(key, None)
    change(state)
    (folder / "state.json").write_text(json.dumps(state))


def group(**settings: Any) -> Callable[[dict[str, Any]], object]:
    return lambda state: state["optimizer"]["groups"][0].update(settings)


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    **{
        f"{key} {value!r}": (lambda state, key=key, value=value: state.update({key: value}), f"its {key} is not")
        for key, value in [
            ("seed", "x"),
            ("seed", 1.5),
            ("seed", None),
            ("step", -1),
            ("step", True),
            ("micro_step", 1e400),
            ("skipped_steps", []),
            ("scaler", {"scale": 1.0}),
            ("scaler", {"scale": "x", "good_steps": 0, "overflows": 0}),
            ("ties", []),
            ("ties", {"a": 1}),
            ("data", {"train": 5}),
            ("data", {"train": {"epoch": "x", "served": 0}}),
            ("model", 5),
            ("optimizer", 5),
            ("optimizer", {"class": "AdamW", "groups": [5], "values": {}}),
            ("spec", 5),
            ("precision", []),
            ("files", {"model.safetensors": "x"}),
            ("files", {"../model.safetensors": 5}),
            ("extra_state", 5),
        ]
    },
    "format": (lambda state: state.update(format=[]), "has format"),
    "format as a bool": (lambda state: state.update(format=True), "has format"),
    "no files": (lambda state: state.update(files={}), "lists no file of a model"),
    "lr": (group(lr="x"), "has lr='x' in group 0"),
    "lr nan": (group(lr=float("nan")), "has lr=nan in group 0"),
    "betas": (group(betas=[0.9]), "has betas="),
    "amsgrad": (group(amsgrad=5), "has amsgrad=5"),
}


def test_a_field_of_an_earlier_version_that_is_damaged_is_seen_before_anything_is_loaded(
    tmp_path: Path,
) -> None:
    """There was no checksum then."""
    engine = engine_of()
    engine.train_step(torch.ones(2, 2))
    engine.save(tmp_path / "ckpt")
    engine.train_step(torch.ones(2, 2))
    before = engine.full_state_dict()
    for name, (change, said) in CHANGES.items():
        shutil.copytree(tmp_path / "ckpt", tmp_path / "damaged")
        without_seal(tmp_path / "damaged", change)
        with pytest.raises(CheckpointError, match=said):
            engine.load(tmp_path / "damaged")
        shutil.rmtree(tmp_path / "damaged")
        after = engine.full_state_dict()
        assert engine.steps == 2 and all(torch.equal(before[key], after[key]) for key in before), name
    without_seal(tmp_path / "ckpt", lambda state: None)
    engine.load(tmp_path / "ckpt")
    assert engine.steps == 1
    engine.close()


def test_a_moment_of_another_shape_is_seen_before_anything_is_loaded(tmp_path: Path) -> None:
    engine = engine_of()
    engine.train_step(torch.ones(2, 2))
    engine.save(tmp_path / "ckpt")
    path = tmp_path / "ckpt" / "optimizer.safetensors"
    found = {name: value.clone() for name, value in TensorFile(path).items()}
    found["weight/exp_avg"] = torch.zeros(3, 2)
    described = {name: TensorInfo(dtype=value.dtype, shape=tuple(value.shape)) for name, value in found.items()}
    with TensorWriter(path, described) as writer:
        for name in writer.order:
            writer.write(name, found[name])
    relist(tmp_path / "ckpt")
    engine.train_step(torch.ones(2, 2))
    with pytest.raises(CheckpointError, match=r"has exp_avg of shape \(3, 2\) for 'weight', which is \(2, 2\) here"):
        engine.load(tmp_path / "ckpt")
    assert engine.steps == 2
    engine.close()
