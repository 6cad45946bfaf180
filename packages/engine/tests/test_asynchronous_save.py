"""Saves beside the training: each rank writes the rectangles that it keeps, and any spec reads them."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshfold.checkpoint import shards
from meshfold.checkpoint.tensors import TensorWriter
from meshfold.cli import main
from meshfold.engine import CheckpointError, Engine
from meshfold.engine.checkpoints import saving
from meshfold.engine.checkpoints.checkpoint import Checkpoint
from meshfold.engine.checkpoints.rank_file import RankFile
from meshfold.mesh.processes import groups
from meshfold.mesh.processes.rendezvous import Address
from meshfold.mesh.testing import run_on_ranks
from meshfold.models import GPT, GPTConfig, Llama, LlamaConfig
from meshfold.zero_gemini import Gemini

sys.path.append(str(Path(__file__).parent))  # for the helpers beside this file, on every rank
from checkpoint_edits import relist

SIZES: dict[str, Any] = dict(vocab_size=37, hidden=32, layers=4, heads=4, max_positions=16, dropout=0.1)


def gpt() -> GPT:
    return GPT(GPTConfig(**SIZES))


def llama() -> Llama:
    return Llama(LlamaConfig(**SIZES, kv_heads=2, ffn=48))


MODELS = {"gpt": gpt, "llama": llama}


def batches() -> list[Tensor]:
    return list(torch.randint(0, 37, (8, 8, 6), generator=torch.Generator().manual_seed(2)))


def engine_of(model: str, parallel: dict[str, Any], **settings: Any) -> Engine:
    arguments: dict[str, Any] = dict(
        optimizer=dict(name="adamw", lr=1e-2, no_decay="norms_and_biases"),
        precision="fp64",
        clip_grad_norm=1.0,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], gamma=0.5),
    )
    return Engine(MODELS[model], parallel, **{**arguments, **settings})


def leg(
    model: str, parallel: dict[str, Any], load: str, save: str, first: int, **settings: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """Two steps from one checkpoint to the next, which is written only when a third step has been made."""
    stepped, original = threading.Event(), saving.Saver._write

    def late(self: saving.Saver, *arguments: Any) -> None:
        stepped.wait(60.0)
        original(self, *arguments)

    saving.Saver._write = late  # type: ignore[method-assign]
    try:
        with engine_of(model, parallel, **settings) as engine:
            if load:
                engine.load(load)
                assert engine.steps == first
            losses = [engine.train_step(engine.shard_batch(batch)) for batch in batches()[first : first + 2]]
            before = engine.full_state_dict()
            under_way = engine.save(save, asynchronous=True)
            assert under_way is not None
            engine.train_step(engine.shard_batch(batches()[0]))  # must not get into it
            after = engine.full_state_dict()
            assert any(not torch.equal(before[name], after[name]) for name in before)
            assert not under_way.done
            stepped.set()
            under_way.wait()
            assert under_way.done
            assert under_way.error is None
            return losses, before
    finally:
        saving.Saver._write = original  # type: ignore[method-assign]


LEGS: dict[str, tuple[str, list[tuple[int, dict[str, Any]]], dict[str, Any]]] = {
    "tensor and pipeline": (
        "gpt",
        [
            (4, dict(tensor=2, pipeline=2)),
            (4, dict(pipeline=4)),
            (2, dict(data=2)),
            (1, {}),
        ],
        {},
    ),
    "eight ranks": (
        "gpt",
        [
            (8, dict(data=2, tensor=2, pipeline=2)),
            (8, dict(data=8)),
            (8, dict(tensor=dict(mode="3d", size=8))),
            (8, dict(data=2, tensor=4, zero=dict(stage=1))),
            (1, {}),
        ],
        {},
    ),
    "tensor modes": (
        "llama",
        [
            (4, dict(tensor=dict(mode="3d", grid=(2, 2, 1)))),
            (4, dict(tensor=4)),  # fewer key/value heads than ranks
            (4, dict(tensor=dict(mode="2d", size=4))),
        ],
        {},
    ),
    "zero": (
        "gpt",
        [
            (4, dict(data=2, tensor=2, zero=dict(stage=3, placement="cpu"))),
            (2, dict(data=2, zero=dict(stage=2))),
            (2, dict(tensor=2, zero=dict(stage=1))),
        ],
        dict(precision="fp32"),
    ),
    "a loss scale": (
        "gpt",
        [(2, dict(data=2, zero=dict(stage=2))), (2, dict(tensor=2)), (1, {})],
        dict(precision=dict(name="fp16", initial_scale=2.0**6, growth_interval=3)),
    ),
    "regimes": (
        "gpt",
        [
            (2, dict(data=2, zero=dict(stage=3, regime="B"))),
            (2, dict(data=2, zero=dict(stage=3, regime="A"))),
            (1, dict(zero=dict(stage=3, placement="cpu", regime="C"))),
            (1, dict(zero=dict(stage=3, regime="B"))),
        ],
        dict(precision="bf16"),
    ),
}
# Of losses against those of one process: what rounding in 64, 32 and 16 bits is worth over these steps, and of moments in 8.
WITHIN = {"fp64": 1e-8, "fp32": 1e-5, "fp16": 2e-3, "bf16": 1e-2}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.slow) if case in ("eight ranks", "tensor modes", "regimes") else case
        for case in LEGS
    ],
)
def test_a_run_handed_from_spec_to_spec_is_the_unbroken_run(case: str, tmp_path: Path) -> None:
    model, legs, settings = LEGS[case]
    precision = settings.get("precision", "fp64")
    within = WITHIN[precision if isinstance(precision, str) else precision["name"]]
    with engine_of(model, {}, **settings) as alone:
        unbroken = [alone.train_step(batch) for batch in batches()[: 2 * len(legs)]]
    losses: list[float] = []
    for number, (size, parallel) in enumerate(legs):
        path = str(tmp_path / "ckpt")
        found = run_on_ranks(size, leg, model, parallel, path if number else "", path, 2 * number, **settings)
        losses += found[0][0]
        stored = Checkpoint(path)
        assert stored.state["format"] == 3
        for name, value in stored.model.items():
            assert torch.equal(value.clone(), found[0][1][name]), (case, number, name)
        stored.verify()
        assert sorted(p.name for p in tmp_path.iterdir()) == ["ckpt"]
        if isinstance(precision, dict):
            assert stored.state["scaler"]["scale"] == 2.0 ** (6 + (2 * number + 2) // 3)  # goes on growing
    assert losses == pytest.approx(unbroken, rel=within)


def test_state_on_a_disk_is_not_copied_to_memory(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    zero = dict(stage=3, placement="cpu", offload_path=str(tmp_path / "disk"))
    with engine_of("gpt", dict(zero=zero), precision="fp32") as engine:
        engine.train_step(batches()[0])
        sources = engine.model_state.optimizer_sources()
        wanted = {name: source.read().clone() for name, source in sources.items()}
        under_way = engine.save(tmp_path / "ckpt", asynchronous=True)
        assert under_way is not None
        under_way.wait_until_copied()
        assert not any("exp_avg" in key for key in engine.saver._buffers)
        assert any("embed.weight" in key for key in engine.saver._buffers)
        engine.train_step(batches()[1])
    found = Checkpoint(tmp_path / "ckpt").optimizer
    assert set(found) == set(wanted)
    assert all(torch.equal(found[name].clone(), value) for name, value in wanted.items())


@pytest.mark.few(1)
@pytest.mark.parametrize("place", ["cpu", "cuda", "trials"])
@pytest.mark.parametrize("stage", [1, 3])
def test_under_zero_a_save_is_of_its_call_however_late_it_looks(
    place: str, stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread begins when the next backward is over, in which steps may be speculative; ``save`` looked at no tensor."""
    monkeypatch.setattr(saving, "HEAD_START_S", 60.0)
    zero = dict(stage=stage, placement="cuda" if place == "cuda" else "cpu")
    with engine_of("gpt", dict(zero=zero), precision="bf16", clip_grad_norm=1e3) as engine:
        gemini = engine.states.gemini  # type: ignore[attr-defined]
        gemini.step_speculatively(place == "trials")
        for ids in batches()[:3]:
            engine.train_step(ids)
        wanted = engine.full_state_dict()
        sources = engine.model_state.optimizer_sources()
        moments = {name: source.read().clone() for name, source in sources.items()}
        with monkeypatch.context() as patch:
            patch.setattr(Gemini, "parts", lambda *_: pytest.fail("a tensor was looked at"))
            under_way = engine.save(tmp_path / "ckpt", asynchronous=True)
            assert under_way is not None
            ids = batches()[3]
            engine.backward(engine(ids, labels=ids).loss)
            assert bool(gemini._speculative._sums) == (place == "trials")
            under_way.wait_until_copied()
        engine.step()
    found = Checkpoint(tmp_path / "ckpt")
    for stored, expected in ((found.model, wanted), (found.optimizer, moments)):
        assert set(stored) == set(expected) - {"head.weight"}  # tied
        for name in stored:
            assert torch.equal(stored[name].clone(), expected[name]), name


