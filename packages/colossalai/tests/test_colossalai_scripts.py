"""Eight scripts in the shape of Colossal-AI's examples: their imports, their order of calls, small models and random data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import meshfold.colossalai as colossalai
from meshfold.colossalai.booster import Booster
from meshfold.colossalai.booster.plugin import (  # type: ignore[import-not-found]
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
)
from meshfold.colossalai.cluster import DistCoordinator  # type: ignore[import-not-found]
from meshfold.colossalai.core import global_context as gpc  # type: ignore[import-not-found]
from meshfold.colossalai.lazy import LazyInitContext  # type: ignore[import-not-found]
from meshfold.colossalai.legacy.utils import get_dataloader  # type: ignore[import-not-found]
from meshfold.colossalai.logging import (  # type: ignore[import-not-found]
    disable_existing_loggers,
    get_dist_logger,
)
from meshfold.colossalai.nn.lr_scheduler import (  # type: ignore[import-not-found]
    CosineAnnealingWarmupLR,
    LinearWarmupLR,
)
from meshfold.colossalai.nn.optimizer import HybridAdam  # type: ignore[import-not-found]
from meshfold.colossalai.script_tools import get_accelerator
from meshfold.colossalai.utils import get_current_device  # type: ignore[import-not-found]
from meshfold.mesh.testing import ranks
from meshfold.models import GPT, GPTConfig, Llama, LlamaConfig

pytestmark = pytest.mark.filterwarnings("ignore::meshfold.colossalai.MigrationNote")


def learns(losses: list[float]) -> None:
    """The last losses are below the first ones."""
    assert all(map(math.isfinite, losses))
    assert sum(losses[-2:]) < 0.97 * sum(losses[:2]), losses


class Table(torch.utils.data.Dataset[Any]):
    """Rows that a function makes of their numbers."""

    def __init__(self, length: int, row: Callable[[int], Any]) -> None:
        self.length, self.row = length, row

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: int) -> Any:
        return self.row(number)


def picture(number: int) -> tuple[Tensor, int]:
    label = number % 3
    generator = torch.Generator().manual_seed(number)
    return torch.randn(3, 8, 8, generator=generator) * 0.3 + label, label


def tokens(number: int) -> dict[str, Tensor]:
    ids = (torch.arange(12) + number) % 16
    return dict(input_ids=ids, labels=ids, attention_mask=torch.ones(12, dtype=torch.int64))


# -- 1: a ResNet on CIFAR, through Booster ---------------------------------------------------------------------------


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv, self.second = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = F.relu(x + self.second(self.conv(x)))
        out: Tensor = self.head(x.mean((2, 3)))
        return out


@pytest.mark.few(1)
@pytest.mark.parametrize("plugin", ["torch_ddp", "torch_ddp_fp16", "low_level_zero", "gemini"])
@ranks(2)
def test_resnet(plugin: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {}
    colossalai.launch_from_torch(seed=42)
    coordinator = DistCoordinator()
    if plugin == "torch_ddp_fp16":
        settings["mixed_precision"] = "fp16"
    if plugin.startswith("torch_ddp"):
        settings["plugin"] = TorchDDPPlugin()
    elif plugin == "gemini":
        settings["plugin"] = GeminiPlugin(initial_scale=2**5)
    else:
        settings["plugin"] = LowLevelZeroPlugin(initial_scale=2**5)
    booster: Any = Booster(**settings)
    with coordinator.priority_execution():
        train, test = Table(48, picture), Table(12, lambda number: picture(100 + number))
    train_loader = booster.plugin.prepare_dataloader(train, batch_size=4, shuffle=True, drop_last=True)
    test_loader = booster.plugin.prepare_dataloader(test, batch_size=3, shuffle=False, drop_last=False)
    torch.manual_seed(0)
    model: Any = ResNet()
    criterion: Any = nn.CrossEntropyLoss()
    optimizer: Any = HybridAdam(model.parameters(), lr=3e-2)
    lr_scheduler: Any = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[20], gamma=1 / 3)
    model, optimizer, criterion, _, lr_scheduler = booster.boost(
        model, optimizer, criterion=criterion, lr_scheduler=lr_scheduler
    )
    losses: list[float] = []
    for _ in range(2):
        model.train()
        for images, labels in train_loader:
            images, labels = images.to(get_current_device()), labels.to(get_current_device())
            loss = criterion(model(images), labels)
            booster.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        lr_scheduler.step()
    learns(losses)
    booster.save_model(model, str(tmp_path / "model"), shard=True)
    booster.save_optimizer(optimizer, str(tmp_path / "optimizer"), shard=True)
    booster.save_lr_scheduler(lr_scheduler, str(tmp_path / "lr_scheduler"))
    coordinator.block_all()
    model.eval()
    correct, total = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    with torch.no_grad():
        for images, labels in test_loader:
            predicted = model(images).argmax(1).cpu()
            total += labels.size(0)
            correct += (predicted == labels).sum()
    dist.all_reduce(correct)
    dist.all_reduce(total)
    assert total.item() == 12 and correct.item() >= 4
    before = model.state_dict()
    booster.load_model(model, str(tmp_path / "model"))
    torch.testing.assert_close(model.state_dict(), before)
    booster.load_lr_scheduler(lr_scheduler, str(tmp_path / "lr_scheduler"))


# -- 2: GPT under Gemini, of which the script counts speed ------------------------------------------------------------


@ranks(2)
def test_gpt_under_gemini() -> None:
    disable_existing_loggers()
    colossalai.launch_from_torch()
    logger = get_dist_logger()
    torch.manual_seed(123)
    with LazyInitContext(default_device=get_accelerator().get_current_device()):
        model: Any = GPT(GPTConfig(vocab_size=16, hidden=16, layers=2, heads=2, max_positions=16))
    plugin = GeminiPlugin(
        placement_policy="static",
        offload_optim_frac=1.0,
        offload_param_frac=1.0,
        strict_ddp_mode=True,
        initial_scale=2**5,
        search_range_m=128,
        hidden_dim=16,
        gpu_margin_mem_ratio=0.0,
    )
    optimizer: Any = HybridAdam(model.parameters(), lr=1e-2)
    booster: Any = Booster(plugin=plugin)
    wanted = sum(p.numel() for p in model.parameters())
    model, optimizer, _, _, _ = booster.boost(model, optimizer)
    size = sum(p.numel() for p in model.parameters())
    assert size == wanted > 0
    logger.info(f"the size of the model is {size}", ranks=[0])
    model.train()
    losses = []
    for step in range(8):
        ids = torch.stack([tokens(2 * step + row)["input_ids"] for row in range(2)])
        optimizer.zero_grad()
        outputs = model(input_ids=ids, labels=ids)
        get_accelerator().synchronize()
        booster.backward(outputs.loss, optimizer)
        optimizer.step()
        losses.append(outputs.loss.item())
    learns(losses)


# -- 3: PaLM under Gemini, which clips by itself -----------------------------------------------------------------------


def cycle(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


class Wrapped(nn.Module):
    """A model whose forward is its loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        logits = self.net(x[:, :-1]).logits
        return F.cross_entropy(logits.float().flatten(0, 1), x[:, 1:].flatten())


