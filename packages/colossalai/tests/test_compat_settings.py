"""What a config, a plugin's table and the names of other libraries mean here; every mistake says what to write."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from meshfold import colossalai as compat
from meshfold.colossalai import (
    AMP_TYPE,
    Config,
    DistCoordinator,
    MigrationNote,
    ParallelMode,
    TensorShardStrategy,
    from_deepspeed,
    get_dataloader,
    gpc,
    launch_from_torch,
    tables,
)
from meshfold.colossalai.arguments import ROOTS, Argument, translate
from meshfold.colossalai.context import AXES, ParallelContext
from meshfold.colossalai.deepspeed import TABLE as DEEPSPEED
from meshfold.colossalai.settings import settings_of
from meshfold.colossalai.submodules import ELSEWHERE
from meshfold.engine import Engine, initialize
from meshfold.mesh import Mesh, ParallelSpec, SpecError
from meshfold.mesh.testing import fake_world, ranks

TABLES = {"DEEPSPEED": DEEPSPEED} | {
    name: table
    for name, table in vars(tables).items()
    if name.isupper() and not name.startswith("_") and isinstance(table, dict) and name != "PRECISIONS"
}


@pytest.fixture(autouse=True)
def _no_config_of_another_test() -> Iterator[None]:
    """``initialize`` without a config takes that of the last ``launch`` of the process."""
    yield
    gpc.show(Config(), Mesh({}))


@pytest.mark.parametrize("name", TABLES)
def test_every_argument_becomes_one_thing(name: str) -> None:
    assert len(TABLES[name]) > 2
    for argument in TABLES[name].values():
        if name == "ZERO_MODEL" and argument is tables.ZERO_MODEL["shard_strategy"]:
            continue  # in every script; chunks are searched for
        assert sum(map(bool, (argument.to, argument.word, argument.instead))) == 1
        assert not argument.to or argument.to.split(".")[0] in ROOTS


def test_values_are_compared_with_the_defaults() -> None:
    table = {
        "a": Argument(default=1, word="of this"),
        "b": Argument(default=0.5, to="zero.b"),
        "c": Argument(default=0, to="zero.c", always=True),
    }
    assert translate("x", dict(a=1.0, b=0.5), table).words == []
    assert translate("x", dict(a=True), table).words == ["a=True does nothing: of this"]
    assert translate("x", dict(b=1), table).settings == {"zero.b": 1, "zero.c": 0}


CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "nothing": ({}, {}, {}),
    "own-names": (dict(BATCH_SIZE=8, LEARNING_RATE=0.1), {}, {}),
    "pipeline": (
        dict(parallel=dict(pipeline=2, tensor=dict(size=4, mode="1d")), NUM_MICRO_BATCHES=8),
        dict(pipeline=dict(size=2, microbatches=8), tensor=dict(size=4, mode="1d")),
        {},
    ),
    "interleaved": (
        dict(parallel=dict(pipeline=dict(size=2)), NUM_MICRO_BATCHES=4, model=dict(num_chunks=2)),
        dict(pipeline=dict(size=2, schedule="interleaved", microbatches=4, chunks=2)),
        {},
    ),
    "no-pipeline": (dict(NUM_MICRO_BATCHES=4), {}, {}),
    "sequence": (
        dict(parallel=dict(tensor=dict(size=4, mode="sequence"))),
        dict(sequence=dict(size=4, mode="ring")),
        {},
    ),
    "mode-none": (dict(parallel=dict(tensor=dict(size=4, mode=None))), dict(tensor=dict(size=4)), {}),
    "naive": (
        dict(fp16=dict(mode=AMP_TYPE.NAIVE, initial_scale=2**8), clip_grad_norm=1.0, gradient_accumulation=4),
        {},
        dict(precision=dict(name="fp16", initial_scale=2**8), clip_grad_norm=1.0, gradient_accumulation=4),
    ),
    "torch": (
        dict(fp16=dict(mode=AMP_TYPE.TORCH, init_scale=2.0**9)),
        {},
        dict(precision=dict(name="fp16", initial_scale=2.0**9)),
    ),
    "off": (dict(fp16=dict(mode=AMP_TYPE.TORCH, enabled=False)), {}, dict(precision="fp32")),
    "no-clipping": (dict(clip_grad_norm=0.0), {}, {}),
    "opt": (
        dict(
            zero=dict(
                model_config=dict(shard_strategy=TensorShardStrategy(), tensor_placement_policy="auto"),
                optimizer_config=dict(gpu_margin_mem_ratio=0.0, initial_scale=2**14),
            )
        ),
        dict(zero=dict(stage=3, placement="auto")),
        dict(precision=dict(name="fp16", initial_scale=2**14)),
    ),
    "opt-bf16": (
        dict(zero=dict(model_config=dict(shard_strategy=TensorShardStrategy(), bf16=True))),
        dict(zero=dict(stage=3, placement="cuda")),
        dict(precision="bf16"),
    ),
    "ours": (
        dict(parallel=dict(data=2), zero=dict(stage=2, placement="cpu"), precision="bf16", seed=7, recompute="blocks"),
        dict(data=2, zero=dict(stage=2, placement="cpu")),
        dict(precision="bf16", seed=7, recompute="blocks"),
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_what_a_config_means(name: str) -> None:
    config, parallel, engine = CONFIGS[name]
    found = settings_of(Config(config))
    assert (found.parallel, found.engine, found.words) == (parallel, engine, ())
    ParallelSpec.parse(found.parallel)  # is a spec


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "misspelt": (
        dict(gradient_acumulation=2),
        "there is no 'gradient_acumulation'. Did you mean 'gradient_accumulation'?",
    ),
    "own-lower-case": (dict(learning_rate=0.1), "Names of your own are in capitals, LEARNING_RATE"),
    "parallel": (dict(parallel=4), "parallel=4: a dict"),
    "moe": (dict(parallel=dict(moe=dict(size=2))), "moe={'size': 2}: write expert=dict(size=...) instead"),
    "two-sequences": (
        dict(parallel=dict(tensor=dict(mode="sequence", size=2), sequence=dict(mode="ring", size=2))),
        "leave one of them out",
    ),
    "zero": (dict(zero=3), "zero=3: a dict"),
    "two-zeros": (
        dict(parallel=dict(zero=dict(stage=1)), zero=dict(stage=2)),
        "zero is given both inside parallel and next to it",
    ),
    "mixed-zero": (dict(zero=dict(model_config={}, stage=2)), "'stage' beside model_config"),
    "model-config": (dict(zero=dict(model_config=dict(shard_stratgy=1))), "Did you mean 'shard_strategy'?"),
    "fp16": (dict(fp16=True), "fp16=True: a dict"),
    "static-scale": (dict(fp16=dict(mode=AMP_TYPE.APEX, loss_scale=128.0)), "the scale moves: write initial_scale=..."),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_in_a_config(name: str) -> None:
    config, message = MISTAKES[name]
    with pytest.raises(SpecError, match=re.escape(message)):
        settings_of(Config(config))


def test_what_does_nothing_is_said(recwarn: pytest.WarningsRecorder) -> None:
    model = nn.Linear(4, 4)
    config = dict(torch_ddp=dict(bucket_cap_mb=50), gradient_handler=[dict(type="ZeROGradientHandler")])
    engine, *rest = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), config=config)
    assert rest == [None, None, None]
    [note] = [str(warning.message) for warning in recwarn if warning.category is MigrationNote]
    assert note.startswith("initialize: gradient_handler=[{'type': 'ZeROGradientHandler'}] does nothing")
    with pytest.raises(SpecError, match="has no criterion"):
        _ = engine.criterion


def test_a_file_is_run_in_a_namespace_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "config.py"
    file.write_text(
        "import math\n"
        "from meshfold.colossalai import AMP_TYPE\n"
        "def _twice(x): return 2 * x\n"
        "def half(x): return x / 2\n"
        "BATCH_SIZE = _twice(4)\n"
        "clip_grad_norm = math.sqrt(4.0)\n"
        "parallel = dict(tensor=dict(mode='2.5d', depth=1, size=4))\n"
        "fp16 = dict(mode=AMP_TYPE.NAIVE)\n"
    )
    config = Config.from_file(file)
    assert set(config) == {"BATCH_SIZE", "clip_grad_norm", "parallel", "fp16"}
    assert config.BATCH_SIZE == 8
    assert settings_of(config).engine == {"clip_grad_norm": 2.0, "precision": "fp16"}
    with pytest.raises(AttributeError, match="the config has no 'EPOCHS'; it has BATCH_SIZE"):
        _ = config.EPOCHS
    assert "BATCH_SIZE" not in globals()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "a = 1\nparallel = dict(tensor=dict(size=n))\n",
            "line 2: NameError: name 'n' is not defined: parallel = dict(tensor",
        ),
        ("a = 1\n\nparallel = dict(\n", "line 3: '(' was never closed"),
        ("from colossalai.amp import AMP_TYPE\n", "line 1: ModuleNotFoundError"),
        ("from colossalai.amp import AMP_TYPE\n", "Import it from meshfold.colossalai"),
        ("def f():\n    return 1 / 0\nx = f()\n", "line 2: ZeroDivisionError"),
    ],
    ids=["name", "syntax", "import", "import-advice", "inner"],
)
def test_errors_of_a_file_point_to_its_line(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "config.py"
    file.write_text(text)
    with pytest.raises(SpecError, match=re.escape(message)) as failed:
        Config.from_file(file)
    assert str(file) in str(failed.value)


def test_what_is_no_config(tmp_path: Path) -> None:
    for wrong, message in (
        (tmp_path / "config.py", "cannot be read: No such file"),
        ("config.yaml", "whose name ends in .py"),
        (3, "a dict, or the path of a Python file"),
    ):
        with pytest.raises(SpecError, match=re.escape(message)):
            Config.of(wrong)
    assert Config.of(None) == {}


# -- optimizers, schedules, loaders ---------------------------------------------------------------------------------


def start(**given: Any) -> Any:
    model = given.pop("model", None) or nn.Linear(4, 4)
    optimizer = given.pop("optimizer", torch.optim.SGD)
    if isinstance(optimizer, type):
        optimizer = optimizer(model.parameters(), lr=0.1)
    return initialize(model, optimizer, nn.MSELoss(), **given)


def stepped() -> torch.optim.Optimizer:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.zeros(1, 4)).sum().backward()
    optimizer.step()
    return optimizer


class Odd(torch.optim.SGD):
    """Whose settings are not its arguments."""

    def __init__(self, params: Any, twice: float = 1.0) -> None:
        super().__init__(params, lr=2 * twice)


def odd() -> Any:
    model = nn.Linear(4, 4)
    return start(model=model, optimizer=Odd(model.parameters(), twice=0.1))


def schedule_of_another() -> Any:
    return torch.optim.lr_scheduler.StepLR(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1), 1)


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "stepped": (lambda: start(optimizer=stepped()), "has stepped already"),
    "another-model": (
        lambda: start(optimizer=torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1)),
        "a parameter of shape (2, 3) that is not the model's",
    ),
    "odd": (odd, "its settings ['lr'] are not arguments of its class: give a function that makes it, optimizer=lambda"),
    "model": (lambda: initialize(lambda: nn.Linear(1, 1), None), "pass a function that builds one to Engine"),  # type: ignore[arg-type]
    "schedule": (lambda: start(lr_scheduler=schedule_of_another()), "is of another optimizer than the one"),
    "no-schedule": (lambda: start(lr_scheduler=3), "lr_scheduler=3: give a torch scheduler"),
    "criterion": (lambda: initialize(nn.Linear(1, 1), None, "mse"), "criterion='mse': give a function"),  # type: ignore[arg-type]
    "trained-criterion": (lambda: initialize(nn.Linear(1, 1), None, nn.Linear(1, 1)), "has trained parameters"),
    "hooks": (lambda: start(ophooks=[print]), "register hooks of torch"),
    "loader": (lambda: start(train_dataloader=3), "train loader 3: give a DataLoader"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_taken_over(name: str) -> None:
    make, message = WRONG[name]
    with pytest.raises(SpecError, match=re.escape(message)):
        make()


def test_optimizers_with_state_before_their_first_step_and_others_of_ours() -> None:
    model = nn.Linear(4, 4)
    engine, *_ = start(model=model, optimizer=torch.optim.Adagrad(model.parameters(), lr=0.3, lr_decay=0.1))
    assert type(engine.optimizer) is torch.optim.Adagrad
    assert engine.optimizer.defaults["lr_decay"] == 0.1
    model = nn.Linear(4, 4)
    engine, *_ = start(model=model, optimizer=compat.HybridAdam(model.parameters(), lr=0.3, adamw_mode=False))
    assert type(engine.optimizer) is compat.HybridAdam
    assert engine.optimizer.defaults["adamw_mode"] is False
    engine, _, _, schedule = start(
        optimizer=dict(name="sgd", lr=0.5),
        lr_scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.1),
    )
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
    assert engine.optimizer.param_groups[0]["lr"] == 0.5  # the script steps it
    schedule.step()
    assert engine.optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


def test_parameters_that_the_optimizer_does_not_have_stay() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    before = [p.detach().clone() for p in model.parameters()]
    engine, *_ = start(model=model, optimizer=torch.optim.SGD(model[1].parameters(), lr=0.1))
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
    now = engine.full_state_dict()
    assert torch.equal(now["0.weight"], before[0])
    assert not torch.equal(now["1.weight"], before[2])


@ranks(2)
def test_loaders_are_sharded_over_the_data_axis() -> None:
    numbers = torch.arange(24.0).view(12, 2)
    data = TensorDataset(numbers, torch.arange(12))

    def served(loader: Any, **parallel: int) -> tuple[Engine, list[list[int]]]:
        engine, train, _, _ = start(
            model=nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2)),
            train_dataloader=loader,
            config=dict(parallel=parallel),
        )
        return engine, [batch[1].tolist() for batch in train]

    engine, found = served(DataLoader(data, batch_size=4))
    first = 2 * engine.mesh.rank
    assert found == [[start + first, start + first + 1] for start in (0, 4, 8)]
    _, found = served(DataLoader(data, batch_size=4), tensor=2)
    assert found == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    _, shuffled = served(DataLoader(data, batch_size=4, shuffle=True), tensor=2)
    assert sorted(row for batch in shuffled for row in batch) == list(range(12))
    assert shuffled != [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    _, mine = served(DataLoader(data, batch_size=4, shuffle=True))
    assert all(set(part) <= set(whole) for part, whole in zip(mine, shuffled, strict=True))  # shuffled alike
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=2, rank=engine.mesh.rank, shuffle=False)
    assert served(DataLoader(data, batch_size=2, sampler=sampler))[1][0] == [
        engine.mesh.rank,
        engine.mesh.rank + 2,
    ]
    with pytest.raises(SpecError, match=r"sampler is for 2 ranks.*there are 1 data coordinates"):
        served(DataLoader(data, batch_size=2, sampler=sampler), tensor=2)
    weighted = torch.utils.data.WeightedRandomSampler([1.0] * 12, 12, generator=torch.Generator().manual_seed(0))
    assert [len(batch) for batch in served(DataLoader(data, batch_size=4, sampler=weighted))[1]] == [2, 2, 2]
    pairs = [(numbers[:4], torch.arange(4)), (numbers[4:8], torch.arange(4, 8))]
    assert served(pairs)[1] == [[first, first + 1], [4 + first, 5 + first]]
    with pytest.raises(
        SpecError,
        match="the last batch of the train loader has 1 row for 2 data coordinates: write drop_last=True",
    ):
        served(DataLoader(TensorDataset(numbers[:9], torch.arange(9)), batch_size=4))
    with pytest.raises(SpecError, match="a batch of the train loader has 1 row for 2 data coordinates: use a larger"):
        served(DataLoader(data, batch_size=1))
    launch_from_torch(dict(BATCH_SIZE=3))
    own = get_dataloader(data, batch_size=gpc.config.BATCH_SIZE)
    assert served(own)[1] == [[n + 3 * engine.mesh.rank for n in batch] for batch in ([0, 1, 2], [6, 7, 8])]


# -- gpc ------------------------------------------------------------------------------------------------------------


def test_gpc_answers_as_there() -> None:
    """Ranks of the groups of 2.5D and 3D are those of Colossal-AI: row, column and depth have strides 1, q and q²."""
    with fake_world(16, rank=5):
        read = launch_from_torch(dict(parallel=dict(pipeline=2, tensor=dict(mode="2.5d", size=4, depth=1)), EPOCHS=3))
        assert gpc.config is read
        assert gpc.config.EPOCHS == 3
        assert (
            gpc.get_global_rank(),
            gpc.data_parallel_size,
            gpc.pipeline_parallel_size,
            gpc.tensor_parallel_size,
        ) == (5, 2, 2, 4)
        groups = {mode: gpc.get_ranks_in_group(mode) for mode in ParallelMode}
        assert groups[ParallelMode.DATA] == [5, 13]
        assert groups[ParallelMode.PIPELINE] == [1, 5]
        assert groups[ParallelMode.TENSOR] == [4, 5, 6, 7]
        assert groups[ParallelMode.MODEL] == [0, 1, 2, 3, 4, 5, 6, 7]
        assert groups[ParallelMode.PARALLEL_2P5D_ROW] == [4, 5]
        assert groups[ParallelMode.PARALLEL_2P5D_COL] == [5, 7]
        assert gpc.get_local_rank(ParallelMode.PARALLEL_2P5D_ROW) == 1
        assert gpc.is_pipeline_last_stage()
        assert not gpc.is_pipeline_first_stage()
        assert gpc.is_initialized(ParallelMode.PIPELINE)
        assert not gpc.is_initialized(ParallelMode.PARALLEL_1D)
    cube = ParallelContext()
    cube.show(Config(), Mesh({"data": 1, "a": 2, "b": 2, "c": 2}, rank=3))
    assert cube.get_ranks_in_group(ParallelMode.PARALLEL_3D_WEIGHT) == [2, 3]
    assert cube.get_ranks_in_group(ParallelMode.PARALLEL_3D_INPUT) == [1, 3]
    assert cube.get_ranks_in_group(ParallelMode.PARALLEL_3D_OUTPUT) == [3, 7]
    assert set(AXES) == set(ParallelMode)
    with pytest.raises(SpecError, match=r"mode='data': one of ParallelMode\.GLOBAL"):
        cube.get_world_size("data")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=r"call launch_from_torch\(config\)"):
        ParallelContext().get_global_rank()


def test_launch_takes_what_it_took() -> None:
    with pytest.warns(MigrationNote, match="rank=0 does nothing: the ranks are those of meshfold run"):
        compat.launch(config={}, rank=0, world_size=1, host="localhost", port=29500, backend="nccl", seed=3)
    assert settings_of(gpc.config).engine["seed"] == 3
    with pytest.raises(SpecError, match="there is no 'nprocs'"):
        compat.launch(nprocs=2)


@ranks(2)
def test_one_before_the_others(tmp_path: Path) -> None:
    coordinator = DistCoordinator()
    assert coordinator.is_master() == (coordinator.rank == 0)
    assert coordinator.is_last_process() == (coordinator.rank == 1)
    with coordinator.priority_execution():
        if coordinator.is_master():
            (tmp_path / "made").write_text("by the first")
        assert (tmp_path / "made").exists()
    assert coordinator.on_master_only()(lambda: 7)() == (7 if coordinator.is_master() else None)
    coordinator.block_all()


# -- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ELSEWHERE)
def test_names_that_are_not_here_say_what_to_write(name: str) -> None:
    with pytest.raises(ImportError, match=re.escape(ELSEWHERE[name])):
        getattr(compat, name)


def test_every_name_of_theirs_has_a_row_in_the_page() -> None:
    page = (Path(__file__).parents[3] / "docs" / "from-colossalai.md").read_text()
    missing = [name for name in (*compat.__all__, *ELSEWHERE) if not re.search(rf"`{name}\b", page)]
    assert not missing
    with pytest.raises(ImportError, match=r"has no 'Boster'\. Did you mean 'Booster'"):
        _ = compat.Boster


# -- DeepSpeed ------------------------------------------------------------------------------------------------------

DS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "zero-3-offload": (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu"},
                "offload_param": {"device": "cpu"},
            },
            "bf16": {"enabled": True},
            "gradient_clipping": 1.0,
        },
        dict(parallel=dict(zero=dict(stage=3, placement="cpu")), precision="bf16", clip_grad_norm=1.0),
    ),
    "ratio": (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.3}}},
        dict(parallel=dict(zero=dict(stage=3, placement="static", offload_optim_frac=0.3))),
    ),
    "nvme": (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/scratch"}}},
        dict(parallel=dict(zero=dict(stage=3, placement="auto", offload_path="/scratch"))),
    ),
    "fp16": (
        {
            "fp16": {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 500, "loss_scale": 0},
            "zero_optimization": {"stage": 0},
        },
        dict(parallel={}, precision=dict(name="fp16", initial_scale=4096.0, growth_interval=500)),
    ),
    "optimizer": (
        {
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": "auto"}},
            "gradient_accumulation_steps": 4,
            "tensor_parallel": {"autotp_size": 2},
            "sequence_parallel_size": 2,
        },
        dict(
            parallel=dict(tensor=2, sequence=dict(mode="ulysses", size=2)),
            optimizer=dict(name="adamw", lr=1e-3, betas=(0.9, 0.95)),
            gradient_accumulation=4,
        ),
    ),
}


@pytest.mark.parametrize("name", DS)
def test_configs_of_deepspeed(name: str, tmp_path: Path) -> None:
    config, wanted = DS[name]
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(config))
    assert from_deepspeed(config) == from_deepspeed(file) == wanted
    ParallelSpec.parse(wanted["parallel"])


def test_a_config_of_deepspeed_makes_an_engine() -> None:
    config = {
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "steps_per_print": 10,
        "zero_optimization": {"stage": 2},
    }
    with pytest.warns(MigrationNote, match="steps_per_print=10 does nothing"):
        settings = from_deepspeed(config)
    engine = Engine(nn.Linear(2, 2), **settings)
    assert engine.spec.zero is not None
    assert engine.spec.zero.stage == 2


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"zero_optimisation": {"stage": 2}}, "Did you mean 'zero_optimization.stage'?"),
        ({"zero_optimization": {"stage": 4}}, "stage=4: it is one of 0, 1, 2, 3"),
        ({"scheduler": {"type": "WarmupLR"}}, "lr_scheduler=lambda optimizer"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
            "parameters stay on the device",
        ),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}, "without nvme_path"),
        ({"optimizer": {"type": "OneBitAdam"}}, "Adam, AdamW and SGD are known by name"),
        ("nothing.json", "from_deepspeed('nothing.json')"),
    ],
    ids=["misspelt", "stage", "scheduler", "nvme-parameters", "no-path", "optimizer", "no-file"],
)
def test_mistakes_in_a_config_of_deepspeed(config: Any, message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)):
        from_deepspeed(config)


def test_settings_are_few() -> None:
    """A table's row stays a row."""
    assert {field.name for field in fields(Argument)} == {"default", "to", "by", "always", "word", "instead"}