def held_up(path: str) -> dict[str, Any]:
    """Save with a disk that is slow, and takes longer than the step that is trained meanwhile."""
    original, trained = TensorWriter.close, threading.Event()

    def slow(self: TensorWriter) -> None:
        time.sleep(0.3)
        assert trained.wait(250.0)
        original(self)

    TensorWriter.close = slow  # type: ignore[method-assign]
    try:
        engine = engine_of("gpt", dict(data=2))
        engine.train_step(engine.shard_batch(batches()[0]))
        first = engine.save(path, asynchronous=True)
        engine.train_step(engine.shard_batch(batches()[1]))
        going_on = not first.done
        trained.set()
        second = engine.save(path, asynchronous=True)  # behind the first
        in_order = first.done and first.seconds > 0.6
        engine.train_step(engine.shard_batch(batches()[2]))
        engine.close()  # behind the second
        return dict(
            going_on=going_on,
            in_order=in_order,
            done=second.done,
            bytes=second.bytes,
            held=first.blocked_seconds,
            seconds=first.seconds,
        )
    finally:
        TensorWriter.close = original  # type: ignore[method-assign]


def test_training_goes_on_while_a_save_is_written_and_saves_are_in_order(tmp_path: Path) -> None:
    found = run_on_ranks(2, held_up, str(tmp_path / "ckpt"))
    assert all(one["going_on"] and one["in_order"] and one["done"] for one in found)
    assert all(one["held"] < one["seconds"] - 0.3 for one in found)
    assert Checkpoint(tmp_path / "ckpt").state["step"] == 2
    whole = sum(p.numel() for p in gpt().parameters()) * 3 * 8  # weights and two moments in float64
    assert whole <= sum(one["bytes"] for one in found) < 1.1 * whole  # each element once, over both