@ranks(2)
def test_palm_clips_with_torch() -> None:
    colossalai.launch_from_torch()
    torch.manual_seed(0)
    model: Any = Wrapped(Llama(LlamaConfig(vocab_size=16, hidden=16, layers=2, heads=2, max_positions=16)))
    plugin = GeminiPlugin(offload_optim_frac=1, initial_scale=2**5)
    booster: Any = Booster(plugin=plugin)
    optimizer: Any = HybridAdam(model.parameters(), lr=3e-2, initial_scale=2**5)
    model, optimizer, _, _, _ = booster.boost(model, optimizer)
    batches = cycle([torch.stack([tokens(4 * step + row)["input_ids"] for row in range(4)]) for step in range(4)])
    losses, norms = [], []
    for step in range(8):
        model.train()
        optimizer.zero_grad()
        loss = model(next(batches))
        booster.backward(loss, optimizer)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        losses.append(loss.item())
        assert model.engine.last.grad_norm <= 0.5 * 1.001
        if step % 4 == 0:
            model.eval()
            with torch.no_grad():
                assert math.isfinite(model(next(batches)).item())
    learns(losses)
    assert max(norms) > 0.5


# -- 4: BERT on GLUE through a pipeline, with its evaluation ------------------------------------------------------------


def sentence(number: int) -> dict[str, Tensor]:
    label = number % 2
    ids = torch.full((6,), 3 + label) + (torch.arange(6) + number) % 2 * 4
    return dict(input_ids=ids, attention_mask=torch.ones(6, dtype=torch.int64), labels=torch.tensor(label))


