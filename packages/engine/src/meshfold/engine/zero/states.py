"""An engine's states in chunks that data ranks share: the entry ``zero`` of the spec."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from meshfold.checkpoint.shards import Window, windows_of_block
from meshfold.engine.model.checks import refuse_empty
from meshfold.engine.model.recompute import RecomputedBlocks, recomputes_by_itself
from meshfold.engine.optimizers import Factory, Trial
from meshfold.engine.precision import Precision, keeps_statistics, other_dtypes
from meshfold.engine.states import optimizer_state
from meshfold.engine.states.optimizer_state import put
from meshfold.engine.states.protocols import Source, Sources
from meshfold.engine.world import PIPE, World
from meshfold.engine.zero.chunk_sources import ChunkSources
from meshfold.engine.zero.gather_cache_bytes import GatherCacheBytes
from meshfold.engine.zero.kept_state import kept_state
from meshfold.engine.zero.memory import is_out_of_memory
from meshfold.engine.zero.plan import Sizes, first_placements, regime_of
from meshfold.engine.zero.process_settings import grow_segments, limit_allocator
from meshfold.engine.zero.residency import Residency
from meshfold.kernels import Fp8Weight
from meshfold.mesh import SpecError
from meshfold.mesh.parameters import metadata_on
from meshfold.zero_gemini import BackwardRole, Gemini, Memory
from meshfold.zero_gemini.machine_rates import measure_rank_rates, ranks_per_host
from meshfold.zero_gemini.optimizer import DiskSettings, StateSize, steps_early
from meshfold.zero_gemini.planner import Regime, gradient_dtype

if TYPE_CHECKING:
    from meshfold.pipeline import Pipeline
    from meshfold.pipeline.runtime import Microbatch


class ZeroStates:
    """See :class:`meshfold.engine.states.protocols.States`; parameters are in chunks, buffers as they were.

    Attributes:
        gemini: holds the chunks.
        residency: watches the first steps and moves chunks to where the plan wants them.
        trained: the trained parameters.
    """

    all_read = True
    reducer = None

    def __init__(
        self,
        model: nn.Module,
        world: World,
        precision: Precision,
        make: Factory | None,
        *,
        accumulation: int,
        seed: int,
        values: Callable[[str, nn.Parameter, torch.dtype], Tensor] | None,
        blocks: RecomputedBlocks | None = None,
        recomputes: bool = False,
        looks_at_all: bool = True,
        names: Mapping[str, str] | None = None,
        fp8_weights: Mapping[Tensor, Fp8Weight] = MappingProxyType({}),
        settled: Callable[[torch.optim.Optimizer | None], None] = lambda optimizer: None,
    ) -> None:
        """Args:
        model: real or on the meta device; parameters carry their metadata.
        world: where it lies; its spec has ``zero``.
        precision: of the model.
        make: makes the optimizer.
        accumulation: micro-steps of an optimizer step.
        seed: of stochastic rounding.
        values: the first values of parameters on the meta device.
        blocks: those whose activations the plan may keep.
        recomputes: the engine lets blocks recompute their activations, whether the plan may choose of them or not.
        looks_at_all: something is asked of all gradients together before the first of them may be stepped with.
        names: what a parameter is called in the whole model, where this rank has stages of it and calls it otherwise.
        fp8_weights: those that stage 3 gathers in fp8.
        settled: called with the optimizer when nothing is left to refuse, before weights go into chunks.
        """
        spec = world.spec.zero
        if spec is None:
            raise SpecError("this spec has no entry zero")
        refuse_empty(model, world)
        others = other_dtypes(model, precision)
        if others and spec.regime != "A":
            raise SpecError(
                f"zero: regime={spec.regime!r} with {_first_norm(model)}, which stays in float32 in a 16-bit model: write "
                "regime='A', or give the model GroupNorm or LayerNorm"
            )
        with ExitStack() as opened:  # closed in reverse order
            opened.callback(grow_segments(world.device).close)
            ranks, micro_steps = world.data_size, accumulation
            if world.pipelined:  # they accumulate gradients over micro-batches
                accumulation = max(2, accumulation)
            summed = gradient_dtype(precision.dtype, precision.master_dtype, accumulation=accumulation, ranks=ranks)
            trial = None if make is None else Trial.of(make, model.parameters())
            kept = StateSize() if trial is None else kept_state(trial, model, world, precision, spec)
            regime = regime_of(spec, precision, accumulation=accumulation, ranks=ranks, **kept._asdict())
            if world.device.type == "cuda" and spec.placement == "auto" and make is not None:
                measure_rank_rates(world.device, regime.name)  # evaluation needs no plan
            sums = accumulation > 1 and spec.stage > 1  # sums are held between micro-steps
            holds_gradients = (
                trial is None
                or looks_at_all
                or sums
                or not steps_early(
                    trial.optimizer, precision.dtype, precision.master_dtype, disk=spec.offload_path is not None
                )
            )
            sizes = _state_sizes(model, world, regime, holds_gradients=holds_gradients)
            local = ranks_per_host(world.mesh.world_size)
            self._world, self._model, self._owed = world, model, False
            recomputes = recomputes or recomputes_by_itself(model)
            self.gemini = Gemini(
                model,
                world.mesh,
                stage=spec.stage,
                memory=Memory(world.device),
                placements=first_placements(spec, world.device, sizes, ranks_per_host=local, everyone=world.everyone),
                disk=None
                if spec.offload_path is None
                else DiskSettings(folder=spec.offload_path, rank=world.mesh.rank),
                dtype=precision.dtype,
                other_dtypes=others,
                master_dtype=precision.master_dtype,
                gradient_dtype=summed,
                make_optimizer=make,
                regime=spec.regime,
                seed=seed,
                values=values,
                stays=spec.placement == "cuda",
                apart=(PIPE,) if world.pipelined else (),
                transport=spec.transport,
                fp8_weights=fp8_weights,
                recomputes=lambda unit: recomputes and (blocks is None or unit not in blocks.kept),
                settled=settled,
            )
            opened.callback(self.gemini.close)
            self.gemini.takes = False
            self.optimizer = self.gemini.optimizer
            self.residency = Residency(
                model,
                self.gemini,
                spec,
                world,
                accumulation=micro_steps,
                regime=regime,
                blocks=blocks,
                recomputes=recomputes,
            )
            opened.callback(self.residency.close)
            self._names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
            self._sources = ChunkSources(self.gemini, world, self._names, names or {})
            self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            self._gather_cache = GatherCacheBytes(self.gemini, spec, world)
            opened.callback(limit_allocator(world.device, spec.gpu_memory_limit).close)
            self._opened = opened.pop_all()  # constructed: from now on close() closes them

    def begin(self, *, first: bool) -> None:
        if first:
            self.gemini.forget()
        self.gemini.begin(last=True)
        self.residency.begin()

    @contextmanager
    def backward(self, kind: BackwardRole) -> Iterator[None]:
        if self._world.pipelined:  # many backwards, none of which is the last one for all parameters
            kind = "apart"
        if kind == "final":  # chunks are stepped in it
            self.gemini.take_written()
        self.gemini.expect(kind)
        self.residency.turn()
        self.gemini.takes = True
        try:
            yield
        finally:
            self.gemini.takes = False  # other backwards through this model are not ours
            if self._gather_cache.some and kind != "more":
                self.gemini.rest()  # release chunks that stayed gathered
        self.residency.end()
        self._owed = kind in ("more", "apart")

    def end_backward(self, kind: BackwardRole) -> None:
        if kind != "apart" and not self._world.pipelined:
            self.gemini.end_backward()

    def complete(self, parameters: Iterable[Tensor]) -> None:
        """Do nothing: chunks are reduced once all their gradients have arrived."""

    def finish(self, factor: float) -> None:
        if self._owed:
            self.gemini.reduce_rest()
            self._owed = False
        self.gemini.finish(factor)

    def norm(self, norm_type: float = 2.0) -> Tensor:
        return self.gemini.norm(norm_type)

    def clip(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        return self.gemini.clip(max_norm, norm_type)

    def clip_value(self, max_value: float) -> None:
        self.gemini.clip_value(max_value)

    def norm_of(self, places: Sequence[int], norm_type: float) -> Tensor:
        return self.gemini.norm(norm_type, self._names_at(places))

    def multiply(self, places: Sequence[int], factor: Tensor | float) -> None:
        self.gemini.multiply(self._names_at(places), factor)

    def clamp(self, places: Sequence[int], low: float | None, high: float | None) -> None:
        self.gemini.clamp(self._names_at(places), low, high)

    def gradient(self, place: int) -> Tensor | None:
        return None

    def _names_at(self, places: Sequence[int]) -> list[str]:
        return [self._names[self.trained[place]] for place in places]

    def step(self) -> None:
        if self._gather_cache.some:
            self.gemini.rest()  # a forward without a backward may have left chunks gathered
        self.gemini.take_written()
        self.gemini.step()
        self.residency.stepped()
        if not self.residency.is_watching:
            self._gather_cache.stepped(moves=self.residency.moves)

    def forget(self) -> None:
        self.gemini.forget()
        self._owed = False

    def publish(self) -> None:
        self.gemini.publish()

    def shapes_only(self) -> AbstractContextManager[None]:
        return self.gemini.shapes_only()

    def look_at(self, pipeline: Pipeline, works: Sequence[Microbatch]) -> None:
        if self.residency.is_watching:
            from meshfold.pipeline import peak_microbatches

            actions = pipeline.program(len(works)).schedule.ranks[self._world.mesh.index(PIPE)]
            self.residency.rehearse(
                lambda: pipeline.rehearse(works[0]),
                live=peak_microbatches(actions),
                stages=len(pipeline.stages),
                microbatches=len(works),
            )
        self.gemini.rest(unlearn=True)

    def explain(self, error: BaseException) -> None:
        if is_out_of_memory(error):  # not caused by a released parameter
            self.residency.describe(error)
            return
        released = [name for name, p in self._model.named_parameters() if p.shape.numel() == 0]
        if released:
            error.add_note(
                f"Under zero stage 3 a parameter exists only while its module runs; now {len(released)} are released, such "
                f"as {released[0]}. If a module computes with another module's parameter, move the computation into that module's "
                "forward, or tie the parameter; or use stage 2."
            )
            if "setStorage" in str(error):  # of a view that a backward has saved
                error.add_note(
                    "A gradient of gradients, as of a penalty after torch.autograd.grad(..., create_graph=True), reads parameters "
                    "when their modules have run: write zero=dict(stage=2), where it is that of one process."
                )

    def can_relieve(self, error: BaseException) -> bool:
        if self.gemini.is_half_stepped:
            error.add_note(
                "Some chunks had already made their optimizer step, so training cannot continue from here: make "
                "a new engine and resume from the last checkpoint."
            )
            return False
        return self.residency.can_relieve(error)

    def relieve(self) -> None:
        self.residency.relieve()

    def close(self) -> None:
        self._opened.close()

    def source(self, tensor: Tensor) -> Source:
        return self._sources.source(tensor)

    def write(self, tensor: Tensor, whole: Tensor) -> None:
        if tensor in self._names:
            meta = metadata_on(tensor, self._world.mesh)
            self.gemini.write(tensor, meta.placement.shard(whole, self._world.mesh))
        else:
            put(whole, tensor, tensor)

    def windows(self, tensor: Tensor) -> list[tuple[Window, Window]]:
        run = self.gemini.filled(tensor) if tensor in self._names else None
        return windows_of_block(metadata_on(tensor, self._world.mesh), run)

    @torch.no_grad()
    def write_block(self, tensor: Tensor, block: Tensor) -> None:
        if tensor in self._names:
            self.gemini.write(tensor, block)
        else:
            tensor.copy_(block)

    def settle(self) -> None:
        self.gemini.flush()

    def optimizer_sources(self) -> dict[str, Source]:
        return self._sources.optimizer_sources()

    def noted_sources(self, names: Mapping[Tensor, str]) -> Sources:
        return self._sources.noted_sources(names)

    def noted_optimizer_sources(self) -> Sources:
        return self._sources.noted_optimizer_sources()

    def optimizer_description(self) -> dict[str, Any]:
        groups = [
            {"parameters": [*map(self._sources.title, names)], **optimizer_state.plain_settings(group)}
            for names, group in zip(self.gemini.group_names, self._made().param_groups, strict=True)
        ]
        return {"class": type(self.optimizer).__name__, "groups": groups, "values": {}}

    def check_optimizer(self, description: Mapping[str, Any], entries: Iterable[str]) -> None:
        optimizer_state.check(self._made(), description)
        trained = {self._sources.title(name) for parameter, name in self._names.items() if parameter.requires_grad}
        optimizer_state.check_names(entries, trained)

    def load_optimizer(self, description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        optimizer = self._made()
        self.check_optimizer(description, (*tensors, *description["values"]))
        parameters = {self._sources.title(name): parameter for parameter, name in self._names.items()}
        self.gemini.clear_state()
        for entry in (*tensors, *description["values"]):
            name, _, key = entry.rpartition("/")
            value = tensors[entry] if entry in tensors else torch.tensor(description["values"][entry])
            meta = metadata_on(parameters[name], self._world.mesh)
            like = tuple(value.shape) == meta.placement.shape and value.dim() > 0
            block = meta.placement.shard(value, self._world.mesh) if like else value
            self.gemini.write_state(self._names[parameters[name]], key, block)
        self.gemini.agree()
        for group, saved in zip(optimizer.param_groups, description["groups"], strict=True):
            group.update(optimizer_state.settings_of(saved))

    def _made(self) -> torch.optim.Optimizer:
        assert self.optimizer is not None  # the engine calls this only with an optimizer
        return self.optimizer


def _state_sizes(model: nn.Module, world: World, regime: Regime, *, holds_gradients: bool) -> Sizes:
    """Return this rank's elements, and bytes an element, of the state of training before it is in chunks.

    Args:
        model: this rank's part.
        world: its ranks; experts are shared by fewer of them.
        regime: bytes an element.
        holds_gradients: the step begins when all gradients have arrived; else each is stepped when it arrives.
    """
    elements = sum(parameter.numel() for parameter in model.parameters())
    own = sum(p.numel() / world.mesh.size(*metadata_on(p, world.mesh).sum_axes) for p in model.parameters())
    sizes = Sizes.of(regime, elements=elements, ranks=elements / own if own else world.data_size)
    return sizes if holds_gradients else replace(sizes, gradient=0.0)


def _first_norm(model: nn.Module) -> str:
    return next(type(module).__name__ for module in model.modules() if keeps_statistics(module))
