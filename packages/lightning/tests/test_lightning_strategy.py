"""What MeshfoldStrategy is beside training: names and arguments, what ranks tell each other, stages without a fit, old errors."""

from __future__ import annotations

import copy
import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("lightning", reason="needs meshfold[lightning]")

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch.utils.data import DataLoader
from torchmetrics import SumMetric

from meshfold.lightning import ColossalAIStrategy, MeshfoldPrecision, MeshfoldStrategy
from meshfold.mesh import SpecError
from meshfold.mesh.testing import ranks

sys.path.append(str(Path(__file__).parent))  # for the helpers beside this file, on every rank
from lightning_cases import (
    RULES,
    Boring,
    Characters,
    Characterwise,
    Rows,
    be_quiet,
    strategy_of,
    trainer_of,
)

TENSOR, ZERO = {"data": 2, "tensor": 2}, {"zero": {"stage": 3, "placement": "cuda"}}
OLD_ARGUMENTS = {
    "use_chunk": True,
    "chunk_size": None,
    "enable_distributed_storage": True,
    "placement_policy": "auto",
    "force_outputs_fp32": False,
    "gpu_margin_mem_ratio": 0.0,
    "chunk_search_range": 67108864,
    "chunk_search_n_grids": 4096,
    "min_chunk_size": 33554432,
    "initial_scale": 65536,
    "min_scale": 1,
    "growth_factor": 2,
    "backoff_factor": 0.5,
    "growth_interval": 1000,
    "hysteresis": 2,
    "max_scale": 4294967296,
    "accelerator": None,
    "parallel_devices": None,
    "cluster_environment": None,
    "checkpoint_io": None,
    "precision_plugin": None,
}
OLD_NAMES = [
    "all_gather",
    "broadcast",
    "lightning_module_state_dict",
    "model_sharded_context",
    "model_to_device",
    "optimizer_step",
    "predict_step",
    "reduce",
    "setup",
    "setup_precision_plugin",
    "teardown",
    "test_step",
    "validation_step",
    "handles_gradient_accumulation",
    "restore_checkpoint_after_setup",
    "root_device",
]


def test_importing_the_engine_does_not_import_lightning(warm_python: str) -> None:
    code = "import sys, meshfold.engine.engine, meshfold.engine.model.roots; sys.exit('lightning' in sys.modules)"
    assert subprocess.run([warm_python, "-c", code], check=False).returncode == 0


