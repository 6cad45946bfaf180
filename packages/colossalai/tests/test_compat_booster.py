"""Booster and its plugins train as the engine does, and save what can be loaded elsewhere."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshfold.colossalai import (
    Booster,
    GeminiPlugin,
    HybridParallelPlugin,
    LazyInitContext,
    LowLevelZeroPlugin,
    MigrationNote,
    TorchDDPPlugin,
    TorchFSDPPlugin,
    gpc,
    initialize,
)
from meshfold.colossalai.plugins import Plugin
from meshfold.engine import CheckpointError, Engine, TrainingError
from meshfold.mesh import Mesh, SpecError, all_reduce, barrier
from meshfold.mesh.processes import groups
from meshfold.mesh.testing import ranks, run_on_ranks
from meshfold.models import GPT, GPTConfig

VOCABULARY, ROWS, STEPS, CLIP = 37, 8, 3, 0.5
ENGINE: dict[str, Any] = dict(precision="fp64", clip_grad_norm=CLIP)  # where the plugin says neither


def gpt() -> GPT:
    torch.manual_seed(5)
    return GPT(GPTConfig(vocab_size=VOCABULARY, hidden=32, layers=4, heads=4, max_positions=16))


def rows() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    found = []
    for _ in range(ROWS * STEPS):
        ids = torch.randint(VOCABULARY, (8,), generator=generator)
        found.append({"input_ids": ids, "labels": ids})
    return found


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    # A large epsilon: Adam divides gradients that are zero but for rounding, such as those of key biases, by themselves.
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-4)


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.StepLR:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def plain() -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of one process."""
    model, losses = gpt().double(), []
    optimizer = adamw(model)
    schedule = halving(optimizer)
    for batch in torch.utils.data.DataLoader(rows(), batch_size=ROWS):  # type: ignore[arg-type]
        loss = model(batch["input_ids"], labels=batch["labels"]).loss
        loss.backward()
        losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return losses, model.state_dict()


