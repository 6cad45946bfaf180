"""Names that scripts for Colossal-AI import, under its paths: each is there, or the error says what to write."""

from __future__ import annotations

import copy
import importlib
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import meshfold.colossalai as colossalai
from meshfold import optimizers
from meshfold.colossalai import (
    Booster,
    CPUAdam,
    DistGaloreAwamW,
    DistributedAdaFactor,
    DistributedCAME,
    DistributedLamb,
    DPPluginBase,
    GaLoreAdamW8bit,
    GeminiPlugin,
    HybridAdam,
    HybridParallelPlugin,
    Lamb,
    Lars,
    LowLevelZeroPlugin,
    MigrationNote,
    get_accelerator,
    get_galore_param_groups,
    initialize,
)
from meshfold.mesh import SpecError
from meshfold.mesh.testing import ranks

THERE = """
accelerator: get_accelerator; amp: AMP_TYPE; booster: Booster; booster.plugin: DPPluginBase GeminiPlugin HybridParallelPlugin
LowLevelZeroPlugin TorchDDPPlugin TorchFSDPPlugin; booster.plugin.dp_plugin_base: DPPluginBase; cluster: DistCoordinator
ProcessGroupMesh; context: Config ParallelMode ParallelContext; context.parallel_mode: ParallelMode; core: global_context gpc;
lazy: LazyInitContext; legacy.amp: AMP_TYPE; legacy.context: ParallelMode; legacy.core: global_context; legacy.zero.init_ctx:;
legacy.zero.shard_utils: TensorShardStrategy; legacy.utils: get_dataloader; logging: disable_existing_loggers get_dist_logger;
nn.lr_scheduler: CosineAnnealingWarmupLR LinearWarmupLR; nn.optimizer: CPUAdam HybridAdam Lamb Lars CAME Adafactor DistributedLamb
DistributedCAME DistributedAdaFactor DistGaloreAwamW GaLoreAdamW8bit; nn.optimizer.galore: get_galore_param_groups;
nn.optimizer.distributed_galore: DistGaloreAwamW; nn.optimizer.hybrid_adam: HybridAdam;
nn.optimizer.distributed_lamb: DistributedLamb; utils: get_current_device get_dataloader is_using_pp is_using_ddp;
utils.model.colo_init_context:; zero: ColoInitContext ZeroInitContext; zero.init_ctx:;
zero.shard_utils: BucketTensorShardStrategy TensorShardStrategy; interface:; initialize:
"""
HINTED = """
amp: convert_to_naive_amp; auto_parallel.tensor_shard: initialize_model; booster.mixed_precision: FP16TorchMixedPrecision;
booster.plugin: MoeHybridParallelPlugin; checkpoint_io: CheckpointIO GeneralCheckpointIO; device: DeviceMesh; engine.schedule:
PipelineSchedule InterleavedPipelineSchedule; inference: InferenceConfig; kernel: KernelLoader; legacy.builder: build_from_registry;
legacy.nn: CrossEntropyLoss Linear1D_Col LayerNorm1D; legacy.nn.metric: Accuracy; legacy.pipeline.pipelinable: PipelinableContext;
legacy.registry: HOOKS; legacy.trainer: Trainer hooks; legacy.utils: MultiTimer clip_grad_norm_fp32 save_checkpoint; moe: SparseMLP;
nn: Accuracy CrossEntropyLoss Linear; nn.layer: VanillaLayerNorm WrappedDropout; nn.layer.parallel_1d: Embedding1D; nn.lr_scheduler:
MultiStepLR PolynomialLR; nn.optimizer: FusedAdam FusedLAMB FusedSGD GaLoreAdafactor cast_to_distributed;
nn.parallel: GeminiDDP ZeroDDP; pipeline:
PipelineStageManager; shardformer: ShardConfig ShardFormer; tensor: ColoParameter ComputePattern ComputeSpec ProcessGroup
ReplicaSpec ShardSpec; trainer: Trainer hooks; utils: MultiTimer Timer free_port load_checkpoint print_rank_0 report_memory_usage
save_checkpoint sync_cuda; utils.profiler: CommProfiler; zero: ShardedModelV2 ShardedOptimizerV2 ZeroOptimizer zero_model_wrapper
zero_optim_wrapper; zero.gemini: ChunkManager GeminiManager; utils.data: build_cifar; zero: anything_else
"""


def names(table: str) -> list[tuple[str, str]]:
    """(module, name) of each."""
    found = []
    for entry in table.replace("\n", " ").split(";"):
        module, _, wanted = entry.strip().partition(":")
        found += [(module, name) for name in wanted.split()]
    return found


@pytest.mark.parametrize(("module", "name"), names(THERE))
def test_names_are_there_under_their_paths(module: str, name: str) -> None:
    found = getattr(importlib.import_module(f"meshfold.colossalai.{module}"), name)
    assert found is getattr(colossalai, name)


