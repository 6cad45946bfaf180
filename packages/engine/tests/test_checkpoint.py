"""Checkpoints: whole tensors that any other spec can load, written so that a crash leaves the last one intact."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshfold.checkpoint.tensors import TensorFile, TensorInfo, TensorWriter, file_set, safetensors_file
from meshfold.engine import CheckpointError, Engine
from meshfold.engine.batches.loader import ShardedLoader
from meshfold.mesh import SpecError
from meshfold.mesh.testing import ranks, run_on_ranks
from meshfold.models import GPT, GPTConfig, Llama, LlamaConfig

sys.path.append(str(Path(__file__).parent))  # for the helpers beside this file, on every rank
from checkpoint_edits import relist

SIZES: dict[str, Any] = dict(vocab_size=37, hidden=32, layers=1, heads=4, max_positions=16)


def gpt() -> GPT:
    return GPT(GPTConfig(**SIZES))


def llama() -> Llama:
    return Llama(LlamaConfig(**SIZES, kv_heads=2, ffn=48))


def wide() -> GPT:
    return GPT(GPTConfig(**{**SIZES, "hidden": 64}))


MODELS = {"gpt": gpt, "llama": llama}


def batches(rows: int = 8) -> list[Tensor]:
    return list(torch.randint(0, 37, (8, rows, 6), generator=torch.Generator().manual_seed(2)))


def engine_of(model: str, parallel: dict[str, Any], **settings: Any) -> Engine:
    arguments: dict[str, Any] = {
        "optimizer": dict(name="adamw", lr=1e-2, no_decay="norms_and_biases"),
        "precision": "fp64",
        "clip_grad_norm": 1.0,
        "lr_scheduler": _halving,
    }
    return Engine(MODELS[model], parallel, **{**arguments, **settings})


def _halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], gamma=0.5)


def train(
    model: str, parallel: dict[str, Any], load: str, save: str, first: int, count: int, **settings: Any
) -> list[float]:
    """Some steps of the run, from one checkpoint to the next."""
    with engine_of(model, parallel, **settings) as engine:
        if load:
            engine.load(load)
            assert engine.steps == first
        losses = [engine.train_step(engine.shard_batch(batch)) for batch in batches()[first : first + count]]
        if save:
            engine.save(save)
        return losses


def relay(model: str, legs: list[tuple[int, dict[str, Any]]], folder: Path, **settings: Any) -> list[float]:
    """Two steps under each of the specs, each on so many ranks, handing over by checkpoint (always the same path)."""
    losses: list[float] = []
    path = str(folder / "runs" / "ckpt")
    for number, (size, parallel) in enumerate(legs):
        load = path if number else ""
        arguments = (model, parallel, load, path, 2 * number, 2)
        if size == 1:
            losses += train(*arguments, **settings)
        else:
            found = run_on_ranks(size, train, *arguments, **settings)
            assert all(part == found[0] for part in found)
            losses += found[0]
        assert sorted(p.name for p in (folder / "runs").iterdir()) == ["ckpt"]  # nothing half-written, nothing old
    return losses


LEGS: dict[str, list[tuple[int, dict[str, Any]]]] = {
    "gpt": [
        (4, dict(tensor=dict(mode="2d", size=4))),
        (1, {}),
        (4, dict(data=2, tensor=2)),
        (2, dict(data=2)),
    ],
    "llama": [
        (4, dict(tensor=4)),  # fewer key/value heads than ranks
        (4, dict(tensor=dict(mode="3d", grid=(2, 2, 1)))),
        (4, dict(tensor=4, sequence=dict(mode="megatron"))),
        (1, {}),
    ],
}


@pytest.mark.few(1)
@pytest.mark.parametrize("model", LEGS)
def test_a_run_handed_from_spec_to_spec_is_the_unbroken_run(model: str, tmp_path: Path) -> None:
    unbroken = train(model, {}, "", "", 0, 8)
    assert relay(model, LEGS[model], tmp_path) == pytest.approx(unbroken, rel=1e-8)


def test_fp16_goes_on_with_its_masters_and_its_loss_scale(tmp_path: Path) -> None:
    precision = dict(name="fp16", initial_scale=2.0**6, growth_interval=3)
    unbroken = train("gpt", {}, "", "", 0, 6, precision=precision)
    legs: list[tuple[int, dict[str, Any]]] = [(1, {}), (2, dict(data=2)), (1, {})]
    found = relay("gpt", legs, tmp_path, precision=precision)
    assert found[:2] == unbroken[:2]  # bit for bit: nothing changed yet
    assert found == pytest.approx(unbroken, rel=2e-3)
    state = json.loads((tmp_path / "runs" / "ckpt" / "state.json").read_text())
    assert state["scaler"]["scale"] == 2.0**8
    assert {tensor.dtype for tensor in TensorFile(tmp_path / "runs" / "ckpt" / "model.safetensors").values()} == {
        torch.float32
    }


def test_safetensors_reads_what_is_written_and_the_other_way_round(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    tensors = {
        "flags": torch.tensor([True, False, True]),
        "b": torch.arange(5, dtype=torch.bfloat16),
        "a.weight": torch.randn(3, 4),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "none": torch.zeros(0, 3),
        "ids": torch.arange(7),
    }
    announced = {name: TensorInfo(dtype=t.dtype, shape=tuple(t.shape)) for name, t in tensors.items()}
    with TensorWriter(tmp_path / "ours", announced) as writer:
        for name in writer.order:
            writer.write(name, tensors[name])
    library.save_file(tensors, tmp_path / "theirs")
    for found in (
        library.load_file(tmp_path / "ours"),
        TensorFile(tmp_path / "ours"),
        TensorFile(tmp_path / "theirs"),
    ):
        assert set(found) == set(tensors)
        for name, tensor in tensors.items():
            assert found[name].dtype == tensor.dtype
            assert found[name].shape == tensor.shape
            assert torch.equal(found[name], tensor)
    TensorFile(tmp_path / "ours")["a.weight"].zero_()
    assert torch.equal(TensorFile(tmp_path / "ours")["a.weight"], tensors["a.weight"])  # the file is not written to


def test_tensors_that_are_added_are_written_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the system takes less than it is given, and across the limits of what is kept."""
    tensors = {
        "wide": torch.randn(5, 7, dtype=torch.float64),
        "turned": torch.randn(6, 4).t(),
        "wanted": torch.randn(9, requires_grad=True),
        "none": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5),
        "half": torch.randn(3, dtype=torch.float16),
        "short": torch.randn(2, 2).bfloat16(),
        "one": torch.tensor(-0.0, dtype=torch.bfloat16),
        "flags": torch.tensor([True, False]),
    }
    announced = {name: TensorInfo(dtype=t.dtype, shape=tuple(t.shape)) for name, t in tensors.items()}
    given: list[int] = []
    most = 1 << 30

    def writev(file: int, data: Sequence[memoryview]) -> int:
        given.append(len(data))
        return os.write(file, b"".join(data)[:most])

    monkeypatch.setattr(os, "writev", writev)

    def written(name: str) -> list[int]:
        given.clear()
        with TensorWriter(tmp_path / name, announced) as writer:
            for one in writer.order:
                writer.add(one, tensors[one])
        found = TensorFile(tmp_path / name)
        found.verify()
        assert all(torch.equal(found[one], tensors[one]) for one in tensors)
        return [*given]

    assert written("at once") == [9]
    most = 11
    assert len(written("bit by bit")) >= sum(one.bytes for one in announced.values()) / 11
    most = 1 << 30
    monkeypatch.setattr(safetensors_file, "_TOGETHER", 4)
    assert written("few") == [4, 4, 1]
    monkeypatch.setattr(safetensors_file, "_TOGETHER_BYTES", 300)
    assert sum(written("small")) == 9 and given[0] == 2