def boosted_loop(plugin: Plugin, *, clips: str = "") -> tuple[list[float], dict[str, Tensor]]:
    """A script as users of plugins without pipeline wrote it; ``clips``: by itself, before a step."""
    booster = Booster(plugin=plugin)
    model: Any = gpt()
    optimizer: Any = adamw(model)
    schedule: Any = halving(optimizer)
    dp = 1 if plugin._world().row_size == 1 else plugin._world().row_size
    loader = plugin.prepare_dataloader(rows(), batch_size=ROWS // dp)
    model, optimizer, _, loader, schedule = booster.boost(model, optimizer, None, loader, schedule)
    model.train()
    losses, data = [], model.engine.mesh.group("data")
    for batch in loader:
        outputs = model(**batch)
        booster.backward(outputs.loss, optimizer)
        if clips:
            assert clip(clips, model, optimizer) > CLIP  # so that clipping counts
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(float(all_reduce(outputs.loss.detach(), data)) / data.size)
    assert clips or optimizer.get_grad_norm() > CLIP
    return losses, model.state_dict()


def clip(way: str, model: Any, optimizer: Any) -> float:
    """By the norm, with torch or with the optimizer's own method; the norm before."""
    if way == "torch":
        return float(nn.utils.clip_grad_norm_(model.parameters(), CLIP))
    return float(optimizer.clip_grad_by_norm(CLIP))


def pipeline_loop(
    plugin: Plugin, criterion: Callable[..., Any] | None, *, clips: str = ""
) -> tuple[list[float], dict[str, Tensor]]:
    """A script as users of pipelines wrote it."""
    booster = Booster(plugin=plugin)
    model: Any = gpt()
    optimizer: Any = adamw(model)
    schedule: Any = halving(optimizer)
    loader: Any = plugin.prepare_dataloader(rows(), batch_size=ROWS // plugin._world().row_size)
    model, optimizer, criterion, loader, schedule = booster.boost(
        model, optimizer, criterion=criterion, dataloader=loader, lr_scheduler=schedule
    )
    batches, losses = iter(loader), []
    for _ in range(STEPS):
        outputs = booster.execute_pipeline(
            batches, model, lambda outputs, inputs: outputs.loss, optimizer, return_loss=True
        )
        if clips:
            assert clip(clips, model, optimizer) > CLIP
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(float(outputs["loss"]))
    return losses, model.state_dict()


def same(found: tuple[list[float], dict[str, Tensor]]) -> None:
    losses, weights = plain()
    assert found[0] == pytest.approx(losses, rel=1e-9)
    assert list(found[1]) == list(weights)
    for name, value in weights.items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-9, atol=1e-10, msg=partial("{}: {}".format, name))


PLUGINS: dict[str, tuple[int, Callable[[], Plugin]]] = {
    "ddp": (2, lambda: TorchDDPPlugin(engine=ENGINE)),
    "fsdp": (2, lambda: TorchFSDPPlugin(sharding_strategy="SHARD_GRAD_OP", engine=ENGINE)),
    "gemini": (2, lambda: GeminiPlugin(precision="fp64", max_norm=CLIP)),
    "gemini-on-host": (2, lambda: GeminiPlugin(placement_policy="cpu", precision="fp64", max_norm=CLIP)),
    "gemini-tp": (
        4,
        lambda: GeminiPlugin(offload_optim_frac=1.0, tp_size=2, precision="fp64", max_norm=CLIP),
    ),
    "zero-2": (2, lambda: LowLevelZeroPlugin(stage=2, precision="fp64", max_norm=CLIP)),
    "hybrid": (
        4,
        lambda: HybridParallelPlugin(tp_size=2, pp_size=1, zero_stage=1, precision="fp64", max_norm=CLIP),
    ),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", PLUGINS)
def test_the_loop_of_booster(name: str) -> None:
    run_on_ranks(PLUGINS[name][0], loop_of, name)


def loop_of(name: str) -> None:
    same(boosted_loop(PLUGINS[name][1]()))


@ranks(4)
def test_pipelines() -> None:
    tensor = HybridParallelPlugin(tp_size=2, pp_size=2, num_microbatches=4, precision="fp64", max_norm=CLIP)
    same(pipeline_loop(tensor, None))
    sharded = HybridParallelPlugin(1, 2, zero_stage=1, microbatch_size=2, precision="fp64", max_norm=CLIP)
    same(pipeline_loop(sharded, lambda outputs, inputs: outputs.loss))
    assert sharded.settings().parallel["pipeline"]["microbatches"] == 2  # of the 4 rows of a rank
    assert gpc.pipeline_parallel_size == 2


CLIPPING: dict[str, tuple[int, Callable[[], Plugin]]] = {
    "ddp": (2, lambda: TorchDDPPlugin(engine=dict(precision="fp64"))),
    "gemini-tp": (4, lambda: GeminiPlugin(tp_size=2, precision="fp64")),
    "zero-2": (2, lambda: LowLevelZeroPlugin(stage=2, precision="fp64")),
    "pipeline": (4, lambda: HybridParallelPlugin(2, 2, num_microbatches=4, precision="fp64")),
    "pipeline-zero": (4, lambda: HybridParallelPlugin(1, 2, zero_stage=1, num_microbatches=2, precision="fp64")),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("way", ["torch", "optimizer"])
@pytest.mark.parametrize("name", CLIPPING)
def test_scripts_that_clip_by_themselves(name: str, way: str) -> None:
    run_on_ranks(CLIPPING[name][0], clipping_of, name, way)


def clipping_of(name: str, way: str) -> None:
    plugin = CLIPPING[name][1]()
    same(pipeline_loop(plugin, None, clips=way) if name.startswith("pipeline") else boosted_loop(plugin, clips=way))


class Rows(nn.Module):
    """Whose output has no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return x


@ranks(2)
def test_a_criterion_that_comes_with_the_batch() -> None:
    torch.manual_seed(0)
    model = Rows().double()
    x, y = torch.randn(4, 6, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    wanted = model(x).detach()
    example = (torch.zeros(2, 6, dtype=torch.float64), torch.zeros(2, 6, dtype=torch.float64))
    plugin = HybridParallelPlugin(1, 2, num_microbatches=2, precision="fp64", engine=dict(example=example))
    booster = Booster(plugin=plugin)
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.0))
    with pytest.raises(SpecError, match=r"give boost\(\.\.\.\) or execute_pipeline\(\.\.\.\) a criterion"):
        booster.execute_pipeline(iter([(x, y)]), boosted, None, optimizer)
    for criterion in (nn.functional.mse_loss, nn.functional.l1_loss):
        found = booster.execute_pipeline(iter([(x, y)]), boosted, criterion, optimizer)
        assert float(found["loss"]) == pytest.approx(float(criterion(wanted, y)), rel=1e-9)
    boosted.eval()
    found = booster.execute_pipeline(iter([(x, y)]), boosted, nn.functional.mse_loss)
    assert float(found["loss"]) == pytest.approx(float(nn.functional.mse_loss(wanted, y)), rel=1e-9)
    torch.testing.assert_close(boosted(x), wanted)
    assert boosted.engine.steps == 0
    found = booster.execute_pipeline(iter([(x, y)]), boosted, nn.functional.mse_loss, return_outputs=True)
    torch.testing.assert_close(found["outputs"], wanted)
    boosted.train()
    with pytest.raises(SpecError, match="outputs of micro-batches are released"):
        booster.execute_pipeline(iter([(x, y)]), boosted, nn.functional.mse_loss, optimizer, return_outputs=True)


class Pictures(nn.Module):
    """A small ViT, which is not called with token ids."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(2))
        self.head = nn.Linear(8, 5)

    def forward(self, pictures: Tensor) -> Tensor:
        x = self.patches(pictures).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean(1))


class Album(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Pictures, with a transform that draws a random number."""

    def __init__(self) -> None:
        self.read: list[int] = []
        self.pictures = torch.randn(8, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.read.append(index)
        return self.pictures[index] + 0 * torch.rand(()), index % 5


def pictures() -> Pictures:
    torch.manual_seed(0)
    return Pictures().double()


def serial_pictures() -> list[float]:
    model, losses = pictures(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in torch.utils.data.DataLoader(Album(), batch_size=4):
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@ranks(2)
def test_a_pipeline_finds_its_example_in_the_loader() -> None:
    wanted = serial_pictures()
    plain: Any = torch.utils.data.DataLoader(Album(), batch_size=4)
    plugin = HybridParallelPlugin(1, 2, num_microbatches=2, precision="fp64")
    for loader in (plain, plugin.prepare_dataloader(Album(), batch_size=4)):
        model, losses = pictures(), []
        before = torch.get_rng_state()
        booster, optimizer = Booster(plugin=plugin), torch.optim.SGD(model.parameters(), lr=0.1)
        boosted, stepped, _, sharded, _ = booster.boost(model, optimizer, nn.functional.cross_entropy, loader)
        assert torch.equal(torch.get_rng_state(), before)
        assert loader.dataset.read == [0]
        batches = iter(sharded)
        for _ in wanted:
            found = booster.execute_pipeline(batches, boosted, None, stepped)
            assert stepped is not None
            stepped.step()
            stepped.zero_grad()
            losses.append(float(found["loss"]))
        assert losses == pytest.approx(wanted, rel=1e-9)

    model = pictures()
    config = dict(parallel=dict(pipeline=2), NUM_MICRO_BATCHES=2, precision="fp64")
    engine, train, _, _ = initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.cross_entropy, plain, config=config
    )
    batches = iter(train)
    for loss in wanted:
        assert float(engine.execute_schedule(batches)[2]) == pytest.approx(loss, rel=1e-9)
        engine.step()


@ranks(2)
def test_without_a_loader_the_error_says_where_to_write_an_example() -> None:
    plugin, model = HybridParallelPlugin(1, 2, num_microbatches=2, precision="fp64"), pictures()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    once: Any = iter([])
    for loader in (None, once):
        with pytest.raises(
            SpecError, match=r"HybridParallelPlugin\(\.\.\., engine=dict\(example=next\(iter\(dataloader\)\)"
        ):
            Booster(plugin=plugin).boost(model, optimizer, nn.functional.cross_entropy, loader)
    with pytest.raises(SpecError, match=r"example=next\(iter\(dataloader\)\) in the config"):
        initialize(
            model,
            optimizer,
            nn.functional.cross_entropy,
            config=dict(parallel=dict(pipeline=2), precision="fp64"),
        )


@ranks(2)
def test_several_backwards_before_a_step() -> None:
    model = gpt()
    booster = Booster(plugin=LowLevelZeroPlugin(stage=1, precision="fp64"))
    boosted, optimizer, *_ = booster.boost(model, adamw(model))
    assert optimizer is not None
    settings = dict(name="adamw", lr=1e-2, weight_decay=0.1, eps=1e-4)
    engine = Engine(gpt(), dict(zero=dict(stage=1, placement="cuda")), optimizer=settings, precision="fp64")
    batch = engine.shard_batch(torch.stack([row["input_ids"] for row in rows()[:8]]))
    with booster.no_sync(boosted, optimizer):
        booster.backward(boosted(batch[:2], labels=batch[:2]).loss / 2, optimizer)
    booster.backward(boosted(batch[2:], labels=batch[2:]).loss / 2, optimizer)
    optimizer.step()
    engine.train_step(batch)
    for name, value in engine.full_state_dict().items():
        torch.testing.assert_close(boosted.state_dict()[name], value, rtol=1e-9, atol=1e-11)


def write_as_colossalai(folder: Path, state: dict[str, torch.Tensor]) -> None:
    """What its ``save_model(..., shard=True)`` writes by default: shards of torch with an index; rank 0 alone."""
    if groups.rank_and_world_size()[0] == 0:
        folder.mkdir()
        where = {name: f"pytorch_model-{1 + i % 2:05}.bin" for i, name in enumerate(state)}
        for file in set(where.values()):
            torch.save({name: value for name, value in state.items() if where[name] == file}, folder / file)
        index = {"metadata": {"total_size": 0.1}, "weight_map": where}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index, indent=2))


@ranks(2)
def test_files(tmp_path: Path) -> None:
    ids = torch.stack([row["input_ids"] for row in rows()[:4]])

    def start(plugin: Plugin) -> tuple[Booster, Any, Any, Any]:
        booster = Booster(plugin=plugin)
        model = gpt()
        optimizer = adamw(model)
        boosted, steps, _, _, schedule = booster.boost(model, optimizer, lr_scheduler=halving(optimizer))
        return booster, boosted, steps, schedule

    def step(booster: Booster, model: Any, optimizer: Any, schedule: Any) -> float:
        loss = model(ids, labels=ids).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        schedule.step()
        return float(loss.detach())

    booster, model, optimizer, schedule = start(GeminiPlugin(precision="fp64"))
    for _ in range(3):
        step(booster, model, optimizer, schedule)
    booster.save_model(model, tmp_path / "one.safetensors")
    booster.save_model(model, tmp_path / "one.bin")
    booster.save_model(model, tmp_path / "folder", shard=True, use_safetensors=True)
    booster.save_optimizer(optimizer, tmp_path / "optimizer", shard=True)
    booster.save_lr_scheduler(schedule, tmp_path / "schedule")
    saved = model.state_dict()
    write_as_colossalai(tmp_path / "theirs", saved)
    wanted = [step(booster, model, optimizer, schedule) for _ in range(2)]

    hybrid = HybridParallelPlugin(tp_size=2, pp_size=1, precision="fp64")
    again, other, steps, rates = start(hybrid)
    for place in ("one.safetensors", "one.bin", "folder", "theirs"):
        other.load_state_dict({name: torch.zeros_like(value) for name, value in saved.items()})
        again.load_model(other, tmp_path / place)
        assert all(torch.equal(value, saved[name]) for name, value in other.state_dict().items()), place
    again.load_optimizer(steps, tmp_path / "optimizer")
    again.load_lr_scheduler(rates, tmp_path / "schedule")
    assert [step(again, other, steps, rates) for _ in range(2)] == pytest.approx(wanted, rel=1e-9)
    assert rates.get_last_lr() == schedule.get_last_lr() == [1e-2 / 4]
    with pytest.raises(CheckpointError, match="nothing"):
        again.load_model(other, tmp_path / "nothing.safetensors")
    with pytest.raises(SpecError, match=r"there is no 'low_cpu_mem'\. Did you mean 'low_cpu_mem_mode'"):
        again.load_optimizer(steps, tmp_path / "optimizer", low_cpu_mem=True)
    with pytest.raises(SpecError, match="prefix='x': files are called"):
        again.save_model(other, tmp_path / "folder", prefix="x")


@ranks(2)
def test_a_pretrained_model_that_is_made_in_a_lazy_context(tmp_path: Path) -> None:
    """Its weights are real then, and its rotary tables, which are in no file, still to be made."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if groups.rank_and_world_size()[0] == 0:
        torch.manual_seed(1)
        sizes = dict(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=1)
        LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)).save_pretrained(tmp_path)
    barrier(Mesh(dict(data=2)).group("data"))
    plain = LlamaForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.stack([row["input_ids"] for row in rows()[:2]])
    wanted = float(plain(ids, labels=ids).loss)
    for plugin in (
        GeminiPlugin(precision="fp32"),
        HybridParallelPlugin(tp_size=2, pp_size=1, precision="fp32"),
    ):
        with LazyInitContext():
            model = LlamaForCausalLM.from_pretrained(tmp_path)
        assert any(buffer.is_meta for buffer in model.buffers())
        boosted, *_ = Booster(plugin=plugin).boost(model, adamw(model))
        assert all(torch.equal(value, plain.state_dict()[name]) for name, value in boosted.state_dict().items())
        assert float(boosted(ids, labels=ids).loss.detach()) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: GeminiPlugin(placement_polcy="auto"),
            "there is no 'placement_polcy'. Did you mean 'placement_policy'?",
        ),
        (
            lambda: GeminiPlugin(placement_policy="gpu"),
            "placement_policy='gpu': it is one of static, auto, cuda, cpu, const",
        ),
        (lambda: GeminiPlugin(shard_param_frac=0.5), "shard_param_frac=0.5: it is one of 1.0, 0.0"),
        (lambda: GeminiPlugin(precision="fp8"), "precision='fp8': it is one of fp16, bf16, fp32, fp64"),
        (lambda: GeminiPlugin(master_weights=False), "master weights in float32 are always kept"),
        (lambda: LowLevelZeroPlugin(stage=4), "stage=4: it is one of 1, 2, 3"),
        (lambda: LowLevelZeroPlugin(extra_dp_size=2), "shards go over all data ranks here: leave it out"),
        (lambda: HybridParallelPlugin(tp_size=2), "pp_size is missing"),
        (lambda: HybridParallelPlugin(2, tp_size=2, pp_size=1), "tp_size is given twice"),
        (lambda: HybridParallelPlugin(2, 1, sp_size=2), "sp_size=2 without enable_sequence_parallelism=True"),
        (
            lambda: HybridParallelPlugin(2, 1, enable_sequence_parallelism=True),
            "sequence_parallelism_mode=None: write one of",
        ),
        (
            lambda: HybridParallelPlugin(1, 1, enable_sequence_parallelism=True, sequence_parallelism_mode="ring"),
            "over the ranks of tp_size, which is 1",
        ),
        (
            lambda: HybridParallelPlugin(
                1, 1, enable_sequence_parallelism=True, sequence_parallelism_mode="all_to_all"
            ),
            "without sp_size",
        ),
        (lambda: HybridParallelPlugin(1, 2, pp_style="interleaved"), "needs num_model_chunks=2"),
        (
            lambda: HybridParallelPlugin(1, 2, num_model_chunks=3),
            "num_model_chunks=3 goes with pp_style='interleaved'",
        ),
        (lambda: HybridParallelPlugin(1, 2, custom_policy=object()), "give roles by name"),
        (lambda: Booster(mixed_precision="bf17"), "there is no 'bf17'. Did you mean 'bf16'?"),
        (
            lambda: Booster(mixed_precision="bf16", plugin=GeminiPlugin()),
            "which has a precision itself: write GeminiPlugin(precision='bf16')",
        ),
        (lambda: Booster(plugin="gemini"), "plugin='gemini': give a plugin of meshfold.colossalai"),
        (lambda: Booster().no_sync(), "give the model that boost(...) returned"),
        (
            lambda: Booster().save_model(gpt(), "file"),
            "save_model(...) was given GPT: give the model that boost(...) returned",
        ),
        (lambda: Booster().load_model(gpt(), "file"), "give the model that boost(...) returned"),
        (lambda: Booster().save_optimizer(gpt(), "file"), "give the optimizer that boost(...) returned"),
        (lambda: Booster().load_optimizer(gpt(), "file"), "give the optimizer that boost(...) returned"),
        (lambda: Booster().execute_pipeline(iter([]), gpt()), "give the model that boost(...) returned"),
        (
            lambda: Booster(plugin=HybridParallelPlugin(1, 2, microbatch_size=1)).boost(gpt()),
            "how many micro-batches",
        ),
    ],
    ids=lambda value: re.sub(r"\W+", "-", value)[:40] if isinstance(value, str) else "",
)
def test_mistakes_say_what_to_write(make: Callable[[], object], message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)):
        make()


