"""Folders to damage, and how each is read: what comes back is compared with what a whole folder gives."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from meshfold.checkpoint.folder import SCHEDULER_FILE, begin_checkpoint, commit_checkpoint
from meshfold.checkpoint.state import FORMAT_SHARDED, file_checksum, with_checksum
from meshfold.checkpoint.tensors import (
    TensorInfo,
    TensorWriter,
    open_weights,
    shard_file_name,
    shard_key,
    verify_checksums,
    write_shard_index,
)
from meshfold.data.corpus import open_corpus
from meshfold.data.records import find_records, texts_of
from meshfold.data.tokenizers import ByteTokenizer
from meshfold.engine import Engine
from meshfold.engine.checkpoints.checkpoint import MODEL_FILE, OPTIMIZER_FILE, Checkpoint
from meshfold.huggingface.adapter import Adapter
from meshfold.huggingface.folder_config import read_raw_config
from meshfold.huggingface.folder_writer import FolderWriter
from meshfold.mesh import SpecError
from meshfold.train import run_folder
from meshfold.train.settings import TrainSettings

Contents = dict[str, Any]
"""Tensors and other values by name."""


@dataclass(frozen=True)
class Subject:
    """A kind of folder.

    Attributes:
        name: of the kind.
        make: writes one; folders of two seeds differ in their contents alone.
        read: returns what is in one, or raises an error of ours.
        exact: whether damage must not change what is read: False where a format has no checksums, and only errors are looked at.
        named: whether a file says which folder it is of; else one of another folder is as good.
        spared: a file that is not damaged.
        after: makes a damaged folder consistent again, as somebody who damages it on purpose would.
    """

    name: str
    make: Callable[[Path, int], None]
    read: Callable[[Path], Contents]
    exact: bool = True
    named: bool = True
    spared: str = ""
    after: Callable[[Path], None] | None = None


# -- checkpoints ------------------------------------------------------------------------------------------------------


class Layer(nn.Linear):
    """A layer with extra state."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.seen: Any = (1, torch.tensor([2.0]))

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = (int(state["seen"][0]), state["seen"][1].clone())


class Rows:
    """The dataset of some rows."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> Tensor:
        return torch.full((3,), float(i))


def engine_of(seed: int) -> Engine:
    """A small engine with all that a checkpoint keeps; two steps were trained."""
    torch.manual_seed(seed)
    engine = Engine(
        nn.Sequential(Layer(), nn.LayerNorm(3), nn.Linear(3, 2)),
        optimizer=dict(name="adamw", lr=0.1, no_decay="norms_and_biases"),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2),
        loss_fn=lambda out, batch: out.square().mean(),
        seed=seed,
    )
    for number, batch in enumerate(engine.dataloader(Rows(), batch_size=4)):
        engine.train_step(batch)
        if number == 1:
            break
    return engine


def contents(engine: Engine) -> Contents:
    """All of an engine that a load may change."""
    found: Contents = {**engine.full_state_dict()}
    assert engine.optimizer is not None and engine.lr_scheduler is not None
    found |= {
        f"optimizer {key}": source.read().clone() for key, source in engine.model_state.optimizer_sources().items()
    }
    found["groups"] = [{k: v for k, v in group.items() if k != "params"} for group in engine.optimizer.param_groups]
    found["counters"] = [
        engine.steps,
        engine.micro_step,
        engine.skipped_steps,
        engine.runner.seed,
        engine.runner.scaler.state_dict(),
    ]
    found["rest"] = [engine.lr_scheduler.state_dict(), engine.data_positions.state_dict()]
    return found


def save_whole(folder: Path, seed: int) -> None:
    """A checkpoint as ``engine.save`` writes it."""
    with engine_of(seed) as engine:
        engine.save(folder)


def save_rectangles(folder: Path, seed: int) -> None:
    """A checkpoint as two ranks write it beside the training: each tensor in two rectangles."""
    whole = folder.with_name(f".{folder.name}-whole")
    save_whole(whole, seed)
    found = Checkpoint(whole)
    with ExitStack() as mine:
        writing = begin_checkpoint(folder, mine)
        for name in (MODEL_FILE, OPTIMIZER_FILE):
            tensors = found.tensors(name)
            pieces: list[dict[str, Tensor]] = [{}, {}]
            for key, value in tensors.items():
                middle = value.shape[0] // 2 if value.dim() else 0
                for rank, (start, end) in enumerate(((0, middle), (middle, value.shape[0] if value.dim() else 0))):
                    if value.dim() and end > start:
                        part = value[start:end]
                        offsets = (start,) + (0,) * (value.dim() - 1)
                        pieces[rank][shard_key(key, offsets, tuple(part.shape))] = part
                if not value.dim():
                    pieces[0][shard_key(key, (), ())] = value
            for rank, mapped in enumerate(pieces):
                announced = {
                    key: TensorInfo(dtype=value.dtype, shape=tuple(value.shape)) for key, value in mapped.items()
                }
                with TensorWriter(writing / shard_file_name(name, rank, 2), announced) as writer:
                    for key in writer.order:
                        writer.write(key, mapped[key])
            every = {key: TensorInfo(dtype=value.dtype, shape=tuple(value.shape)) for key, value in tensors.items()}
            write_shard_index(writing, name, every, 2)
        state = {key: value for key, value in found.state.items() if key not in ("files", "sums", "checksum")}
        small = {SCHEDULER_FILE: found.scheduler, "extra_state.pt": found.small_file("extra_state.pt")}
        commit_checkpoint(writing, folder, {**state, "format": FORMAT_SHARDED}, small)
    shutil.rmtree(whole)


class Loader:
    """Loads checkpoints into one engine; one that is refused must leave it as it was."""

    def __init__(self, scratch: Path) -> None:
        self._engine = engine_of(3)
        self._own = scratch / "own"
        self._engine.save(self._own)

    def __call__(self, folder: Path) -> Contents:
        """Load, and return the engine's contents."""
        before = contents(self._engine)
        try:
            self._engine.load(folder)
        except BaseException:
            now = contents(self._engine)
            assert same(now, before), "a load that failed has changed the engine"
            raise
        try:
            return contents(self._engine)
        finally:
            self._engine.load(self._own)