def test_tensor_files_refuse_what_is_not_announced_and_what_is_damaged(tmp_path: Path) -> None:
    announced = {
        "a": TensorInfo(dtype=torch.float32, shape=(2,)),
        "b": TensorInfo(dtype=torch.float32, shape=(3,)),
    }
    writer = TensorWriter(tmp_path / "file", announced)
    for name, tensor in (
        ("b", torch.zeros(3)),
        ("a", torch.zeros(3)),
        ("a", torch.zeros(2, dtype=torch.float64)),
    ):
        with pytest.raises(CheckpointError, match="announced"):
            writer.write(name, tensor)
    writer.write("a", torch.zeros(2))
    with pytest.raises(CheckpointError, match="never written, 'b'"):
        writer.close()
    writer.write("b", torch.zeros(3))
    writer.close()
    whole = (tmp_path / "file").read_bytes()
    for damaged, message in (
        (whole[:-4], "is truncated"),
        (b"", "damaged"),
        (b"\xff" * 40, "damaged"),
        (whole[:20], "damaged"),
    ):
        (tmp_path / "file").write_bytes(damaged)
        with pytest.raises(CheckpointError, match=message):
            TensorFile(tmp_path / "file")
    with pytest.raises(CheckpointError, match="cannot store"):
        TensorWriter(tmp_path / "file", {"c": TensorInfo(dtype=torch.complex64, shape=(1,))})