SPECS: dict[str, tuple[Plugin, dict[str, Any], object]] = {
    "gemini": (
        GeminiPlugin(offload_optim_frac=1.0, offload_param_frac=0.5, precision="bf16"),
        dict(zero=dict(stage=3, placement="static", offload_optim_frac=1.0, offload_param_frac=0.5)),
        "bf16",
    ),
    "gemini-auto": (
        GeminiPlugin(placement_policy="auto", shard_param_frac=0.0, precision="fp32"),
        dict(zero=dict(stage=2, placement="auto")),
        "fp32",
    ),
    "megatron": (
        HybridParallelPlugin(
            4, 1, enable_sequence_parallelism=True, sequence_parallelism_mode="split_gather", precision="fp32"
        ),
        dict(tensor=dict(size=4), sequence=dict(mode="megatron")),
        "fp32",
    ),
    "overlap": (
        HybridParallelPlugin(
            4, 1, enable_sequence_parallelism=True, sequence_parallelism_mode="ring", precision="fp32"
        ),
        dict(tensor=dict(size=4, overlap="ring"), sequence=dict(mode="megatron")),
        "fp32",
    ),
    "ulysses": (
        HybridParallelPlugin(
            1,
            1,
            sp_size=2,
            enable_sequence_parallelism=True,
            sequence_parallelism_mode="all_to_all",
            zero_stage=2,
            cpu_offload=True,
            precision="fp32",
        ),
        dict(sequence=dict(mode="ulysses", size=2), zero=dict(stage=2, placement="cpu")),
        "fp32",
    ),
    "ring": (
        HybridParallelPlugin(2, 1, 4, "bf16", enable_sequence_parallelism=True, sequence_parallelism_mode="ring_attn"),
        dict(tensor=dict(size=2), sequence=dict(mode="ring", size=4)),
        "bf16",
    ),
    "stages": (
        HybridParallelPlugin(2, 4, num_microbatches=8, pp_style="interleaved", num_model_chunks=2, precision="bf16"),
        dict(tensor=dict(size=2), pipeline=dict(size=4, schedule="interleaved", microbatches=8, chunks=2)),
        "bf16",
    ),
    "zero-bubble": (
        HybridParallelPlugin(1, 4, num_microbatches=8, pp_style="zbv", num_model_chunks=2, precision="bf16"),
        dict(pipeline=dict(size=4, schedule="zb-v", microbatches=8)),
        "bf16",
    ),
    "scale": (
        LowLevelZeroPlugin(stage=1, initial_scale=2**10),
        dict(zero=dict(stage=1, placement="cuda")),
        dict(
            name="fp16",
            initial_scale=2.0**10,
            min_scale=1.0,
            growth_factor=2.0,
            backoff_factor=0.5,
            growth_interval=1000,
            hysteresis=2,
            max_scale=2.0**32,
        ),
    ),
    "whole": (TorchFSDPPlugin(sharding_strategy="NO_SHARD"), {}, None),
}