def fail_in_background(path: str, rank: int, then: str) -> tuple[str, str, list[str]]:
    """Save well, then with a disk that one rank finds full; what the next call says, and the one after it."""
    me = torch.distributed.get_rank()
    engine = engine_of("gpt", dict(data=2))
    engine.train_step(engine.shard_batch(batches()[0]))
    engine.save(path, asynchronous=True)
    engine.train_step(engine.shard_batch(batches()[1]))
    engine.saver.finish()
    original = TensorWriter.add
    written: list[str] = []

    def full(self: TensorWriter, name: str, tensor: Tensor) -> None:
        if me == rank and written:
            raise OSError(28, "No space left on device", str(self._path))
        written.append(name)
        original(self, name, tensor)

    TensorWriter.add = full  # type: ignore[method-assign]
    said = []
    try:
        engine.save(path, asynchronous=True)
        for _ in range(2):
            try:
                if then == "step":
                    for _ in range(400):  # a failure is there for the step that comes after it
                        engine.train_step(engine.shard_batch(batches()[2]))
                        if engine.saver._under_way is None:
                            break
                elif then == "save":
                    if engine.saver._under_way is not None:
                        engine.saver._under_way.join()  # the disk is full until then
                    TensorWriter.add = original  # type: ignore[method-assign]
                    engine.save(path + "-other")
                else:
                    engine.close()
                said.append("")
            except CheckpointError as error:
                said.append(str(error))
    finally:
        TensorWriter.add = original  # type: ignore[method-assign]
    return said[0], said[1], sorted(p.name for p in Path(path).parent.iterdir())