@ranks(2)
def test_bert_in_a_pipeline() -> None:
    transformers = pytest.importorskip("transformers", reason="needs meshfold[hf]")
    colossalai.launch_from_torch(seed=42)
    plugin = HybridParallelPlugin(
        tp_size=1,
        pp_size=2,
        num_microbatches=None,
        microbatch_size=2,
        enable_all_optimization=True,
        zero_stage=1,
        precision="fp32",
    )
    booster: Any = Booster(plugin=plugin)
    train_loader = plugin.prepare_dataloader(Table(32, sentence), batch_size=8, shuffle=True, drop_last=True)
    test_loader = plugin.prepare_dataloader(Table(8, sentence), batch_size=4, shuffle=False)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=16,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=8,
        num_labels=2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model: Any = transformers.BertForSequenceClassification(config)
    optimizer: Any = HybridAdam(model.parameters(), lr=1e-2, eps=1e-8)
    total = len(train_loader) * 3
    schedule: Any = transformers.get_linear_schedule_with_warmup(
        optimizer, num_warmup_steps=1, num_training_steps=total
    )

    def criterion(outputs: Any, inputs: Any) -> Any:
        return outputs["loss"]

    model, optimizer, criterion, _, schedule = booster.boost(
        model, optimizer, criterion=criterion, lr_scheduler=schedule
    )
    pipelined = isinstance(booster.plugin, HybridParallelPlugin) and booster.plugin.pp_size > 1
    is_last = pipelined and booster.plugin.stage_manager.is_last_stage()
    losses = []
    for _ in range(3):
        model.train()
        optimizer.zero_grad()
        batches = iter(train_loader)
        for _ in range(len(train_loader)):
            outputs = booster.execute_pipeline(batches, model, criterion, optimizer, return_loss=True)
            losses.append(float(outputs["loss"]))
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    learns(losses)
    model.eval()
    pp_group = booster.plugin.pp_group
    here = booster.plugin.pg_mesh.get_ranks_in_group(pp_group)
    hits = rows = 0
    with torch.no_grad():
        for batch in test_loader:
            outputs = booster.execute_pipeline(iter([batch]), model, criterion, return_loss=True, return_outputs=True)
            told: list[Any] = [None, None]
            if is_last:
                told = [outputs["outputs"]["logits"].argmax(1), outputs["loss"]]
            dist.broadcast_object_list(told, src=here[-1], group=pp_group)
            hits += int((told[0] == batch["labels"]).sum())
            rows += len(batch["labels"])
    assert rows == 8 and hits >= 6