@pytest.mark.parametrize(("module", "name"), names(HINTED))
def test_names_that_are_not_there_say_what_to_write(module: str, name: str) -> None:
    with pytest.raises(ImportError, match=r"here; write|every name with what to write"):
        exec(f"from meshfold.colossalai.{module} import {name}")


def test_paths_are_attributes_too() -> None:
    assert colossalai.booster.plugin.GeminiPlugin is GeminiPlugin
    assert colossalai.utils.get_current_device() == get_accelerator().get_current_device()
    assert colossalai.__version__ == "0.5.0"
    assert not hasattr(colossalai, "__wrapped__")
    with pytest.raises(ImportError, match=r"has no 'GeminiPlugn'. Did you mean 'GeminiPlugin'"):
        _ = colossalai.GeminiPlugn
    with pytest.raises(ModuleNotFoundError, match=r"has no module 'utls'. Did you mean 'utils'"):
        importlib.import_module("meshfold.colossalai.utls")


def test_accelerator() -> None:
    here = get_accelerator()
    here.synchronize()
    here.empty_cache()
    here.reset_peak_memory_stats()
    assert here.memory_allocated() >= 0 and here.max_memory_allocated() >= 0 and here.device_count() >= 1
    assert here.set_to_device(nn.Linear(2, 2)).weight.device.type == here.name
    with pytest.raises(AttributeError, match="has no 'no_such_thing'"):
        _ = here.no_such_thing


@pytest.mark.parametrize("cls", [HybridAdam, CPUAdam])
def test_adams_take_what_the_originals_take(cls: Any) -> None:
    weight = nn.Parameter(torch.ones(3))
    with pytest.warns(
        MigrationNote, match="initial_scale=32 does nothing: the plugin or the config says the loss scale"
    ):
        made = cls([weight], 1e-2, True, (0.9, 0.95), 1e-6, 0.1, True, initial_scale=32)
    group = made.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (
        1e-2,
        (0.9, 0.95),
        1e-6,
        0.1,
    )
    weight.grad = torch.ones(3)
    made.step()
    assert (weight < 1).all()


def galore(model: nn.Module, **settings: Any) -> optimizers.GaLoreAdamW:
    """GaLore's names project the model's linear weights."""
    weights = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": weights, "rank": 2, "role": "matrices"}, {"params": others, "role": "norms_and_biases"}]
    return optimizers.GaLoreAdamW(groups, 1e-2, eps=1e-8, weight_decay=1e-2, **settings)


SERIAL: list[tuple[Any, Any]] = [
    (
        lambda model: DistributedLamb(model.parameters(), 1e-2, weight_decay=0.1),
        lambda model: optimizers.Lamb(model.parameters(), 1e-2, weight_decay=0.1),
    ),
    (
        lambda model: Lamb(model.parameters(), 1e-2),
        lambda model: optimizers.Lamb(model.parameters(), 1e-2, bias_correction=False),
    ),
    (
        lambda model: Lars(model.parameters(), 1.0, 0.5, 1e-2, 0.1),
        lambda model: optimizers.Lars(model.parameters(), 1.0, 0.5, weight_decay=0.1, trust_coeff=1e-2, eps=0.0),
    ),
    (
        lambda model: DistributedCAME(model.parameters(), 1e-2),
        lambda model: optimizers.Came(model.parameters(), 1e-2),
    ),
    (
        lambda model: DistributedAdaFactor(model.parameters()),
        lambda model: optimizers.AdafactorHF(model.parameters()),
    ),
    (
        lambda model: GaLoreAdamW8bit(get_galore_param_groups(model, rank=2)),
        lambda model: galore(model, eight_bit=True),
    ),
    (lambda model: DistGaloreAwamW(get_galore_param_groups(model, rank=2), nbits=32), galore),
]


@ranks(2)
def test_distributed_optimizers_step_as_one_process() -> None:
    """Made of a model and taken over with shards; the engine has the class that its checkpoints name."""
    rows, rank = torch.arange(8.0, dtype=torch.float64).view(2, 4), torch.distributed.get_rank()
    for named, serial in SERIAL:
        torch.manual_seed(0)
        model: Any = Net().double()
        alone = copy.deepcopy(model)
        reference = serial(alone)
        model, optimizer, *_ = Booster(plugin=LowLevelZeroPlugin(stage=2, precision="fp64")).boost(model, named(model))
        assert type(model.engine.optimizer) is type(reference)
        for _ in range(3):
            optimizer.backward((model(rows[rank : rank + 1]) - 1).square().mean())
            (alone(rows) - 1).square().mean().backward()
            for one in (optimizer, reference):
                one.step()
                one.zero_grad()
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, alone.state_dict()[name], rtol=1e-12, atol=1e-12)
        model.engine.close()


