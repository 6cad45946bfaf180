"""``Trainer(strategy="colossalai")``: the strategy of Colossal-AI's integration, by its name and arguments, on our chunks."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from meshfold.engine.precision import ScaleSettings
from meshfold.lightning.strategy import MeshfoldStrategy
from meshfold.mesh import ParallelSpec, SpecError, did_you_mean
from meshfold.mesh.spec import argument_checks as settings

_POLICIES = ("auto", "cpu", "cuda")


class ColossalAIStrategy(MeshfoldStrategy):
    """ZeRO with chunks, under the name and the arguments of ``pytorch_lightning.strategies.ColossalAIStrategy``.

    All precisions, accelerators and optimizers work. Checkpoints are
    Lightning's own files with whole tensors, as before; ``checkpoints="folder"`` shards them.
    """

    strategy_name = "colossalai"

    def __init__(
        self,
        use_chunk: bool = True,
        chunk_size: int | None = None,
        enable_distributed_storage: bool = True,
        placement_policy: str = "auto",
        force_outputs_fp32: bool = False,
        gpu_margin_mem_ratio: float = 0.0,
        chunk_search_range: int = 64 * 1024**2,
        chunk_search_n_grids: int = 4096,
        min_chunk_size: int = 32 * 1024**2,
        initial_scale: float = 2**16,
        min_scale: float = 1,
        growth_factor: float = 2,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float = 2**32,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        *,
        parallel: Mapping[str, object] | ParallelSpec | None = None,
        checkpoints: str = "file",
        **options: Any,
    ) -> None:
        """Args:
            use_chunk: weights, gradients and optimizer state in chunks that ranks share. False: whole on every rank.
            chunk_size: accepted and unused, as before: the size with the least waste is searched for.
            enable_distributed_storage: shard parameters too (ZeRO stage 3). False: gradients and optimizer state (stage 2).
            placement_policy: ``"cuda"``: everything on the device. ``"cpu"``: everything possible in the host's memory. ``"auto"``:
                as planned after the first steps.
            force_outputs_fp32: cast what the parts of the module return to float32.
            gpu_margin_mem_ratio: from 0 to 1; accepted and unused: the plan measures what the device has left.
            chunk_search_range, chunk_search_n_grids, min_chunk_size: accepted and unused: the search tries every size that
                matters.
            initial_scale, min_scale, growth_factor, backoff_factor, growth_interval, hysteresis, max_scale: of the loss scale
                under ``precision="16-mixed"``.
            accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin: as for every strategy.
            parallel: a spec that replaces the one made from the arguments above.
            checkpoints: ``"file"`` or ``"folder"``.
            options: further arguments of :class:`MeshfoldStrategy`.

        Raises:
            SpecError: for an invalid value, or an argument that does not exist.
        """
        known = [*inspect.signature(ColossalAIStrategy).parameters, *inspect.signature(MeshfoldStrategy).parameters]
        for name in options:
            if name not in known:
                raise SpecError(f"ColossalAIStrategy: there is no {name!r}.{did_you_mean(name, known)}")
        if placement_policy not in _POLICIES:
            raise SpecError(
                f"placement_policy={placement_policy!r}: write one of {', '.join(map(repr, _POLICIES))}."
                f"{did_you_mean(str(placement_policy), _POLICIES)}"
            )
        if chunk_size is not None:
            settings.count("chunk_size", chunk_size)
        for name, value in (
            ("chunk_search_range", chunk_search_range),
            ("chunk_search_n_grids", chunk_search_n_grids),
            ("min_chunk_size", min_chunk_size),
        ):
            settings.count(name, value)
        if isinstance(gpu_margin_mem_ratio, bool) or not 0 <= gpu_margin_mem_ratio <= 1:
            raise SpecError(
                f"gpu_margin_mem_ratio={gpu_margin_mem_ratio!r}: give a fraction of the device's memory, from 0 to 1"
            )
        zero = dict(stage=3 if enable_distributed_storage else 2, placement=placement_policy)
        if parallel is None:
            parallel = dict(zero=zero) if use_chunk else {}
        super().__init__(
            parallel,
            outputs_fp32=force_outputs_fp32,
            scale=ScaleSettings(
                initial_scale=initial_scale,
                min_scale=min_scale,
                growth_factor=growth_factor,
                backoff_factor=backoff_factor,
                growth_interval=growth_interval,
                hysteresis=hysteresis,
                max_scale=max_scale,
            ),
            checkpoints=checkpoints,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            **options,
        )
