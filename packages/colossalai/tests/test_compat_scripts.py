"""What scripts for Colossal-AI do around the loop: schedules that nobody hands over, loggers, plugins that are asked."""

from __future__ import annotations

import argparse
import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshfold import colossalai as compat
from meshfold.colossalai import (
    Booster,
    Config,
    CosineAnnealingWarmupLR,
    GeminiPlugin,
    HybridAdam,
    HybridParallelPlugin,
    LinearWarmupLR,
    MigrationNote,
    TorchDDPPlugin,
    TorchFSDPPlugin,
    disable_existing_loggers,
    from_deepspeed,
    get_current_device,
    get_default_parser,
    get_dist_logger,
    gpc,
    is_using_ddp,
    is_using_pp,
)
from meshfold.colossalai.context import StageManager
from meshfold.colossalai.settings import settings_of
from meshfold.colossalai.submodules import FAMILIES
from meshfold.engine import initialize
from meshfold.mesh import Mesh, SpecError
from meshfold.mesh.testing import ranks
from meshfold.models import build

STEPS = 5


@pytest.fixture
def forgotten() -> Iterator[None]:
    """``gpc`` knows nothing before and after."""
    gpc.destroy()
    yield
    gpc.destroy()


# -- the optimizer that was handed over --------------------------------------------------------------------------------


def net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3)).double()


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        (
            torch.randn(6, 4, generator=generator, dtype=torch.float64),
            torch.randint(3, (6,), generator=generator),
        )
        for _ in range(STEPS)
    ]


def serial() -> list[float]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    losses = []
    for inputs, targets in batches():
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return losses


def through_initialize(model: nn.Module, optimizer: Any, parallel: dict[str, Any], schedule: Any) -> list[float]:
    engine, *_ = initialize(model, optimizer, nn.CrossEntropyLoss(), config=dict(parallel=parallel, precision="fp64"))
    losses = []
    for batch in batches():
        optimizer.zero_grad()  # the script's own, which a loop may still call
        inputs, targets = engine.shard_batch(batch)
        loss = engine.criterion(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def through_booster(model: nn.Module, optimizer: Any, parallel: dict[str, Any], schedule: Any) -> list[float]:
    assert not parallel
    booster = Booster(plugin=TorchDDPPlugin(engine=dict(precision="fp64")))
    model, boosted, *_ = booster.boost(model, optimizer)
    losses = []
    for inputs, targets in batches():
        loss = nn.functional.cross_entropy(model(inputs), targets)
        booster.backward(loss, boosted)  # type: ignore[arg-type]
        boosted.step()  # type: ignore[union-attr]
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    return losses


WAYS: dict[str, tuple[Callable[..., list[float]], dict[str, Any]]] = {
    "initialize": (through_initialize, {}),
    "initialize-zero": (through_initialize, dict(zero=dict(stage=1))),
    "booster": (through_booster, {}),
}


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.filterwarnings("error")
def test_a_schedule_that_nobody_hands_over_still_sets_the_rates(name: str, forgotten: None) -> None:
    through, parallel = WAYS[name]
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    torch.testing.assert_close(through(model, optimizer, parallel, schedule), serial())
    assert isinstance(optimizer, torch.optim.SGD)
    assert schedule.get_last_lr() == [0.5 / 2**STEPS]


def test_what_would_reach_no_parameter_is_refused(forgotten: None) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    initialize(model, optimizer, nn.CrossEntropyLoss(), config={})
    with pytest.raises(SpecError, match=r"optimizer\.step\(\) of the AdamW that was handed over .* engine\.step\(\)"):
        optimizer.step()
    with pytest.raises(SpecError, match=r"engine\.save\(folder\)"):
        optimizer.state_dict()
    with pytest.raises(SpecError, match=r"engine\.load\(folder\)"):
        optimizer.load_state_dict({})
    plain = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(SpecError, match="give the optimizer that boost"):
        Booster().backward(torch.ones(()), plain)  # type: ignore[arg-type]


# -- schedules ---------------------------------------------------------------------------------------------------------


def rates(make: Callable[[torch.optim.Optimizer], Any], steps: int) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    schedule, found = make(optimizer), []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def test_the_warm_ups_of_theirs() -> None:
    found = rates(lambda o: CosineAnnealingWarmupLR(o, total_steps=6, warmup_steps=2, eta_min=0.5), 7)
    down = [0.5 + 1.5 * (1 + math.cos(math.pi * i / 4)) / 2 for i in range(5)]
    assert found == pytest.approx([1.0, 2.0, *down])
    assert down[0] == 2.0
    assert down[-1] == 0.5
    found = rates(lambda o: LinearWarmupLR(o, total_steps=6, warmup_steps=3), 8)
    assert found == pytest.approx([0.5, 1.0, 1.5, 2.0, 4 / 3, 2 / 3, 0.0, 0.0])
    torch_own = rates(lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5), 6)
    assert rates(lambda o: CosineAnnealingWarmupLR(o, 5), 6) == pytest.approx(torch_own)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(total_steps=4, warmup_steps=4), "leaves no step after the warm-up"),
        (dict(total_steps=4.0), "total_steps=4.0: give a whole number"),
        (dict(total_steps=4, warmup_steps=-1), "warmup_steps=-1: give a whole number"),
    ],
    ids=["no-step-left", "float", "negative"],
)
def test_warm_ups_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        CosineAnnealingWarmupLR(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), **settings)