def relist(folder: Path) -> None:
    """Let the index of a checkpoint agree with what is there, as far as it can be read."""
    path = folder / "state.json"
    try:
        state = json.loads(path.read_text())
        for name in state["files"]:
            if (folder / name).is_file():
                state["files"][name] = (folder / name).stat().st_size
                state["sums"][name] = file_checksum(folder / name)
        path.write_text(json.dumps(with_checksum(state)))
    except Exception:  # it is what was damaged
        return


# -- models and adapters ----------------------------------------------------------------------------------------------


def tensors_of(seed: int) -> dict[str, Tensor]:
    """Some tensors, of several dtypes."""
    dice = torch.Generator().manual_seed(seed)
    return {
        "model.embed.weight": torch.randn(8, 4, generator=dice),
        "model.layers.0.weight": torch.randn(4, 4, generator=dice).bfloat16(),
        "model.layers.1.weight": torch.randn(4, 4, generator=dice).bfloat16(),
        "model.norm.weight": torch.randn(4, generator=dice),
    }


def export(folder: Path, seed: int) -> None:
    """A Hugging Face folder, in shards with an index."""
    tensors = tensors_of(seed)
    announced = {name: TensorInfo(dtype=value.dtype, shape=tuple(value.shape)) for name, value in tensors.items()}
    writer = FolderWriter(folder, announced, config={"model_type": "llama", "hidden_size": 4}, shard_bytes=100)
    for name, value in tensors.items():
        writer.write(name, value)
    writer.close()