@pytest.mark.parametrize(("rank", "then"), [(1, "step"), (0, "save"), (1, "close")])
def test_what_fails_in_the_background_is_one_error_on_all_ranks(rank: int, then: str, tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    (first, again, names), other = run_on_ranks(2, fail_in_background, str(path), rank, then)
    part = path / ".saving" / f"model-blocks-0000{rank + 1}-of-00002.safetensors.part"
    where = f"rank {rank}: " if rank else ""  # what rank 0 did itself needs no name
    assert first == (
        f"cannot write the checkpoint {path} in the background: {where}[Errno 28] No space left on device: '{part}': "
        "make room on that disk, or save elsewhere"
    )
    assert again == ""  # told once
    assert other[:2] == (first, again)
    assert names == (["ckpt", "ckpt-other"] if then == "save" else ["ckpt"])  # no half of anything
    assert Checkpoint(path).state["step"] == 1
    Checkpoint(path).verify()


def silent(path: str) -> str:
    """A rank that never ends its file, as one that has died."""
    me = torch.distributed.get_rank()
    patience, saving.PATIENCE = saving.PATIENCE, 0.5
    original = RankFile.rename
    if me == 1:
        RankFile.rename = lambda self: self.abandon()  # type: ignore[method-assign]
    try:
        engine = engine_of("gpt", dict(data=2))
        engine.save(path, asynchronous=True).wait()
    except CheckpointError as error:
        return str(error)
    finally:
        saving.PATIENCE, RankFile.rename = patience, original  # type: ignore[method-assign]
    return ""


def test_a_rank_that_never_ends_its_file_is_named_after_a_while(tmp_path: Path) -> None:
    first, second = run_on_ranks(2, silent, str(tmp_path / "ckpt"))
    assert first == second
    assert "rank 1 has not written to " in first
    assert "model-blocks-00002-of-00002.safetensors" in first
    assert [*tmp_path.iterdir()] == []


def test_what_cannot_begin_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("gpt", {})

    def refuse(self: Path, *args: Any, **kwargs: Any) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    with monkeypatch.context() as patched:  # root may write anywhere, so that chmod would not do
        patched.setattr(Path, "mkdir", refuse)
        with pytest.raises(CheckpointError, match=r"Permission denied: '.*ckpt.writing': let this user write"):
            engine.save(tmp_path / "ckpt", asynchronous=True)
        with pytest.raises(CheckpointError, match=r"Permission denied: '.*ckpt.writing': let this user write"):
            engine.save(tmp_path / "ckpt")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(CheckpointError, match="not a checkpoint: remove it"):
        engine.save(tmp_path / "mine", asynchronous=True)
    engine.save(tmp_path / "ckpt", asynchronous=True)
    engine.close()
    assert Checkpoint(tmp_path / "ckpt").state["step"] == 0


SCRIPT = """
import resource, sys
import torch
from meshfold.engine import Engine
from meshfold.models import build
engine = Engine(lambda: build("gpt-tiny"), optimizer="adamw")
engine.train_step(torch.randint(256, (2, 8)))
if sys.argv[2] == "full":
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
engine.save(sys.argv[1], asynchronous=True)
"""


@pytest.mark.usefixtures("warm_commands")
def test_the_end_of_a_process_waits_for_its_save(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    ended = subprocess.run([sys.executable, "-c", SCRIPT, str(path), ""], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert Checkpoint(path).state["step"] == 1
    ended = subprocess.run([sys.executable, "-c", SCRIPT, str(path), "full"], capture_output=True, text=True)
    assert f"meshfold: the checkpoint {path} was not completed: [Errno 27] File too large: " in ended.stderr
    assert "ulimit -f" in ended.stderr
    Checkpoint(path).verify()
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt"]


def test_damage_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "LEAST_SPLIT_BYTES", 1)
    path = tmp_path / "ckpt"
    run_on_ranks(2, held_up, str(path))
    shard = path / "model-blocks-00002-of-00002.safetensors"
    whole, index = shard.read_bytes(), path / "model.blocks.json"
    engine = engine_of("gpt", {})
    for damaged, message in [
        (whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:], "is damaged: .* has checksum .* an earlier checkpoint"),
        (whole[:-8], rf"{shard.name} is truncated or changed: it had {len(whole)} bytes and has {len(whole) - 8}"),
        (None, rf"{shard.name}: No such file or directory. Copy the checkpoint from its source again"),
    ]:
        shard.unlink()
        if damaged is not None:
            shard.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=message):
            engine.load(path)
        if damaged is None:
            shard.write_bytes(whole)
    entries = json.loads(index.read_text())
    text = index.read_text()
    next(iter(entries["tensors"].values()))["blocks"][0]["offsets"][0] += 1
    index.write_text(json.dumps(entries))
    relist(path)
    with pytest.raises(CheckpointError, match=r"its blocks of .* are not all of"):
        engine.load(path)
    index.write_text(text)
    relist(path)
    engine.load(path)
    assert engine.steps == 2
    shard.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    engine.load(path, verify=False)