def test_a_state_dict_is_that_of_a_single_process_and_goes_back_in() -> None:
    plain = gpt()
    engine = engine_of("gpt", {}, precision="fp32")
    engine.load_state_dict(plain.state_dict())
    found = engine.full_state_dict()
    assert list(found) == list(plain.state_dict())
    assert all(torch.equal(found[name], value) for name, value in plain.state_dict().items())
    assert found["head.weight"] is found["embed.weight"]
    engine.train_step(batches()[0])
    assert torch.equal(found["norm.weight"], plain.norm.weight)  # a copy, not a window
    without_tie = {name: value for name, value in found.items() if name != "embed.weight"}
    engine.load_state_dict(without_tie)
    for changed, message in [
        ({**found, "extra": torch.zeros(1)}, "no 'extra'"),
        ({name: value for name, value in found.items() if name != "norm.bias"}, "has no 'norm.bias'"),
        ({**found, "norm.bias": torch.zeros(3)}, r"'norm.bias' has shape \(3,\) in the state, but \(32,\)"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            engine.load_state_dict(changed)


class WithBuffers(nn.Module):
    """Has buffers that a state dict holds and one that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("table", torch.arange(3.0))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.frozen = nn.Parameter(torch.full((3,), 2.0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = (self.norm(x) * self.frozen + self.get_buffer("table")).square().mean()
        return y


@ranks(2)
def test_buffers_and_frozen_parameters_are_part_of_the_state() -> None:
    engine = Engine(WithBuffers(), dict(data=2), optimizer="adamw", loss_fn=lambda output, batch: output)
    engine.train_step(engine.shard_batch((torch.randn(8, 3), torch.zeros(8))))
    found = engine.full_state_dict()
    assert list(found) == list(WithBuffers().state_dict())
    assert int(found["norm.num_batches_tracked"]) == 1
    everyone = engine.mesh.group("data")
    from meshfold.mesh import all_gather

    for value in found.values():  # running statistics differ between the ranks, the state dict does not
        both = all_gather(value.reshape(1, -1), everyone, 0)
        assert torch.equal(both[0], both[1])


def save_and_fail(path: str) -> tuple[str, list[str]]:
    engine = engine_of("gpt", dict(tensor=2))
    engine.train_step(engine.shard_batch(batches()[0]))
    engine.save(path)
    before = engine.full_state_dict()
    engine.train_step(engine.shard_batch(batches()[1]))
    original = TensorWriter.write

    def full_disk(self: TensorWriter, name: str, tensor: Tensor) -> None:
        if name == "norm.weight":
            raise OSError(28, "No space left on device")
        original(self, name, tensor)

    TensorWriter.write = full_disk  # type: ignore[method-assign]
    try:
        engine.save(path)
    except CheckpointError as error:
        message = str(error)
    finally:
        TensorWriter.write = original  # type: ignore[method-assign]
    engine.load(path)
    found = engine.full_state_dict()
    assert all(torch.equal(found[name], before[name]) for name in before)
    assert engine.steps == 1
    return message, [p.name for p in Path(path).parent.iterdir()]


def test_a_save_that_fails_fails_on_all_ranks_and_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    (first, names), (second, _) = run_on_ranks(2, save_and_fail, str(tmp_path / "ckpt"))
    assert "rank 0: [Errno 28] No space left" in first
    assert second == first
    assert names == ["ckpt"]


def test_a_crash_between_two_renames_loses_nothing(tmp_path: Path) -> None:
    engine = engine_of("gpt", {})
    engine.train_step(batches()[0])
    engine.save(tmp_path / "ckpt")
    (tmp_path / "ckpt").rename(tmp_path / ".ckpt.old")
    (tmp_path / ".ckpt.writing").mkdir()
    other = engine_of("gpt", {})
    other.load(tmp_path / "ckpt")
    assert other.steps == 1
    other.save(tmp_path / "ckpt")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ckpt"]


def test_what_cannot_be_saved_or_loaded_says_why(tmp_path: Path) -> None:
    engine = engine_of("gpt", {}, gradient_accumulation=2)
    engine.train_step(batches()[0])
    with pytest.raises(CheckpointError, match="1 of 2 micro-steps"):
        engine.save(tmp_path / "ckpt")
    engine.train_step(batches()[0])
    engine.save(tmp_path / "ckpt")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(CheckpointError, match="not a checkpoint: remove it"):
        engine.save(tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.tex").exists()
    with pytest.raises(CheckpointError, match="does not exist"):
        engine.load(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        engine.load(tmp_path / "mine")
    with pytest.raises(CheckpointError, match="another model"):
        engine_of("llama", {}).load(tmp_path / "ckpt")
    with pytest.raises(CheckpointError, match="shape"):
        Engine(wide).load(tmp_path / "ckpt")
    with pytest.raises(CheckpointError, match="state of AdamW, but this engine has SGD"):
        engine_of("gpt", {}, optimizer="sgd").load(tmp_path / "ckpt")
    with pytest.raises(CheckpointError, match="2 parameter groups, but this one has 1"):
        engine_of("gpt", {}, optimizer="adamw").load(tmp_path / "ckpt")
    other = engine_of("gpt", {}, optimizer="sgd")
    other.load(tmp_path / "ckpt", weights_only=True)
    assert other.steps == 0
    assert torch.equal(other.full_state_dict()["embed.weight"], engine.full_state_dict()["embed.weight"])
    state = json.loads((tmp_path / "ckpt" / "state.json").read_text())
    (tmp_path / "ckpt" / "state.json").write_text(json.dumps({**state, "format": 99}))
    with pytest.raises(CheckpointError, match="format 99"):
        engine.load(tmp_path / "ckpt")


class Numbers:
    """The dataset of the numbers below n, as one-token rows."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": torch.tensor([i, i])}


def rows_of(blocks: int, **settings: Any) -> list[list[int]]:
    """Row numbers of each global batch of an epoch, put together from all data coordinates."""
    whole: list[list[int]] = []
    for index in range(blocks):
        loader = ShardedLoader(Numbers(11), batch_size=4, index=index, blocks=blocks, seed=5, **settings)
        for number, batch in enumerate(loader):
            if len(whole) == number:
                whole.append([])
            if "labels" not in batch:
                whole[number] += batch["input_ids"][:, 0].tolist()
            else:
                assert batch["labels"].tolist() == [[-100, -100]]
    return whole


def test_batches_do_not_depend_on_the_mesh() -> None:
    alone = rows_of(1)
    assert sorted(row for rows in alone for row in rows) == list(range(11))
    assert [len(rows) for rows in alone] == [4, 4, 3]
    assert alone != rows_of(1, shuffle=False) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    for blocks in (2, 3, 4, 6):
        assert rows_of(blocks) == alone
    assert rows_of(4, drop_last=True) == alone[:2]
    loader = ShardedLoader(Numbers(8), batch_size=4, index=0, blocks=1)
    first, second = ([batch["input_ids"].tolist() for batch in loader] for _ in range(2))
    assert first != second
    next(iter(loader))
    assert len(list(loader)) == 2  # breaking off does not shorten the next epoch
    for wrong, message in [
        (dict(batch_size=0), "batch_size=0"),
        (dict(batch_size=9, drop_last=True), "drop_last=False"),
        (dict(batch_size=4, sampler=[1]), "sampler"),
    ]:
        with pytest.raises(SpecError, match=message):
            ShardedLoader(Numbers(8), index=0, blocks=1, **wrong)
    with pytest.raises(SpecError, match="must have a length"):
        ShardedLoader(iter([1]), batch_size=1, index=0, blocks=1)  # type: ignore[arg-type]


def read_on(path: str, parallel: dict[str, Any], load: bool, count: int) -> list[float]:
    engine = engine_of("gpt", parallel, lr_scheduler=None)
    if load:
        engine.load(path)
    loader = engine.dataloader(Numbers(11), batch_size=4)
    losses: list[float] = []
    while len(losses) < count:
        for batch in loader:
            losses.append(engine.train_step(batch))
            if len(losses) == count:
                break
    engine.save(path)
    return losses


def test_data_goes_on_where_the_checkpoint_stopped(tmp_path: Path) -> None:
    unbroken = read_on(str(tmp_path / "a"), {}, False, 8)
    assert not any(math.isnan(loss) for loss in unbroken)
    found = run_on_ranks(2, read_on, str(tmp_path / "b"), dict(data=2), False, 2)[0]
    found += read_on(str(tmp_path / "b"), {}, True, 1)  # ends the epoch: the next begins another
    found += run_on_ranks(4, read_on, str(tmp_path / "b"), dict(data=4), True, 5)[0]
    assert found == pytest.approx(unbroken, rel=1e-8)


def served(loader: ShardedLoader, count: int) -> list[int]:
    """The rows of so many batches, or of what is left of the epoch."""
    return [int(row) for _, batch in zip(range(count), loader, strict=False) for row in batch["input_ids"][:, 0]]


def test_a_position_means_the_same_rows_in_batches_of_another_size() -> None:
    def of(rows: int = 24, batch_size: int = 4, **more: Any) -> ShardedLoader:
        return ShardedLoader(Numbers(rows), batch_size=batch_size, index=0, blocks=1, **more)

    whole = served(of(seed=3), 6)
    first = of(seed=3)
    begun = served(first, 3)
    position = first.state_dict()
    for size in (4, 2, 6, 12):
        later = of(batch_size=size, seed=8)  # the order is the position's
        later.load_state_dict(position)
        assert [*begun, *served(later, 24)] == whole, size
        assert later.epoch == 1
    for other, message in (
        (of(batch_size=8), "12 examples into an epoch of 24 examples, shuffled, in batches of 4.*divides 12"),
        (of(rows=25), "this is one of 25 examples"),
        (of(shuffle=False), "24 examples, in order"),
    ):
        with pytest.raises(SpecError, match=message):
            other.load_state_dict(position)
    served(first, 6)
    for other in (of(batch_size=8), of(rows=25)):  # an epoch is over: the next one may be another
        other.load_state_dict({**position, "served": 6})
        assert (other.epoch, other.served) == (1, 0)


# -- several files ----------------------------------------------------------------------------------------------------


def save_in_pieces(parallel: dict[str, Any], path: str, fail_on: int) -> tuple[str, dict[str, Tensor], list[str], int]:
    """Save with files of any size being worth it; on one rank the disk may be full. What was said, and what was saved."""
    file_set.LEAST_BYTES = 1
    rank = torch.distributed.get_rank()
    engine = engine_of("gpt", parallel)
    engine.train_step(engine.shard_batch(batches()[0]))
    original = TensorWriter.write
    written: list[str] = []

    def write(self: TensorWriter, name: str, tensor: Tensor) -> None:
        if rank == fail_on and written:
            raise OSError(28, "No space left on device")
        written.append(name)
        original(self, name, tensor)

    TensorWriter.write = write  # type: ignore[method-assign]
    message = ""
    try:
        engine.save(path)
    except CheckpointError as error:
        message = str(error)
    finally:
        TensorWriter.write = original  # type: ignore[method-assign]
        file_set.LEAST_BYTES = 64 * 2**20
    return message, engine.full_state_dict(), sorted(p.name for p in Path(path).glob("*")), len(written)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "parallel",
    [
        dict(data=4),
        dict(data=2, tensor=2),
        dict(data=2, tensor=2, zero=dict(stage=3)),
        dict(tensor=dict(mode="2d", size=4), zero=dict(stage=1, placement="cpu")),
    ],
    ids=str,
)
def test_all_ranks_write_and_any_spec_reads(parallel: dict[str, Any], tmp_path: Path) -> None:
    found = run_on_ranks(4, save_in_pieces, parallel, str(tmp_path / "ckpt"), -1)
    assert [message for message, *_ in found] == [""] * 4
    assert all(count > 5 for *_, count in found)  # of some 60 tensors
    files = [f"{kind}-0000{n}-of-00004.safetensors" for kind in ("model", "optimizer") for n in range(1, 5)]
    indices = ["model.safetensors.index.json", "optimizer.safetensors.index.json"]
    assert found[0][2] == sorted([*files, *indices, "scheduler.pt", "state.json"])
    sizes = [(tmp_path / "ckpt" / file).stat().st_size for file in files[4:]]
    assert max(sizes) < 2 * min(sizes)

    library = pytest.importorskip("safetensors.torch")
    index = json.loads((tmp_path / "ckpt" / indices[0]).read_text())["weight_map"]
    for name, file in index.items():
        assert torch.equal(library.load_file(tmp_path / "ckpt" / file)[name], found[0][1][name])
    engine = engine_of("gpt", {})
    engine.load(tmp_path / "ckpt")
    assert all(torch.equal(value, found[0][1][name]) for name, value in engine.full_state_dict().items())
    engine.save(tmp_path / "ckpt")
    assert not any("-of-" in p.name for p in (tmp_path / "ckpt").iterdir())
    run_on_ranks(2, load_and_compare, str(tmp_path / "ckpt"), found[0][1])