def export_bin(folder: Path, seed: int) -> None:
    """A Hugging Face folder in torch's format, in shards with an index."""
    folder.mkdir()
    tensors = tensors_of(seed)
    where = {}
    for number, name in enumerate(tensors):
        where[name] = f"pytorch_model-{number // 2 + 1:05}-of-00002.bin"
    for file in sorted(set(where.values())):
        torch.save({name: tensors[name] for name in where if where[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))


def read_model(folder: Path) -> Contents:
    """The weights; the configuration is read and not compared."""
    read_raw_config(folder)
    files = open_weights(folder)
    verify_checksums(files, 0, 1)
    return {name: files[name].clone() for name in files}


def save_adapter(folder: Path, seed: int) -> None:
    """A folder of peft."""
    from peft import LoraConfig

    folder.mkdir()
    LoraConfig(r=2, target_modules=["q_proj"]).save_pretrained(str(folder))
    dice = torch.Generator().manual_seed(seed)
    tensors = {
        f"base_model.layers.{n}.q_proj.lora_{x}.weight": torch.randn(2, 4, generator=dice)
        for n in range(2)
        for x in "AB"
    }
    announced = {name: TensorInfo(dtype=value.dtype, shape=tuple(value.shape)) for name, value in tensors.items()}
    with TensorWriter(folder / "adapter_model.safetensors", announced) as writer:
        for name in writer.order:
            writer.write(name, tensors[name])


def read_adapter(folder: Path) -> Contents:
    """The trained values; the configuration is read and not compared."""
    files = Adapter.of(folder).files()
    return {name: files[name].clone() for name in files}


# -- data and settings ------------------------------------------------------------------------------------------------


def tokenise(folder: Path, seed: int) -> None:
    """A text and the cache of its tokens."""
    folder.mkdir()
    (folder / "text.txt").write_text(f"All work and no play, {seed} times. " * 40)
    read_cache(folder)


def read_cache(folder: Path) -> Contents:
    """The tokens of the text, from the cache if it is whole."""
    text = folder / "text.txt"
    corpus = open_corpus(text, ByteTokenizer(), cache=folder / "cache" if text.is_file() else folder)
    return {"tokens": torch.from_numpy(np.array(corpus.tokens, dtype=np.int64)), "train": corpus.train_tokens}


def write_tokens(folder: Path, seed: int) -> None:
    """Files of token ids."""
    folder.mkdir()
    ids = np.random.default_rng(seed).integers(0, 1000, 500)
    np.save(folder / "ids.npy", ids.astype(np.uint16))
    ids.astype(np.uint16).tofile(folder / "ids.bin")


def read_tokens(folder: Path) -> Contents:
    """The ids of both files."""
    return {
        name: torch.from_numpy(np.array(open_corpus(folder / name, None, cache=folder).tokens, dtype=np.int64))
        for name in ("ids.npy", "ids.bin")
    }


def write_records(folder: Path, seed: int) -> None:
    """Records in JSON lines and in a table."""
    folder.mkdir()
    records = [{"text": f"document {n} of {seed}", "id": n} for n in range(20)]
    (folder / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        return
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), folder / "more.parquet")


def read_records(folder: Path) -> Contents:
    """The texts."""
    return {"texts": [text for part in find_records(folder) for text in texts_of(part, "text")]}


def write_settings(folder: Path, seed: int) -> None:
    """What a run's folder remembers."""
    run_folder.write_settings(TrainSettings(data="text.txt", out=str(folder), seed=seed, parallel={"data": 2}), 2)


def read_settings(folder: Path) -> Contents:
    """The settings; none at all are as good as refused."""
    found = run_folder.read_settings(str(folder))
    if not found:
        raise SpecError("there are none")
    return found


def subjects(scratch: Path) -> list[Subject]:
    """Every kind of folder.

    Args:
        scratch: an empty folder.
    """
    load = Loader(scratch)
    found = [
        Subject("checkpoint", save_whole, load),
        Subject("checkpoint in rectangles", save_rectangles, load),
        Subject("checkpoint, listed anew", save_whole, load, exact=False, after=relist),
        Subject("rectangles, listed anew", save_rectangles, load, exact=False, after=relist),
        Subject("Hugging Face folder", export, read_model, named=False),
        Subject("Hugging Face folder, .bin", export_bin, read_model, named=False),
        Subject("cache of tokens", tokenise, read_cache, spared="text.txt"),
        Subject("token files", write_tokens, read_tokens, exact=False),
        Subject("records", write_records, read_records, exact=False),
        Subject("settings of a run", write_settings, read_settings, named=False),
    ]
    try:
        import peft  # noqa: F401
    except ImportError:
        warnings.warn("peft is not installed: adapters are left out", stacklevel=1)
    else:
        found.append(Subject("adapter", save_adapter, read_adapter, named=False))
    return found


def same(one: Any, other: Any) -> bool:
    """Whether two contents are the same, to the bit."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