# -- 5: ViT -----------------------------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["hybrid", "gemini"])
@ranks(2)
def test_vit(name: str) -> None:
    transformers = pytest.importorskip("transformers", reason="needs meshfold[hf]")
    colossalai.launch_from_torch()
    coordinator = DistCoordinator()
    plugin: Any = (
        HybridParallelPlugin(tp_size=2, pp_size=1, precision="fp32")
        if name == "hybrid"
        else GeminiPlugin(offload_optim_frac=1.0, pin_memory=True, initial_scale=2**5)
    )
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=8,
        patch_size=4,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model: Any = transformers.ViTForImageClassification(config)

    def row(number: int) -> dict[str, Any]:
        pixels, label = picture(number)
        return dict(pixel_values=pixels, labels=torch.tensor(label))

    loader = plugin.prepare_dataloader(Table(32, row), batch_size=8, shuffle=True, drop_last=True)
    optimizer: Any = HybridAdam(model.parameters(), lr=1e-2)
    total = len(loader) * 4
    schedule: Any = CosineAnnealingWarmupLR(optimizer=optimizer, total_steps=total, warmup_steps=1)
    booster: Any = Booster(plugin=plugin)
    model, optimizer, criterion, loader, schedule = booster.boost(
        model=model,
        optimizer=optimizer,
        criterion=lambda outputs, inputs: outputs["loss"],
        dataloader=loader,
        lr_scheduler=schedule,
    )
    losses = []
    for epoch in range(4):
        loader.sampler.set_epoch(epoch)
        model.train()
        for batch in loader:
            optimizer.zero_grad()
            outputs = model(**batch)
            loss = criterion(outputs, batch)
            booster.backward(loss, optimizer)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
    coordinator.print_on_master("trained")
    learns(losses)


# -- 6: OPT, fine-tuned ------------------------------------------------------------------------------------------------


@ranks(2)
def test_opt(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs meshfold[hf]")
    colossalai.launch_from_torch()
    torch.manual_seed(0)
    config = transformers.OPTConfig(
        vocab_size=16,
        hidden_size=16,
        num_hidden_layers=2,
        ffn_dim=32,
        num_attention_heads=2,
        word_embed_proj_dim=16,
        max_position_embeddings=16,
        dropout=0.0,
        attention_dropout=0.0,
        pad_token_id=1,
    )
    model: Any = transformers.OPTForCausalLM(config)
    model.gradient_checkpointing_enable()
    plugin = LowLevelZeroPlugin(initial_scale=2**5)
    loader = plugin.prepare_dataloader(Table(32, tokens), batch_size=4, shuffle=True, drop_last=True)
    optimizer: Any = HybridAdam(model.parameters(), lr=1e-2, weight_decay=0.01)
    schedule: Any = LinearWarmupLR(optimizer, total_steps=len(loader) * 2, warmup_steps=1)
    booster: Any = Booster(plugin=plugin)
    model, optimizer, _, loader, schedule = booster.boost(
        model=model, optimizer=optimizer, dataloader=loader, lr_scheduler=schedule
    )
    losses = []
    for _ in range(2):
        model.train()
        for batch in loader:
            optimizer.zero_grad()
            outputs = model(use_cache=False, **batch)
            loss = outputs["loss"]
            booster.backward(loss, optimizer)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
    learns(losses)
    booster.save_model(model, str(tmp_path / "opt.bin"))
    assert (tmp_path / "opt.bin").exists()


# -- 7: launch with a config, initialize, a schedule ------------------------------------------------------------------------


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.GELU()) for _ in range(4))
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.head(x)
        return out