def load_and_compare(path: str, wanted: dict[str, Tensor]) -> None:
    engine = engine_of("gpt", dict(data=2))
    engine.load(path)
    assert all(torch.equal(value, wanted[name]) for name, value in engine.full_state_dict().items())


@pytest.mark.few(1)
@pytest.mark.parametrize("parallel", [dict(data=4), dict(data=2, tensor=2, zero=dict(stage=3))], ids=str)
def test_a_full_disk_on_any_rank_is_one_error_everywhere(parallel: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    _, before, names, _ = run_on_ranks(4, save_in_pieces, parallel, str(path), -1)[0]
    for rank in (0, 3):
        found = run_on_ranks(4, save_in_pieces, parallel, str(path), rank)
        assert {message for message, *_ in found} == {
            f"cannot write the checkpoint {path}: rank {rank}: [Errno 28] No space left on device: make room on that disk, or "
            "save elsewhere"
        }
        assert [p.name for p in tmp_path.iterdir()] == ["ckpt"] and found[0][2] == names
    engine = engine_of("gpt", {})
    engine.load(path)
    assert all(torch.equal(value, before[name]) for name, value in engine.full_state_dict().items())


def load_what_one_rank_cannot_read(path: str) -> str:
    engine = engine_of("gpt", dict(data=2))
    mine = path if torch.distributed.get_rank() == 0 else path + "-elsewhere"
    try:
        engine.load(mine)
    except CheckpointError as error:
        return str(error)
    return ""


def test_what_is_missing_is_said_on_all_ranks(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    run_on_ranks(4, save_in_pieces, dict(data=4), str(path), -1)
    said = run_on_ranks(2, load_what_one_rank_cannot_read, str(path))
    assert all("rank 1: cannot load" in message and "does not exist" in message for message in said)
    (path / "model-00002-of-00004.safetensors").rename(tmp_path / "away")
    with pytest.raises(CheckpointError, match="model-00002-of-00004"):
        engine_of("gpt", {}).load(path)
    (tmp_path / "away").rename(path / "model-00002-of-00004.safetensors")
    index = path / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00002", "model-00001"))
    with pytest.raises(CheckpointError, match=r"index\.json is damaged or another checkpoint's"):
        engine_of("gpt", {}).load(path)
    relist(path)
    with pytest.raises(CheckpointError, match="which does not have it"):
        engine_of("gpt", {}).load(path)
    index.write_text("{}")
    with pytest.raises(CheckpointError, match=r"index\.json is truncated or changed: it had"):
        engine_of("gpt", {}).load(path)


def test_a_deal_is_even_and_small_models_are_one_file(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [40, 10, 10, 10, 30, 20, 8]
    announced = {f"t{n}": TensorInfo(dtype=torch.uint8, shape=(size,)) for n, size in enumerate(sizes)}
    whole = file_set.FileAssignment.make("model.safetensors", announced, 8, ())
    assert whole.writers == [0] and whole.file_of(0) == "model.safetensors"
    monkeypatch.setattr(file_set, "LEAST_BYTES", 32)
    deal = file_set.FileAssignment.make("model.safetensors", announced, 8, ["t6"])
    assert deal.writers == [0, 2, 4, 6]  # 128 bytes are worth four files; not all on one node
    assert deal.writer_of["t6"] == 0
    loads = {rank: sum(d.bytes for d in deal.share(rank).values()) for rank in deal.writers}
    assert sum(loads.values()) == 128 and max(loads.values()) <= 128 / 4 + 40
    assert sorted(name for rank in range(8) for name in deal.share(rank)) == sorted(announced)