# -- what a script begins with -----------------------------------------------------------------------------------------


@ranks(2)
def test_messages_of_some_ranks(tmp_path: Path) -> None:
    mine = torch.distributed.get_rank()
    logger = get_dist_logger(f"of-{mine}-{tmp_path.name}")
    logger.log_to_file(tmp_path)
    logger.info("both")
    logger.info("the second", ranks=[1])
    logger.debug("nobody yet")
    logger.set_level("DEBUG")
    logger.warning("the first", ranks=[0])
    said = (tmp_path / f"rank_{mine}.log").read_text()
    assert ("both" in said, "the first" in said, "the second" in said) == (True, mine == 0, mine == 1)
    assert "nobody yet" not in said
    with pytest.raises(SpecError, match="level='LOUD'"):
        logger.set_level("LOUD")


def test_what_scripts_begin_with(forgotten: None) -> None:
    parser = get_default_parser()
    parser.add_argument("--epochs", type=int)
    given = parser.parse_args(["--config", "c.py", "--epochs", "3", "--host", "node1", "--port", "29500"])
    assert isinstance(given, argparse.Namespace)
    assert (given.config, given.epochs, given.port) == ("c.py", 3, 29500)
    assert get_current_device() == torch.device("cuda", 0) or get_current_device().type == "cpu"
    assert not is_using_pp()
    gpc.show(Config(), Mesh({"data": 2, "pipe": 2, "tensor": 1}, rank=1))
    assert is_using_pp()
    assert is_using_ddp()
    gpc.show(Config(), Mesh({"data": 1, "pipe": 1, "tensor": 2}, rank=1))
    assert not is_using_pp()
    assert not is_using_ddp()
    gpc.destroy()
    assert not is_using_ddp()
    loud, kept = logging.getLogger("loud.of.theirs"), logging.getLogger("kept.of.theirs")
    levels = {name: logging.getLogger(name).level for name in logging.Logger.manager.loggerDict}
    try:
        for one in (loud, kept):
            one.setLevel(logging.DEBUG)
        disable_existing_loggers(exclude=["kept.of.theirs"])
        assert (loud.level, kept.level) == (logging.WARNING, logging.DEBUG)
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


# -- configs -----------------------------------------------------------------------------------------------------------


def test_configs_are_asked_by_attributes_all_the_way_down(tmp_path: Path) -> None:
    file = tmp_path / "config.py"
    file.write_text(
        "from meshfold.colossalai import HybridAdam\n"
        "zero = dict(model_config=dict(tensor_placement_policy='cpu'), optimizer_config=dict(initial_scale=32))\n"
        "optimizer = dict(type=HybridAdam, lr=1e-3)\n"
        "model = dict(type=dict, checkpoint=True, num_chunks=1)\n"
    )
    config = Config.from_file(file)
    assert config.zero.model_config.tensor_placement_policy == "cpu"
    assert hasattr(config.model, "num_chunks")
    assert config.model.pop("type")(**config.model) == dict(checkpoint=True, num_chunks=1)
    assert config.optimizer.type is HybridAdam
    assert settings_of(config).parallel["zero"]["placement"] == "cpu"
    with pytest.raises(AttributeError, match="no 'lr'; it has type, momentum"):
        _ = Config(optimizer=dict(type=1, momentum=2)).optimizer.lr
    with pytest.raises(SpecError, match="there is no 'optimiser'"):
        settings_of(Config(optimiser=dict(lr=1e-3)))