@pytest.mark.parametrize("name", SPECS)
def test_what_a_plugin_means(name: str) -> None:
    plugin, parallel, precision = SPECS[name]
    settings = plugin.settings()
    assert settings.parallel == parallel
    assert settings.engine.get("precision") == precision
    from meshfold.mesh import ParallelSpec

    ParallelSpec.parse(settings.parallel)  # is a spec


def test_arguments_that_do_nothing_are_said_once() -> None:
    model = nn.Linear(4, 4)
    plugin = GeminiPlugin(precision="fp32", max_prefetch=2, search_range_m=64, norm_type=math.inf)
    with pytest.warns(MigrationNote) as said:
        boosted, *_ = Booster(plugin=plugin).boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    [note] = [str(one.message) for one in said if one.category is MigrationNote]
    assert note.startswith("GeminiPlugin: max_prefetch=2 does nothing")
    assert "search_range_m=64 does nothing" in note
    assert boosted.engine.runner.clipping.norm_type == math.inf


def test_what_the_boosted_pair_refuses() -> None:
    model = nn.Linear(4, 4)
    booster = Booster()
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert optimizer is not None
    assert boosted.unwrap() is boosted.engine.model
    assert optimizer.unwrap() is boosted.engine.optimizer
    for call, message in (
        (lambda: optimizer.step(lambda: 0.0), "step(closure)"),
        (lambda: boosted.load_state_dict({}, strict=False), "give all names of the model"),
        (
            lambda: booster.enable_lora(model, lora_config=None),
            "write model = peft.get_peft_model(model, lora_config)",
        ),
        (lambda: booster.execute_pipeline(iter([]), boosted), "write pp_size=2"),
        (lambda: booster.boost("model"), "boost(model='model')"),  # type: ignore[arg-type]
    ):
        with pytest.raises(SpecError, match=re.escape(message)):
            call()
    for clips in (optimizer.clip_grad_by_norm, optimizer.clip_grad_by_value):
        with pytest.raises(TrainingError, match="there are no gradients now"):
            clips(1.0)
