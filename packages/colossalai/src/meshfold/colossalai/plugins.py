"""Plugins of Colossal-AI's ``Booster``: each makes a spec and settings of an engine from its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar

from torch.utils.data import DataLoader

from meshfold.colossalai import tables
from meshfold.colossalai.arguments import Table, Translation, bind, translate
from meshfold.colossalai.context import AXES_OF_SHORT_NAMES, ProcessGroupMesh, StageManager, axes_of, group_of
from meshfold.colossalai.loaders import shared_loader
from meshfold.colossalai.settings import Settings, engine_settings
from meshfold.engine.world import World, join_world
from meshfold.mesh import ParallelSpec, SpecError


class Plugin:
    """A plugin: arguments of another library, translated by a table.

    Each takes ``engine=dict(...)`` too: further arguments of :class:`meshfold.engine.Engine`, such as ``recompute``,
    ``rules``, ``seed``.

    Attributes:
        table: translation of the arguments.
        says_precision: whether the plugin sets the precision, or the booster does.
    """

    table: ClassVar[Table] = {}
    says_precision: ClassVar[bool] = True

    def __init__(self, *args: Any, engine: Mapping[str, Any] | None = None, **given: Any) -> None:
        """Args:
            args: as in Colossal-AI, by position.
            engine: further arguments of the engine.
            given: as in Colossal-AI, by name.

        Raises:
            SpecError: for an unknown name, an unsupported value, or incompatible settings.
        """
        name = type(self).__name__
        named = bind(name, self.table, args, given)
        self._missing(name, named)
        self.translation = translate(name, named, self.table)
        self._given = named
        self._engine = dict(engine or {})
        self._rows: int | None = None  # rows of a rank's batch
        ParallelSpec.parse(self._parallel(self.translation))  # raises for an invalid spec

    def __init_subclass__(cls) -> None:
        """Show the arguments of the table to ``help`` and editors."""
        kinds = inspect.Parameter
        shown = [
            kinds(name, kinds.POSITIONAL_OR_KEYWORD, default=argument.default) for name, argument in cls.table.items()
        ]
        cls.__signature__ = inspect.Signature([*shown, kinds("engine", kinds.KEYWORD_ONLY, default=None)])  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        """Return an argument as passed, or its default: ``plugin.pp_size``; ``dp_size``, ``tp_rank``; a process group of torch:
        ``plugin.tp_group``.

        Raises:
            AttributeError: for all else.
        """
        if name in type(self).table and "_given" in vars(self):
            return self._given.get(name, type(self).table[name].default)
        short, _, what = name.rpartition("_")
        if short in AXES_OF_SHORT_NAMES and what in ("group", "size", "rank"):
            mesh = self._world().mesh
            axes = axes_of(mesh, short)
            return (
                group_of(mesh, short) if what == "group" else mesh.size(*axes) if what == "size" else mesh.index(*axes)
            )
        raise AttributeError(f"{type(self).__name__} has no {name!r}")

    @property
    def pg_mesh(self) -> ProcessGroupMesh:
        """The ranks by axes: data, pipeline, tensor, sequence."""
        return ProcessGroupMesh(self._world().mesh)

    @property
    def stage_manager(self) -> StageManager:
        """The stage of the pipeline that this rank has."""
        return StageManager(self._world().mesh)

    def settings(self, *, rows: int | None = None, sampler: object = None) -> Settings:
        """Return the spec, and the arguments of the engine.

        Args:
            rows: of a batch of the script's loader, if it has one and no loader was prepared here.
            sampler: of that loader; with a distributed one they are this rank's rows.
        """
        if self._rows is None and rows is not None:
            sharded = getattr(sampler, "num_replicas", None) is not None
            self._rows = rows if sharded else max(1, rows // self._world().row_size)
        self._require()
        parallel = self._parallel(self.translation)
        engine = {**engine_settings(self.translation), **self._engine}
        return Settings(parallel=parallel, engine=engine, words=tuple(self.translation.words))

    def prepare_dataloader(
        self,
        dataset: Any,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 1024,
        drop_last: bool = False,
        pin_memory: bool = False,
        num_workers: int = 0,
        distributed_sampler_cls: Any = None,
        **options: Any,
    ) -> Any:
        """Return a loader of this rank's rows. As in Colossal-AI, ``batch_size`` is per data coordinate.

        Args:
            dataset: map-style: it has a length, and an example for each index.
            batch_size: rows of a data coordinate's batch; a global batch has that many for each coordinate.
            shuffle: a new order each epoch.
            seed: of the orders.
            drop_last: leave out a smaller last batch.
            pin_memory: see torch.utils.data.DataLoader.
            num_workers: the same.
            distributed_sampler_cls: a custom sampler, made with ``num_replicas`` and ``rank``.
            options: further arguments of DataLoader.
        """
        world = self._world()
        self._rows = batch_size
        passed = dict(pin_memory=pin_memory, num_workers=num_workers, **options)
        if distributed_sampler_cls is not None:
            sampler = distributed_sampler_cls(
                dataset, num_replicas=world.row_size, rank=world.row_index, shuffle=shuffle
            )
            return DataLoader(dataset, batch_size=batch_size, sampler=sampler, drop_last=drop_last, **passed)
        return shared_loader(
            dataset,
            batch_size,
            index=world.row_index,
            blocks=world.row_size,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            **passed,
        )

    def _world(self) -> World:
        parallel = self._parallel(self.translation)
        return join_world(parallel, self._engine.get("device"))

    def _missing(self, name: str, named: Mapping[str, Any]) -> None:
        """Raise for missing required arguments."""

    def _require(self) -> None:
        """Raise for missing settings."""

    def _parallel(self, found: Translation) -> dict[str, Any]:
        """Return the spec."""
        return {}


class DPPluginBase(Plugin):
    """Base of plugins under which every rank runs the whole model."""


class TorchDDPPlugin(DPPluginBase):
    """Every rank has the whole model: ``parallel={}``. The precision is the booster's."""

    table = tables.TORCH_DDP
    says_precision = False