@pytest.mark.few(1)
@pytest.mark.parametrize("pipeline", [1, 2])
@ranks(2)
def test_legacy_initialize(pipeline: int, tmp_path: Path) -> None:
    config = tmp_path / "config.py"
    if dist.get_rank() == 0:
        config.write_text(
            "from meshfold.colossalai.settings import AMP_TYPE\n"
            f"BATCH_SIZE = 8\nNUM_EPOCHS = 2\nNUM_MICRO_BATCHES = 2\nclip_grad_norm = 1.0\n"
            f"parallel = dict(pipeline={pipeline}, tensor=dict(size=1, mode=None))\n"
            + ("" if pipeline > 1 else "fp16 = dict(mode=AMP_TYPE.NAIVE, initial_scale=32)\n")
        )
    dist.barrier()
    colossalai.launch_from_torch(config=str(config))
    logger = get_dist_logger()
    torch.manual_seed(0)
    model: Any = Mixer()

    def row(number: int) -> tuple[Tensor, int]:
        pixels, label = picture(number)
        return pixels.mean(2).flatten()[:12], label

    train = get_dataloader(Table(48, row), shuffle=True, batch_size=gpc.config.BATCH_SIZE, drop_last=True)
    test = get_dataloader(Table(16, row), batch_size=gpc.config.BATCH_SIZE, add_sampler=True)
    criterion = nn.CrossEntropyLoss()
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=2e-2)
    schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    if pipeline > 1:  # what the loader of the first lines has is found by initialize
        assert gpc.is_pipeline_last_stage() == (dist.get_rank() == 1)
    engine, train, test, schedule = colossalai.initialize(model, optimizer, criterion, train, test, schedule)
    losses = []
    for epoch in range(gpc.config.NUM_EPOCHS):
        engine.train()
        batches = iter(train)
        for _ in range(len(train)):
            engine.zero_grad()
            _, _, loss = engine.execute_schedule(batches, return_output_label=False)
            engine.step()
            losses.append(float(loss))
        schedule.step()
        engine.eval()
        batches = iter(test)
        for _ in range(len(test)):
            _, _, loss = engine.execute_schedule(batches, forward_only=True, return_loss=True)
            assert math.isfinite(float(loss))
        logger.info(f"epoch {epoch}", ranks=[0])
    learns(losses)


# -- 8: Llama, pretrained, saved in shards and resumed ----------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["gemini", "hybrid"])
@ranks(2)
def test_llama_pretraining(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs meshfold[hf]")
    colossalai.launch_from_torch()
    coordinator = DistCoordinator()

    def plugin_of() -> Any:
        if name == "gemini":
            return GeminiPlugin(precision="bf16", initial_scale=2**16, max_norm=1.0, enable_gradient_accumulation=False)
        return HybridParallelPlugin(tp_size=2, pp_size=1, zero_stage=0, precision="bf16", max_norm=1.0)

    config = transformers.LlamaConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
    )

    def boosted() -> tuple[Any, Any, Any, Any, Any]:
        plugin = plugin_of()
        booster: Any = Booster(plugin=plugin)
        loader = plugin.prepare_dataloader(Table(32, tokens), batch_size=4, shuffle=True, drop_last=True, seed=7)
        torch.manual_seed(0)
        with LazyInitContext(default_device=get_accelerator().get_current_device()):
            model: Any = transformers.LlamaForCausalLM(config)
        optimizer: Any = HybridAdam(model.parameters(), lr=2e-2, betas=(0.9, 0.95), weight_decay=0.1)
        schedule: Any = CosineAnnealingWarmupLR(optimizer, total_steps=16, warmup_steps=2, eta_min=2e-3)
        model, optimizer, _, loader, schedule = booster.boost(
            model, optimizer, dataloader=loader, lr_scheduler=schedule
        )
        return booster, model, optimizer, loader, schedule

    booster, model, optimizer, loader, schedule = boosted()
    losses: list[float] = []

    def epoch(number: int) -> None:
        loader.sampler.set_epoch(number)
        for batch in loader:
            outputs = model(**batch)
            booster.backward(outputs[0], optimizer)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(float(outputs[0]))

    epoch(0)
    learns(losses)
    booster.save_model(model, tmp_path / "modeling", shard=True)
    booster.save_optimizer(optimizer, tmp_path / "optimizer", shard=True)
    booster.save_lr_scheduler(schedule, tmp_path / "lr_scheduler")
    coordinator.block_all()
    saved, model = model, None
    before = saved.state_dict()
    saved.engine.close()
    booster, model, optimizer, loader, schedule = boosted()
    booster.load_model(model, tmp_path / "modeling")
    booster.load_optimizer(optimizer, tmp_path / "optimizer")
    booster.load_lr_scheduler(schedule, tmp_path / "lr_scheduler")
    torch.testing.assert_close(model.state_dict(), before)
    epoch(1)
    assert sum(losses[-2:]) < sum(losses[:2])