def test_what_optimizers_cannot_be_here_is_said() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(SpecError, match=r"adam=True is Adam.*write torch.optim.Adam"):
        Lamb([weight], adam=True)
    with pytest.raises(SpecError, match="lr=None; give a rate, such as lr=2e-4"):
        DistributedCAME([weight])
    with pytest.warns(MigrationNote, match=r"setup_distributed\(...\) does nothing"):
        DistributedLamb([weight]).setup_distributed(None, None)
    with pytest.raises(SpecError, match=r"percentile_clipping=5: use clip_grad_norm"):
        GaLoreAdamW8bit([weight], percentile_clipping=5)
    with pytest.raises(SpecError, match="proj_type='reverse_std'; write 'std'"):
        GaLoreAdamW8bit(get_galore_param_groups(nn.Linear(2, 2), proj_type="reverse_std"))
    with pytest.raises(SpecError, match="DistGaloreAwamW: nbits=4; write 8 or 32"):
        DistGaloreAwamW([weight], nbits=4)
    with pytest.warns(MigrationNote, match="min_8bit_size=0 does nothing"):
        alone = GaLoreAdamW8bit([weight], min_8bit_size=0)
    assert alone.param_groups[0]["role"] == "norms_and_biases"  # no group has a rank: nothing is projected


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@ranks(2)
def test_numel_under_gemini_tells_the_size() -> None:
    for name in ("boost", "initialize"):
        model: Any = Net()
        count = sum(p.numel() for p in model.parameters())
        optimizer: Any = HybridAdam(model.parameters(), lr=1e-3)
        if name == "boost":
            model, optimizer, *_ = Booster(plugin=GeminiPlugin(precision="fp32")).boost(model, optimizer)
            engine = model.engine
        else:
            engine, *_ = initialize(model, optimizer, nn.MSELoss(), config=dict(zero=dict(stage=3)))
            model = engine.model
        assert sum(p.numel() for p in model.parameters()) == count
        engine.train_step((torch.ones(2, 4), torch.ones(2, 4))) if name == "initialize" else None
        assert sum(p.numel() for p in model.parameters()) == count
        engine.close()
        with pytest.raises(SpecError):  # it holds no weights any more, and that is still seen
            initialize(engine.model, None, nn.MSELoss(), config={})[0].eval()(torch.ones(2, 4))


@ranks(4)
def test_groups_of_a_plugin() -> None:
    import torch.distributed as dist

    plugin = HybridParallelPlugin(tp_size=2, pp_size=2, num_microbatches=2, precision="fp32")
    assert not isinstance(plugin, DPPluginBase)
    mine = dist.get_rank()
    assert dist.get_world_size(plugin.tp_group) == 2 and dist.get_rank(plugin.tp_group) == plugin.tp_rank == mine % 2
    assert dist.get_world_size(plugin.dp_group) == plugin.dp_size == 1
    ranks_of_mine = plugin.pg_mesh.get_ranks_in_group(plugin.pp_group)
    assert ranks_of_mine == [mine % 2, mine % 2 + 2]
    told = [mine]
    dist.broadcast_object_list(told, src=ranks_of_mine[-1], group=plugin.pp_group)
    assert told == [mine % 2 + 2]
    assert plugin.pg_mesh.shape == (1, 2, 2, 1) and plugin.pg_mesh.size(1) == 2
    assert plugin.pg_mesh.coordinate() == (0, mine // 2, mine % 2, 0)
    assert plugin.pg_mesh.get_group_along_axis(2) is plugin.tp_group
    with pytest.raises(SpecError, match=r"give plugin\.tp_group"):
        plugin.pg_mesh.get_ranks_in_group(None)


def test_prepared_loaders_are_loaders_of_torch() -> None:
    loader = GeminiPlugin().prepare_dataloader(list(range(8)), batch_size=2, shuffle=True, drop_last=True)
    assert isinstance(loader, DataLoader) and len(loader) == 4 and loader.dataset == list(range(8))
    orders = []
    for epoch in (0, 1, 1):
        loader.sampler.set_epoch(epoch)
        orders.append(torch.cat(list(loader)).tolist())
    assert sorted(orders[0]) == list(range(8)) and orders[0] != orders[1] == orders[2]


def test_a_name_that_needs_a_package_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "meshfold.zero_gemini", None)
    for module in ("adam_classes", "init_contexts"):
        monkeypatch.delitem(sys.modules, f"meshfold.colossalai.{module}", raising=False)
    for name in ("HybridAdam", "ZeroInitContext"):
        with pytest.raises(
            ModuleNotFoundError, match=f"{name} needs meshfold.zero_gemini: pip install meshfold-zero-gemini"
        ):
            getattr(colossalai, name)