def test_both_names_are_known_to_the_trainer_with_the_old_arguments_and_methods() -> None:
    assert {"meshfold", "colossalai"} <= set(StrategyRegistry.available_strategies())
    be_quiet()
    trainer = Trainer(strategy="colossalai", accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    assert type(trainer.strategy) is ColossalAIStrategy
    assert isinstance(trainer.strategy, DDPStrategy)
    found = inspect.signature(ColossalAIStrategy).parameters
    assert {name: found[name].default for name in list(found)[: len(OLD_ARGUMENTS)]} == OLD_ARGUMENTS
    assert all(hasattr(ColossalAIStrategy, name) for name in OLD_NAMES)
    assert trainer.strategy.restore_checkpoint_after_setup


def test_the_old_arguments_do_what_they_said() -> None:
    def spec(**options: Any) -> Any:
        return ColossalAIStrategy(**options)._parallel

    assert spec() == {"zero": {"stage": 3, "placement": "auto"}}
    assert spec(placement_policy="cpu", enable_distributed_storage=False) == {"zero": {"stage": 2, "placement": "cpu"}}
    assert spec(use_chunk=False) == {}
    plugin = ColossalAIStrategy(initial_scale=8, min_scale=2, precision_plugin=MeshfoldPrecision("32-true"))
    plugin.precision_plugin = _mixed()
    scale = plugin.precision_plugin.engine.scale
    assert (scale.initial_scale, scale.min_scale, scale.hysteresis, scale.growth_interval) == (8, 2, 2, 1000)


def _mixed() -> Any:
    from lightning.pytorch.plugins.precision import MixedPrecision

    return MixedPrecision("16-mixed", "cpu")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(placement_policy="gpu"), "placement_policy='gpu': write one of 'auto', 'cpu', 'cuda'"),
        (dict(placement_polcy="cpu"), "there is no 'placement_polcy'. Did you mean 'placement_policy'"),
        (dict(min_chunk_size=0), "min_chunk_size=0"),
        (dict(gpu_margin_mem_ratio=2.0), "gpu_margin_mem_ratio=2.0"),
        (dict(growth_factor=0.5), "growth_factor=0.5"),
        (dict(parallel=dict(pipeline=2)), "pipeline=2 under Lightning"),
        (dict(parallel=dict(tensr=2)), "Did you mean 'tensor'"),
        (dict(checkpoints="zip"), "checkpoints='zip': write 'folder' or 'file'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_settings_are_refused_before_anything_starts(options: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        ColossalAIStrategy(**options)


def test_precision_plugins_of_the_trainer_are_translated_and_others_refused() -> None:
    strategy = MeshfoldStrategy()
    strategy.precision_plugin = Precision()
    assert isinstance(strategy.precision_plugin, MeshfoldPrecision)
    with pytest.raises(SpecError, match=r"write one of 32-true.*Did you mean 'bf16-mixed'"):
        MeshfoldPrecision("bf16-mixd")

    class Own(Precision):
        pass

    with pytest.raises(SpecError, match="the precision plugin Own"):
        strategy.precision_plugin = Own()


# -- ranks --------------------------------------------------------------------------------------------------------


class Tells(Boring):
    """Asks everything that ranks can be asked, from inside of a validation step."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = SumMetric()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        strategy, mesh = self.trainer.strategy, self.trainer.strategy.world.mesh
        data, tensor = mesh.index("data"), mesh.index("tensor")
        mine = torch.tensor([data + 1.0], requires_grad=True)
        assert strategy.reduce(mine, reduce_op="sum").item() == 3.0
        assert strategy.reduce(mine).item() == 1.5
        assert strategy.reduce(torch.tensor(data), reduce_op="max").item() == 1
        assert strategy.reduce(torch.tensor(tensor + 1), group="tensor", reduce_op="sum").item() == 3
        assert strategy.reduce("no tensor") == "no tensor"
        assert strategy.broadcast({"from": self.global_rank}, src=2) == {"from": 2}
        assert strategy.reduce_boolean_decision(self.global_rank != 3) is False
        assert strategy.reduce_boolean_decision(self.global_rank == 3, all=False) is True
        gathered = self.all_gather(mine)
        assert gathered.tolist() == [[1.0], [2.0]]
        with torch.enable_grad():
            (self.all_gather(mine, sync_grads=True)[0] * 3).sum().backward()
        assert mine.grad is not None
        assert mine.grad.item() == (6.0 if data == 0 else 0.0)  # both data ranks looked at the first one's
        with pytest.raises(SpecError, match="the mesh has the axes data, tensor"):
            strategy.reduce(mine, group="row")
        with pytest.raises(SpecError, match="write one of sum"):
            strategy.reduce(mine, reduce_op="product")
        self.rows.update(len(batch))
        self.log("rows", self.rows, on_step=False, on_epoch=True)
        self.log("place", float(data), sync_dist=True, on_step=False, on_epoch=True, batch_size=len(batch))
        self.log("added", 1.0, sync_dist=True, reduce_fx="sum", on_step=False, on_epoch=True)


@ranks(4)
def test_ranks_speak_over_data_coordinates_each_once() -> None:
    strategy = strategy_of(TENSOR)
    (found,) = trainer_of(strategy).validate(Tells(), DataLoader(Rows(), batch_size=4), verbose=False)
    assert found == {"rows": 24.0, "place": 0.5, "added": 6.0}
    strategy.close()


@ranks(4)
def test_ranks_along_tensor_axes_are_given_the_same_rows() -> None:
    class Looks(Boring):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            tensor = self.trainer.strategy.reduce(batch[:, 0], group="tensor")
            torch.testing.assert_close(tensor, batch[:, 0])
            other = self.all_gather(batch[:, 0])
            assert not torch.equal(other[0], other[1])

    strategy = strategy_of(TENSOR)
    trainer_of(strategy).validate(Looks(), DataLoader(Rows(), batch_size=4), verbose=False)
    strategy.close()


class Stages(Characterwise):
    """Made late, and the second time not again."""

    def __init__(self) -> None:
        super().__init__(late=True)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("parallel", "precision"),
    [
        pytest.param(TENSOR, "32-true", marks=pytest.mark.slow),
        (ZERO, "32-true"),
        (TENSOR, "bf16-mixed"),
        pytest.param(ZERO, "bf16-mixed", marks=pytest.mark.slow),
    ],
)
@ranks(4)
def test_stages_go_in_any_order_with_and_without_a_fit(parallel: dict[str, Any], precision: str) -> None:
    data = DataLoader(Characters(), batch_size=4)
    strategy, module = strategy_of(parallel, rules=RULES), Stages()
    trainer = trainer_of(strategy, max_epochs=1, precision=precision)
    before = trainer.validate(module, data, verbose=False)[0]["seen"]
    whole = strategy.full_state_dict()
    assert {value.dtype for value in whole.values()} == {torch.float32}
    trainer.fit(module, data)
    between = trainer.test(module, data, verbose=False)[0]["tested"]
    assert between < before
    again = trainer_of(strategy_of(parallel, rules=RULES), max_epochs=1, precision=precision)
    again.fit(module, data)  # by another trainer, with new optimizers
    after = again.test(module, data, verbose=False)[0]["tested"]
    assert after < between
    predicted = again.predict(module, data)
    copied = copy.deepcopy(module)
    # Not state_dict(): under stage 3 it is an error, which says to ask the strategy for whole weights.
    assert [name for name, _ in copied.named_parameters()] == [name for name, _ in module.named_parameters()]
    assert [name for name, _ in copied.named_buffers()] == [name for name, _ in module.named_buffers()]
    assert sum(map(len, predicted)) == 24 * Characters.length // again.strategy.world.row_size
    again.strategy.close()


@ranks(2)
def test_a_module_stays_as_the_first_trainer_has_set_it_up() -> None:
    data = DataLoader(Rows(), batch_size=4)
    strategy, module = strategy_of({"tensor": 2}), Boring()
    trainer_of(strategy).validate(module, data, verbose=False)
    with pytest.raises(SpecError, match="by an earlier trainer, and this one needs"):
        trainer_of(strategy_of({})).validate(module, data, verbose=False)
    with pytest.raises(SpecError, match=r"was set up for torch\.float32"):
        trainer_of(strategy_of({"tensor": 2}), precision="bf16-mixed").validate(module, data, verbose=False)
    module.layer = nn.Linear(32, 2)
    with pytest.raises(SpecError, match=r"'layer\.weight' was made after the module was set up"):
        trainer_of(strategy_of({"tensor": 2})).validate(module, data, verbose=False)

    class Empty(LightningModule):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None: ...

    with pytest.raises(SpecError, match="has no parameters"):
        trainer_of(strategy_of({})).validate(Empty(), data, verbose=False)


@ranks(2)
def test_weights_that_are_loaded_inside_of_configure_model_go_without_recording(tmp_path: Path) -> None:
    values = nn.Linear(32, 2).state_dict()

    class Loads(Boring):
        def __init__(self) -> None:
            super().__init__()
            del self.layer

        def configure_model(self) -> None:
            if not hasattr(self, "layer"):
                self.layer = nn.Linear(32, 2)
                self.layer.load_state_dict(values)

    strategy = strategy_of({"tensor": 2}, sharded_init=False)
    trainer_of(strategy).validate(Loads(), DataLoader(Rows(), batch_size=4), verbose=False)
    torch.testing.assert_close(strategy.full_state_dict()["layer.weight"], values["weight"])
    assert strategy.lightning_module_state_dict()["layer.weight"].shape == (1, 32)
    assert strategy.lightning_module_state_dict(rank_zero_only=True).keys() == (
        {"layer.weight", "layer.bias"} if strategy.is_global_zero else set()
    )
    strategy.close()


SCRIPT = """
import sys
from pathlib import Path
import meshfold.lightning
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

trainer = Trainer(
    strategy="meshfold", accelerator="cpu", devices=2, max_steps=2, logger=False, enable_progress_bar=False,
    default_root_dir=sys.argv[1], enable_model_summary=False,
)
trainer.fit(BoringModel())
Path(sys.argv[1], f"rank {trainer.global_rank}").write_text(f"{trainer.strategy.world.mesh.world_size} {trainer.global_step}")
"""


@pytest.mark.slow
def test_the_trainer_starts_its_own_processes(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    known = (
        "RANK",
        "WORLD_SIZE",
        "MASTER_",
        "GROUP_RANK",
    )  # what trainers of other tests have left in this process
    clean = {name: value for name, value in os.environ.items() if not any(part in name for part in known)}
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=clean,
    )
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"rank {rank}").read_text() for rank in range(2)] == ["2 2", "2 2"]
    (saved,) = (tmp_path / "checkpoints").iterdir()
    assert (saved / "model.safetensors").exists()


@ranks(2)
def test_a_later_trainer_finds_processes_that_it_has_not_started() -> None:
    """What starts them sets variables; Lightning's own environment takes WORLD_SIZE away at the end of a stage."""
    from lightning.fabric.plugins.environments import LightningEnvironment

    from meshfold.engine.world import join_world
    from meshfold.mesh.processes import Environment, running_world

    here = running_world()
    assert here is not None
    place = Environment(rank=here.rank, world_size=2, local_rank=here.rank, local_world_size=2, source="torchrun")
    with pytest.MonkeyPatch.context() as changed:
        strategy = MeshfoldStrategy(cluster_environment=LightningEnvironment())
        started = dict(
            RANK=here.rank,
            LOCAL_RANK=here.rank,
            WORLD_SIZE=2,
            LOCAL_WORLD_SIZE=2,
            MASTER_ADDR="localhost",
            MASTER_PORT=29500,
        )
        for name, value in started.items():
            changed.setenv(name, str(value))
        strategy.teardown()
        assert os.environ["WORLD_SIZE"] == "2"
        changed.delenv("RANK")  # as Lightning's own launcher leaves them
        strategy.teardown()
        assert "WORLD_SIZE" not in os.environ
        changed.setenv("RANK", str(here.rank))
        assert join_world(dict(data=2), "cpu", place).row_size == 2
