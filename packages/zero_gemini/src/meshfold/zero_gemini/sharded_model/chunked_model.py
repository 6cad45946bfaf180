"""A model in chunks: its construction, its placements, and the hooks that gather chunks while it runs.

:mod:`meshfold.zero_gemini.gemini` adds the training step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor, nn

from meshfold.kernels import Fp8Weight
from meshfold.mesh import Group, Mesh
from meshfold.mesh.collectives.push import pushes, why_not
from meshfold.mesh.initialization import make_needed
from meshfold.mesh.parameters import metadata_on
from meshfold.zero_gemini.chunks.chunk import Chunk
from meshfold.zero_gemini.chunks.gradient import ChunkGradient
from meshfold.zero_gemini.chunks.layout import ChunkSpec, ShardSlice
from meshfold.zero_gemini.chunks.parameter_table import slot_alignment
from meshfold.zero_gemini.chunks.placement import EVERYTHING_ON_THE_DEVICE, ChunkPlacement, PlacementRule
from meshfold.zero_gemini.errors import ChunkError, Faults
from meshfold.zero_gemini.memory.arena import Memory
from meshfold.zero_gemini.optimizer import DiskSettings, Stepper
from meshfold.zero_gemini.optimizer.early_steps import EarlySteps
from meshfold.zero_gemini.optimizer.kernel_runs import StepKind, StepTiming
from meshfold.zero_gemini.optimizer.shard_norms import give_blocks, give_square_sums
from meshfold.zero_gemini.optimizer.speculative_steps import SpeculativeSteps
from meshfold.zero_gemini.profiler.workload import ChunkUse, Named, light_units, uses_of
from meshfold.zero_gemini.runtime.module_hooks import Runtime
from meshfold.zero_gemini.runtime.open_calls import OpenCalls
from meshfold.zero_gemini.runtime.units import Unit, find_units, unit_of_each
from meshfold.zero_gemini.sharded_init import sharded_values
from meshfold.zero_gemini.sharded_model.build import (
    MakeOptimizer,
    give_parameters,
    lay_out_parameters,
    make_stepper,
    take_parameters,
)
from meshfold.zero_gemini.sharded_model.chunk_norms import ChunkNorms
from meshfold.zero_gemini.sharded_model.chunk_slices import ChunkSlices
from meshfold.zero_gemini.sharded_model.contents import Contents
from meshfold.zero_gemini.sharded_model.moves import Residents
from meshfold.zero_gemini.sharded_model.parameter_values import ParameterValues
from meshfold.zero_gemini.sharded_model.pending_steps import PendingSteps
from meshfold.zero_gemini.sharded_model.reducer import GradientFlow


class ChunkedModel(ParameterValues):
    """See :class:`meshfold.zero_gemini.gemini.Gemini`."""

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        *,
        stage: int,
        memory: Memory,
        placements: PlacementRule = EVERYTHING_ON_THE_DEVICE,
        dtype: torch.dtype | None = None,
        other_dtypes: Mapping[Tensor, torch.dtype] = MappingProxyType({}),
        master_dtype: torch.dtype | None = None,
        gradient_dtype: torch.dtype | None = None,
        make_optimizer: MakeOptimizer | None = None,
        regime: str = "A",
        disk: DiskSettings | None = None,
        seed: int = 0,
        values: Callable[[str, nn.Parameter, torch.dtype], Tensor] | None = None,
        chunk_elems: int | None = None,
        stays: bool = False,
        prefetch: int = 1,
        apart: Sequence[str] = (),
        transport: str = "nccl",
        fp8_weights: Mapping[Tensor, Fp8Weight] = MappingProxyType({}),
        recomputes: Callable[[str], bool] = lambda unit: False,
        settled: Callable[[torch.optim.Optimizer | None], None] = lambda optimizer: None,
    ) -> None:
        """Args:
        model: its parameters are put into chunks, in place; those on the meta device are replaced by real ones.
        mesh: gives the group of each parameter's ``sum_axes``: the ranks that share a chunk.
        stage: 1, 2 or 3.
        memory: where the model computes and where chunks live, with budgets.
        placements: rule that gives each chunk its placement; stages 1 and 2 keep parameters on the device.
        dtype: compute dtype of the model; None keeps each parameter's.
        other_dtypes: compute dtypes of parameters that differ from it.
        master_dtype: of the master weights; None: the compute dtype.
        gradient_dtype: in which gradients are summed over micro-steps and ranks; None: ``master_dtype``.
        make_optimizer: makes an elementwise torch optimizer of parameters. Adam and AdamW run in our kernels.
        regime: Adam's state for a bfloat16 model, see :mod:`meshfold.zero_gemini.optimizer.adam`.
        disk: storage of the optimizer state of chunks on disk.
        seed: of stochastic rounding, in regimes B and C.
        values: the first values of a meta parameter: this rank's block over the tensor axes, by name, in its dtype. None:
            as :class:`meshfold.zero_gemini.ShardedInit` has noted them.
        chunk_elems: size of a chunk in elements; None searches for the least waste.
        stays: chunks never leave the device: units that are larger than a chunk have few, large ones of their own.
        prefetch: units gathered ahead of the one that runs.
        apart: axes whose ranks have different parameters (such as pipeline stages). Axes that a parameter names by itself count
            too, but a stage may have no parameters, and its ranks must know the same.
        transport: what carries gathers and reductions of chunks: ``"nccl"``, ``"push"`` or ``"auto"``
            (:func:`meshfold.mesh.collectives.push.pushes`).
        fp8_weights: matrices that only products in fp8 read: stage 3 gathers their operands, in one byte an element.
        recomputes: returns True if a unit of this name repeats its forward in its backward, and reads the forward operands again.
        settled: called with the optimizer, if there is one, before the first value goes into a chunk. Every refusal comes
            before it, unless memory runs out. The optimizer has parameters without memory until then.

        Raises:
            ChunkError: for a meta parameter without a source of values.
        """
        self._mesh, self.memory, self._stage, self._transport = mesh, memory, stage, transport
        self._master_dtype, self._gradient_dtype = master_dtype, gradient_dtype
        self.chunks: list[Chunk] = []
        self._chunk_of: dict[str, Chunk] = {}
        self._gradients: dict[Chunk, ChunkGradient] = {}
        self.holds_gradients = True
        peers = _ranks_with_the_same_chunks(model, mesh, apart)
        self._faults = Faults(peers, memory.device)
        values = values or sharded_values(model, memory.device)
        first = self._take(model, dtype, other_dtypes, fp8_weights if stage == 3 else {})

        self._stepper: Stepper | None = None
        self.group_names: list[list[str]] = []
        if make_optimizer is not None:
            made = make_stepper(
                make_optimizer,
                self._facts,
                master_dtype=master_dtype,
                regime=regime,
                seed=seed,
                disk=disk,
                faults=self._faults,
            )
            self._stepper, self.group_names, regime = made.stepper, made.group_names, made.regime
        shapes = {name: facts.shape for name, facts in self._facts.items()}
        self._contents = Contents(
            ChunkSlices(self._chunk_of, shapes, self._gradients, self._stepper, memory.device, self._faults)
        )
        self._residents = Residents(memory, self._faults, self._stepper, self._gradients, stage=stage)

        laid_out = lay_out_parameters(
            self._facts,
            mesh,
            chunk_elems=chunk_elems,
            slot_align_elems=slot_alignment(regime),
            unit_of=unit_of_each(model) if stays else {},
        )
        try:
            self._make_chunks(laid_out, placements, first, values, settled)
        except BaseException:
            if self._stepper is not None:
                self._stepper.close()  # close its files and threads
            raise
        if self._stepper is not None:
            give_parameters(self._stepper, self.group_names)
            give_square_sums(self._stepper, self._facts, self.chunks, peers, mesh, memory.device)
            give_blocks(self._stepper, self._facts, mesh, memory.device)
        self._add_hooks(model, prefetch, recomputes)

    # -- construction ------------------------------------------------------------------------------------------

    def _take(
        self,
        model: nn.Module,
        dtype: torch.dtype | None,
        other_dtypes: Mapping[Tensor, torch.dtype],
        fp8_weights: Mapping[Tensor, Fp8Weight],
    ) -> dict[str, Tensor]:
        """Collect the facts about the model's parameters; return their initial values, some still on meta, by name."""
        given = dict(model.named_parameters())
        self._fp8_weights = {name: fp8_weights[p] for name, p in given.items() if p in fp8_weights}
        self._facts, first = take_parameters(model, self._mesh, self.memory.device, dtype, other_dtypes, fp8_weights)
        self._names: dict[Tensor, str] = {facts.parameter: name for name, facts in self._facts.items()}
        self._norms = ChunkNorms(self._facts)
        return first

    def _make_chunks(
        self,
        laid_out: Iterable[tuple[Group, Sequence[ChunkSpec], list[list[ShardSlice]]]],
        placements: PlacementRule,
        first: dict[str, Tensor],
        values: Callable[[str, nn.Parameter, torch.dtype], Tensor] | None,
        settled: Callable[[torch.optim.Optimizer | None], None],
    ) -> None:
        """Allocate each chunk at its placement, and move its parameters' initial values into it, out of ``first``."""
        laid = [
            (group, spec, mine) for group, specs, slices in laid_out for spec, mine in zip(specs, slices, strict=True)
        ]
        kinds = [self._facts[spec.names[0]].kind for _, spec, _ in laid]
        chosen = self._residents.choose(placements, [spec for _, spec, _ in laid], kinds)
        settled(self.optimizer)
        for (group, spec, mine), placement in zip(laid, chosen, strict=True):
            with self._faults.raised_on_all():
                chunk = self._make_chunk(spec, mine, group, placement)
                for name in spec.names:
                    self._fill(name, first.pop(name), values)
            chunk.publish()
            chunk.wait_if_resident()

    def _make_chunk(
        self, spec: ChunkSpec, slices: Sequence[ShardSlice], group: Group, placement: ChunkPlacement
    ) -> Chunk:
        members = [self._facts[name] for name in spec.names]
        kind = members[0].kind
        chunk = Chunk(
            spec,
            slices,
            [facts.parameter for facts in members],
            [facts.shape for facts in members],
            group,
            dtype=kind.dtype,
            memory=self.memory,
            tier=placement.parameters,
            whole_group=self._stage < 3,
            pushed=self._is_pushed(spec, group, kind.dtype),
            fp8=[self._fp8_weights[name] for name in spec.names] if kind.fp8 else (),
        )
        self.chunks.append(chunk)
        self._residents.placements[chunk] = placement
        self._chunk_of.update(dict.fromkeys(spec.names, chunk))
        if kind.trained and self._stepper is not None:
            self._stepper.adopt(chunk, placement.state)
            self._gradients[chunk] = ChunkGradient(
                chunk,
                self._gradient_dtype_of(kind.dtype),
                placement.state,
                every_time=self._stage > 1,
                measure=partial(self._norms.square_sum, chunk),
                wait_for_reader=partial(self._stepper.done_with, chunk),
            )
        return chunk

    def _gradient_dtype_of(self, compute: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients of parameters of this compute dtype are summed."""
        if self._gradient_dtype is not None:
            return torch.promote_types(self._gradient_dtype, compute)
        return self._master_dtype or compute

    def _is_pushed(self, spec: ChunkSpec, group: Group, dtype: torch.dtype) -> bool:
        """Return True if copy engines are to carry a chunk, and the group's ranks can push. All of them must call."""
        device = self.memory.device
        wanted = group.size > 1 and pushes(self._transport, spec.shard_elems * dtype.itemsize, device)
        return wanted and not why_not(group, device)

    def _fill(
        self,
        name: str,
        whole: Tensor,
        values: Callable[[str, nn.Parameter, torch.dtype], Tensor] | None,
    ) -> None:
        """Write a parameter's initial value."""
        if whole.is_meta:
            if values is None:
                raise ChunkError(f"{name!r} is on the meta device, and its initial values are unknown")
            whole = make_needed(values, name, self._facts[name].parameter, whole.dtype, self._contents.filled(name))
        self._contents.fill(name, whole)

    def _chunks_of_unit(self, unit: Unit) -> list[Chunk]:
        names = (self._names[parameter] for parameter in unit.parameters)
        return list(dict.fromkeys(self._chunk_of[name] for name in names if name in self._chunk_of))

    def _add_hooks(self, model: nn.Module, prefetch: int, recomputes: Callable[[str], bool]) -> None:
        """Hook the model's units, to gather and release chunks, and its parameters, to collect gradients."""
        self._units = find_units(model)
        light = light_units(self.uses())
        calls = OpenCalls({unit: self._chunks_of_unit(unit) for unit in self._units})
        adam, early = (None, None) if self._stepper is None else (self._stepper.one_by_one, self._stepper.early)
        self._early = None if early is None else EarlySteps(early, calls, self.memory)
        self._speculative = None if adam is None else SpeculativeSteps(adam)
        self._pending = PendingSteps(self._stepper, self.chunks, self._faults, self._early)
        self._runtime = Runtime(
            model,
            calls,
            prefetch=prefetch,
            before_evaluation=self._pending.flush,
            light=frozenset(unit for unit in self._units if unit.name in light),
            steps_in_background=self._pending.in_background,
            check_forward=None if self._early is None else self._early.check,
            on_entered=lambda: self._flow.collect_earlier(),
            on_left=None if self._early is None else self._early.go,
            recomputes=recomputes,
        )
        order = {name: place for place, name in enumerate(self._facts)}
        self._flow = GradientFlow(
            self._gradients, order, self.memory.device, self._runtime, calls, self._early, self._speculative
        )

    # -- the optimizer -----------------------------------------------------------------------------------------

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """Optimizer with the parameter groups and their settings, for schedulers; or None."""
        return None if self._stepper is None else self._stepper.optimizer

    @property
    def notes(self) -> tuple[str, ...]:
        """Return notes on this rank's files: no direct I/O, files of a killed process that were removed."""
        return () if self._stepper is None else self._stepper.notes

    @property
    def units_entered(self) -> int:
        """Number of units that this step has entered, in forward and in backward, also in a replay."""
        return self._runtime.entered

    def take_step_timings(self) -> dict[StepKind, StepTiming]:
        """Return timings of steps on the host since the last call: Adam's, of other optimizers those of state on disk."""
        return {} if self._stepper is None else self._stepper.take_timings()

    # -- pending steps -----------------------------------------------------------------------------------------

    def flush(self) -> None:
        """See :meth:`PendingSteps.flush <meshfold.zero_gemini.sharded_model.pending_steps.PendingSteps.flush>`."""
        self._pending.flush()

    # -- placements ---------------------------------------------------------------------------------------------

    @property
    def placements(self) -> dict[Chunk, ChunkPlacement]:
        """Placement of each chunk."""
        return dict(self._residents.placements)

    @property
    def stage(self) -> int:
        """Stage of ZeRO: 1, 2 or 3."""
        return self._stage

    def uses(self) -> list[ChunkUse]:
        """Return the chunks, in the order of ``chunks``, with the units that use them: the input of the planner."""
        chunks = (
            Named(str(number), chunk.spec, chunk in self._gradients, chunk.group.name if chunk.is_pushed else "")
            for number, chunk in enumerate(self.chunks)
        )
        return uses_of(chunks, self._units, self._facts)

    def gather_by(self, units: Sequence[str], ready: Sequence[int]) -> None:
        """Gather ahead as a plan says, in steps with its order of units; in other steps, and without units, by count.

        All ranks that share chunks must call, between steps, with the same.

        Args:
            units: name of the unit of each timestep.
            ready: for each timestep the one from which its unit is gathered.
        """
        self._runtime.gather_by(units, ready)

    def stream_on_gpu(self, on: bool, *, halves: bool = False) -> bool:
        """Switch GPU streaming, with which the GPU steps some of the host's chunks. Return True if it is on now.

        It takes :data:`~meshfold.zero_gemini.optimizer.gpu_streaming.STREAMING_BYTES` of GPU memory and gives bit-identical
        results. Only Adam supports it.

        Args:
            on: True to turn it on.
            halves: the GPU writes only parameters, and the CPU steps the moments during backward.
        """
        self.flush()
        return self._residents.stream_on_gpu(on, halves=halves)

    def step_speculatively(self, on: bool, *, chunks: Collection[Chunk] | None = None) -> bool:
        """Switch speculative steps of chunks on the host, into a shadow copy
        (:mod:`meshfold.zero_gemini.optimizer.speculative_steps`).

        Results are bit-identical. A chunk that moves to another placement no longer steps speculatively.

        Args:
            on: True to turn them on.
            chunks: that get a shadow copy; the others are stepped once the norm is known. None: all.

        Returns:
            True if they are on now: False if the host has no memory for the copies, or the optimizer is not Adam.
        """
        self.flush()
        of = () if not on else self.chunks if chunks is None else chunks
        return self._speculative is not None and self._speculative.keep_copies(of)

    @property
    def steps_alike(self) -> int:
        """Consecutive steps, up to the last, with equal gradient factors; 0 while nothing is on the host."""
        return 0 if self._speculative is None else self._speculative.alike


def _ranks_with_the_same_chunks(model: nn.Module, mesh: Mesh, apart: Sequence[str]) -> Group:
    """Return the ranks that have the same parameters, and so reach the same collectives: those of one pipeline stage.

    Args:
        model: its parameters' metadata names axes whose ranks have different ones.
        mesh: all ranks.
        apart: further axes whose ranks have different parameters.
    """
    others = {*apart, *(axis for p in model.parameters() for axis in metadata_on(p, mesh).only_at)}
    return mesh.group(*(axis for axis in mesh.names if axis not in others))