# -- plugins -----------------------------------------------------------------------------------------------------------


def test_plugins_are_asked_for_their_arguments() -> None:
    plugin = HybridParallelPlugin(2, pp_size=4, num_microbatches=8, zero_stage=1)
    assert (plugin.tp_size, plugin.pp_size, plugin.zero_stage) == (2, 4, 1)
    assert (plugin.pp_style, plugin.precision) == ("1f1b", "fp16")
    with pytest.raises(AttributeError, match="HybridParallelPlugin has no 'pp_sise'"):
        _ = plugin.pp_sise
    with pytest.warns(MigrationNote, match="device='cuda' does nothing"):
        GeminiPlugin(device="cuda").translation.say("GeminiPlugin")


@pytest.mark.parametrize("rank", range(4))
def test_which_stage_a_rank_has(rank: int) -> None:
    manager = StageManager(Mesh({"data": 1, "pipe": 2, "tensor": 2}, rank=rank))
    assert (manager.stage, manager.num_stages) == (rank // 2, 2)
    assert manager.is_first_stage() == (rank < 2)
    assert manager.is_last_stage() == manager.is_last_device() == (rank >= 2)


MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "size-string": (lambda: HybridParallelPlugin(tp_size="2", pp_size=1), r"size='2' is a string.*Write size=2"),
    "size-negative": (lambda: HybridParallelPlugin(tp_size=-2, pp_size=1), r"size=-2 is negative"),
    "fraction": (lambda: GeminiPlugin(offload_optim_frac=2.0), r"offload_optim_frac=2\.0 is not between 0 and 1"),
    "fsdp-name": (lambda: TorchFSDPPlugin(mixed_precision="bf16"), r"mixed_precision='bf16': give MixedPrecision"),
    "fsdp-dtype": (
        lambda: TorchFSDPPlugin(mixed_precision=SimpleNamespace(param_dtype=torch.float64)),
        r"give MixedPrecision\(param_dtype=torch\.bfloat16\)",
    ),
    "deepspeed-list": (lambda: from_deepspeed([1]), r"from_deepspeed\(\[1\]\): a dict, or the path"),  # type: ignore[arg-type]
    "deepspeed-number": (
        lambda: from_deepspeed({"zero_optimization": 3}),
        r"zero_optimization=3: write a dict with keys such as 'stage'",
    ),
    "deepspeed-both": (
        lambda: from_deepspeed({"bf16": {"enabled": True}, "fp16": {"enabled": True}}),
        "bf16 and fp16 are both enabled",
    ),
    "deepspeed-quoted": (lambda: from_deepspeed({"zero_optimization": {"stage": "3"}}), "write 3 without quotes"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_show_before_anything_starts(name: str) -> None:
    make, message = MISTAKES[name]
    with pytest.raises(SpecError, match=message):
        make()


@pytest.mark.parametrize(("text", "word"), [("[1, 2]", "it holds a list"), ("{'a': 1}", "it is not JSON")])
def test_files_that_are_no_config_of_deepspeed(text: str, word: str, tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(text)
    with pytest.raises(SpecError, match=word):
        from_deepspeed(file)


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("Linear1D_Col", "*Linear*"),
        ("VocabParallelEmbedding1D", "*Embedding*"),
        ("VocabParallelCrossEntropyLoss2D", "VocabParallelCrossEntropyLoss*"),
        ("LossHook", "*Hook"),
        ("MultiStepLR", "*LR"),
        ("FusedLayerNorm", "*LayerNorm*"),
    ],
)
def test_families_of_names_say_what_to_write(name: str, pattern: str) -> None:
    with pytest.raises(ImportError, match=f"there is no {name} here; write ") as caught:
        getattr(compat, name)
    assert FAMILIES[pattern] in str(caught.value)


def test_a_float_batch_without_a_loss_function_is_told_of_pairs() -> None:
    from meshfold.engine import Engine

    engine = Engine(nn.Linear(2, 2), {}, optimizer=dict(name="sgd", lr=0.1))
    with pytest.raises(SpecError, match=r"a pair \(inputs, targets\), and Engine\(\.\.\., loss_fn="):
        engine.train_step(torch.randn(4, 2))
    with pytest.raises(SpecError, match=r"that is not empty$"):
        Engine(lambda: build("gpt-tiny"), {}).eval_step(torch.zeros(0, 3, dtype=torch.int64))