class TorchFSDPPlugin(DPPluginBase):
    """Parameters, gradients and optimizer state sharded over data ranks: ``zero=dict(stage=3)``."""

    table = tables.TORCH_FSDP
    says_precision = False

    def _parallel(self, found: Translation) -> dict[str, Any]:
        return _with_zero({}, found)


class LowLevelZeroPlugin(DPPluginBase):
    """Optimizer state and gradients sharded over data ranks: ``zero=dict(stage=1)`` or ``2``."""

    table = tables.LOW_LEVEL_ZERO

    def _parallel(self, found: Translation) -> dict[str, Any]:
        return _with_zero({}, found)


class GeminiPlugin(DPPluginBase):
    """Everything in chunks, placed where there is memory: ``zero=dict(stage=3, placement=...)``."""

    table = tables.GEMINI

    def _parallel(self, found: Translation) -> dict[str, Any]:
        return _with_zero(_tensor_and_sequence("GeminiPlugin", found), found)


class HybridParallelPlugin(Plugin):
    """Tensor, pipeline, sequence and data parallelism in one: ``dict(tensor=..., pipeline=..., sequence=..., zero=...)``."""

    table = tables.HYBRID

    def _missing(self, name: str, named: Mapping[str, Any]) -> None:
        for needed in ("tp_size", "pp_size"):
            if needed not in named:
                raise SpecError(f"{name}: {needed} is missing: write {name}(tp_size=..., pp_size=...)")

    def _parallel(self, found: Translation) -> dict[str, Any]:
        parallel = _with_zero(_tensor_and_sequence("HybridParallelPlugin", found), found)
        entry = found.under("pipeline")
        if entry["size"] != 1:
            parallel["pipeline"] = self._stages(entry, found.under("aside").get("microbatch_rows"))
        return parallel

    def _stages(self, entry: dict[str, Any], microbatch_rows: int | None) -> dict[str, Any]:
        """Return the entry ``pipeline``."""
        chunks = entry.pop("chunks", 1)
        if entry.get("schedule") == "interleaved":
            if chunks == 1:
                raise SpecError("HybridParallelPlugin: pp_style='interleaved' needs num_model_chunks=2 or more")
            entry["chunks"] = chunks
        elif chunks not in (1, 2) or (chunks == 2 and entry.get("schedule") != "zb-v"):
            raise SpecError(f"HybridParallelPlugin: num_model_chunks={chunks} goes with pp_style='interleaved'")
        if microbatch_rows is not None and "microbatches" not in entry and self._rows is not None:
            entry["microbatches"] = max(1, self._rows // microbatch_rows)
        return entry

    def _require(self) -> None:
        size = self.translation.under("aside").get("microbatch_rows")
        if size is not None and self._rows is None and "microbatches" not in self.translation.under("pipeline"):
            raise SpecError(
                f"HybridParallelPlugin: microbatch_size={size!r}: how many micro-batches these are depends on the batch: make the "
                "loader with plugin.prepare_dataloader(...), or write num_microbatches=... in its place"
            )


_SEQUENCE_MODES = ("split_gather", "ring", "all_to_all", "ring_attn")


def _with_zero(parallel: dict[str, Any], found: Translation) -> dict[str, Any]:
    zero = found.under("zero")
    return {**parallel, "zero": zero} if "stage" in zero else parallel


def _tensor_and_sequence(where: str, found: Translation) -> dict[str, Any]:
    """Return the entries ``tensor`` and ``sequence`` from five arguments."""
    size, aside = found.under("tensor").get("size", 1), found.under("aside")
    parallel: dict[str, Any] = {} if size == 1 else {"tensor": {"size": size}}
    mode, ranks = aside.get("sequence_mode"), aside.get("sequence_size")
    if not aside.get("sequence"):
        if ranks not in (None, 1):
            raise SpecError(
                f"{where}: sp_size={ranks!r} without enable_sequence_parallelism=True: write it, or leave sp_size out"
            )
        return parallel
    if mode not in _SEQUENCE_MODES:
        raise SpecError(
            f"{where}: sequence_parallelism_mode={mode!r}: write one of {', '.join(_SEQUENCE_MODES)}"
            + (": what None means there differs from place to place" if mode is None else "")
        )
    if mode in ("split_gather", "ring"):
        if size == 1:
            raise SpecError(
                f"{where}: sequence_parallelism_mode={mode!r} is over the ranks of tp_size, which is 1: write tp_size=2, say"
            )
        if ranks not in (None, 1, size):
            raise SpecError(
                f"{where}: sp_size={ranks!r} with {mode!r}, which is over the tp_size={size} ranks: leave sp_size out"
            )
        if mode == "ring":
            parallel["tensor"]["overlap"] = "ring"
        return {**parallel, "sequence": {"mode": "megatron"}}
    if ranks is None:
        raise SpecError(f"{where}: sequence_parallelism_mode={mode!r} without sp_size: write sp_size=2, say")
    return {**parallel, "sequence": {"mode": "ulysses" if mode == "all_to_all" else "ring", "size": ranks}}