def test_damage_of_a_tensor_that_was_written_whole_is_named(tmp_path: Path) -> None:
    engine = engine_of("gpt", {})
    engine.save(tmp_path / "ckpt")
    file = tmp_path / "ckpt" / "model.safetensors"
    whole = file.read_bytes()
    for place, bit in ((len(whole) - 1, 1), (len(whole) // 2, 128)):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
        with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged: '.*' has checksum"):
            engine.load(tmp_path / "ckpt")
    file.write_bytes(whole)
    engine.load(tmp_path / "ckpt")


def test_the_command_saves_beside_the_training(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("All work and no play. " * 200)
    words = [
        "--steps",
        "3",
        "--save-every",
        "1",
        "--seq-len",
        "16",
        "--batch-size",
        "2",
        "--no-plan",
        "--save-asynchronously",
    ]
    place = ["--data", str(tmp_path / "text.txt"), "--out", str(tmp_path / "out")]
    assert main(["train", *place, *words]) == 0
    found = Checkpoint(tmp_path / "out" / "checkpoint")
    assert (found.state["format"], found.state["step"]) == (3, 3)
    found.verify()
    assert main(["train", *place, *words, "--steps", "4", "--resume"]) == 0
    assert Checkpoint(tmp_path / "out" / "checkpoint").state["step"] == 4


def test_a_rank_that_has_ended_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    gone = replace(Address.own(), pid=ended.pid)
    monkeypatch.setattr(groups, "addresses", {0: Address.own(), 1: gone})
    began = time.monotonic()
    with pytest.raises(CheckpointError, match="rank 1 exited before it had written its part"):
        saving._complete(tmp_path, tmp_path / "checkpoint", {"model": {}}, {}, None, ranks=2)
    assert time.monotonic() - began < saving.PATIENCE / 2
