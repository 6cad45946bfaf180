"""Gemini: a model's parameters, gradients and optimizer state in chunks, sharded over the ranks that share its batch.

Stage 1 shards the optimizer state, stage 2 the gradients too, stage 3 the parameters too (Rajbhandari et al. 2020, arXiv
1910.02054). Shards may live in the host's memory and visit the device.

A training step::

    gemini.begin(last=True)
    loss_of(model(batch)).backward()     # units are gathered, chunks of gradients reduced, as they come
    norm = gemini.clip(1.0)
    gemini.step()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.mesh import Group, Mesh, ParameterMeta
from meshfold.mesh.metadata import placed
from meshfold.zero_gemini.chunk import Chunk
from meshfold.zero_gemini.contents import Contents
from meshfold.zero_gemini.errors import ChunkError, MemoryPlanError
from meshfold.zero_gemini.gradient_flow import GradientFlow
from meshfold.zero_gemini.gradients import ChunkGradient
from meshfold.zero_gemini.layout import ChunkSpec
from meshfold.zero_gemini.members import Member, lay_out_members, slot_align
from meshfold.zero_gemini.memory import Memory
from meshfold.zero_gemini.norm import combine, holders_of, power_sum
from meshfold.zero_gemini.placing import EVERYTHING_ON_THE_DEVICE, Home, Homes
from meshfold.zero_gemini.runtime import Runtime
from meshfold.zero_gemini.sharded_init import sharded_values
from meshfold.zero_gemini.stepping import AdamStepper, DiskSettings, Entry, GeneralStepper, Stepper
from meshfold.zero_gemini.stepping.kinds import adam_regime, kind_of
from meshfold.zero_gemini.stepping.whole import WholeStepper
from meshfold.zero_gemini.trace.workload import ChunkUse
from meshfold.zero_gemini.transfer import synchronize
from meshfold.zero_gemini.units import Unit, find_units

MakeOptimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class _Kind:
    """What the parameters of a chunk have in common."""

    dtype: torch.dtype
    trained: bool
    holders: int  # 0: not the same for all elements


@dataclass(frozen=True, kw_only=True)
class _Known:
    """What is known of a parameter for good: its tensor comes and goes."""

    parameter: nn.Parameter
    meta: ParameterMeta
    shape: torch.Size
    kind: _Kind
    holders: int | Tensor = field(compare=False)


class Gemini:
    """Holds a model in chunks and trains it.

    Attributes:
        chunks: all of them, in order of registration.
        group_names: names of the parameters in each of the optimizer's groups.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        *,
        stage: int,
        memory: Memory,
        homes: Homes = EVERYTHING_ON_THE_DEVICE,
        dtype: torch.dtype | None = None,
        master_dtype: torch.dtype | None = None,
        gradient_dtype: torch.dtype | None = None,
        make_optimizer: MakeOptimizer | None = None,
        regime: str = "A",
        disk: DiskSettings | None = None,
        seed: int = 0,
        values: Callable[[str, nn.Parameter, torch.dtype], Tensor] | None = None,
        chunk_elems: int | None = None,
        prefetch: int = 1,
    ) -> None:
        """Args:
        model: its parameters are put into chunks, in place; those on the meta device are replaced by real ones.
        mesh: gives the group of each parameter's ``sum_axes``: the ranks that share a chunk.
        stage: 1, 2 or 3.
        memory: where the model computes and where chunks live, with budgets.
        homes: says where each chunk lives, from the elements of their shards; stages 1 and 2 keep parameters on the device.
        dtype: in which the model computes; None keeps each parameter's.
        master_dtype: of the true weights; None: as the model computes.
        gradient_dtype: in which gradients are summed over micro-steps and ranks; None: ``master_dtype``.
        make_optimizer: makes an elementwise torch optimizer of parameters. Adam and AdamW are carried out by our kernels.
        regime: what Adam keeps of a bfloat16 model, see :mod:`meshfold.zero_gemini.stepping.adam`.
        disk: where the optimizer state of chunks on disk lies.
        seed: of stochastic rounding, in regimes B and C.
        values: the first values of a meta parameter: this rank's block over the tensor axes, by name, in its dtype. None:
            as :class:`meshfold.zero_gemini.ShardedInit` has noted them.
        chunk_elems: size of a chunk in elements; None searches for the least waste.
        prefetch: units gathered ahead of the one that runs.

        Raises:
            ChunkError: for a meta parameter whose values nobody knows.
        """
        self._mesh, self.memory, self._stage = mesh, memory, stage
        self.chunks: list[Chunk] = []
        self._known: dict[str, _Known] = {}
        self._chunk_of: dict[str, Chunk] = {}
        self._homes: dict[Chunk, Home] = {}
        self._stepper: Stepper | None = None
        self._gradients: dict[Chunk, ChunkGradient] = {}
        values = values or sharded_values(model, memory.device)
        first = {name: p.detach() for name, p in model.named_parameters()}
        _replace_meta(model, memory.device)
        for name, parameter in model.named_parameters():
            meta, shape = placed(parameter, mesh), first[name].shape
            holders = holders_of(meta, shape, mesh)
            kind = _Kind(
                (dtype or parameter.dtype) if parameter.is_floating_point() else parameter.dtype,
                parameter.requires_grad,
                holders if isinstance(holders, int) else 0,
            )
            self._known[name] = _Known(
                parameter=parameter, meta=meta, shape=shape, kind=kind, holders=holders
            )
        self.group_names: list[list[str]] = []
        self._regime = regime
        if make_optimizer is not None:
            self._stepper = self._make_stepper(make_optimizer, master_dtype, regime, seed, disk)
        self._contents = Contents(
            self._chunk_of, {name: known.shape for name, known in self._known.items()}, self._gradients,
            self._stepper, memory.device,
        )  # fmt: skip
        laid = [*self._lay_out(chunk_elems, slot_align(self._regime))]
        chosen = iter(self._chosen(homes, [spec for _, specs, _ in laid for spec in specs]))
        for group, specs, slices in laid:
            for spec, mine in zip(specs, slices, strict=True):
                chunk = self._make_chunk(spec, mine, group, next(chosen), master_dtype, gradient_dtype)
                for name in spec.names:
                    whole = first.pop(name)
                    if whole.is_meta:
                        if values is None:
                            raise ChunkError(
                                f"{name!r} is on the meta device and nothing says its first values"
                            )
                        whole = values(name, self._known[name].parameter, whole.dtype)
                    self._contents.fill(name, whole)
                chunk.publish()
                chunk.wait_if_resident()
        self._names = {known.parameter: name for name, known in self._known.items()}
        self._give_stretches()
        self._units = find_units(model)
        self._runtime = Runtime(model, self._units, self._chunks_of_unit, prefetch=prefetch)
        self._flow = GradientFlow(self._gradients, memory.device)
        self._scale: float | Tensor = 1.0
        self._finished = False

    # -- building -----------------------------------------------------------------------------------------------

    def _lay_out(self, chunk_elems: int | None, slot_align_elems: int) -> Any:
        """Group, chunks and this rank's slices of each, for every set of axes that gradients are summed over."""
        members = {
            name: Member(numel=known.shape.numel(), kind=known.kind, sum_axes=known.meta.sum_axes)
            for name, known in self._known.items()
        }
        for axes, layout in lay_out_members(
            members, self._mesh, slot_align_elems=slot_align_elems, chunk_elems=chunk_elems
        ):
            group = self._mesh.group(*axes)
            yield group, layout.chunks, [layout.shard_slices(chunk, group.index) for chunk in layout.chunks]

    def _chosen(self, homes: Homes, specs: Sequence[ChunkSpec]) -> list[Home]:
        """Where chunks live; there is room on disk for those that go there."""
        found = [self._at_home(home) for home in homes([spec.shard_elems for spec in specs])]
        kinds = [self._known[spec.names[0]].kind for spec in specs]
        self._reserve(
            (kind.dtype, spec.shard_elems)
            for home, spec, kind in zip(found, specs, kinds, strict=True)
            if home.state == "disk" and kind.trained
        )
        return found

    def _reserve(self, shards: Iterable[tuple[torch.dtype, int]]) -> None:
        if self._stepper is not None:
            self._stepper.reserve(shards)

    def _make_chunk(
        self,
        spec: ChunkSpec,
        slices: Any,
        group: Group,
        home: Home,
        master_dtype: torch.dtype | None,
        gradient_dtype: torch.dtype | None,
    ) -> Chunk:
        members = [self._known[name] for name in spec.names]
        kind = members[0].kind
        chunk = Chunk(
            spec, slices, [known.parameter for known in members], [known.shape for known in members], group,
            dtype=kind.dtype, memory=self.memory, home=home.parameters, whole_group=self._stage < 3,
        )  # fmt: skip
        self.chunks.append(chunk)
        self._homes[chunk] = home
        self._chunk_of.update(dict.fromkeys(spec.names, chunk))
        if kind.trained and self._stepper is not None:
            self._stepper.adopt(chunk, home.state)
            self._gradients[chunk] = ChunkGradient(
                chunk, gradient_dtype or master_dtype or kind.dtype, home.state, every_time=self._stage > 1,
                measure=partial(self._power_sum, chunk, 2.0),
            )  # fmt: skip
        return chunk

    def _at_home(self, home: Home) -> Home:
        """What a home means under this stage: 1 and 2 keep parameters on the device."""
        return home if self._stage == 3 else replace(home, parameters="device")

    def _make_stepper(
        self, make: MakeOptimizer, master_dtype: torch.dtype | None, regime: str, seed: int,
        disk: DiskSettings | None,
    ) -> Stepper:  # fmt: skip
        """What steps on shards: of the optimizer that is made of parameters of the whole ones' shapes, without memory."""
        trained = {name: known for name, known in self._known.items() if known.kind.trained}
        stand_ins = {
            name: nn.Parameter(torch.empty((), device=self.memory.host).expand(known.shape))
            for name, known in trained.items()
        }
        made = make(list(stand_ins.values()))
        kind = kind_of(
            made, {(known.kind.dtype, master_dtype or known.kind.dtype) for known in trained.values()}
        )
        names = {parameter: name for name, parameter in stand_ins.items()}
        self.group_names = [[names[p] for p in group["params"]] for group in made.param_groups]
        with_state = bool(made.state)
        made.state.clear()
        dtypes = {known.kind.dtype for known in trained.values()}
        if kind == "adam":
            self._regime, seed = adam_regime(made, regime, seed)
            return AdamStepper(made, self._regime, seed, disk)
        if regime != "A":
            raise MemoryPlanError(
                f"regime {regime!r} is how Adam keeps its state, and the optimizer is {type(made).__name__} "
                f"(in {', '.join(map(str, dtypes))}): use adamw or adam with precision='bf16', or regime='A'"
            )
        if kind == "matrices":
            return WholeStepper(
                made,
                master_dtype,
                metas={name: known.meta for name, known in trained.items()},
                shapes={name: known.shape for name, known in trained.items()},
                with_state=with_state,
            )
        return GeneralStepper(made, master_dtype, with_state=with_state)

    def _give_stretches(self) -> None:
        """Put this rank's stretches into the optimizer's groups, in place of what they were made with."""
        if self._stepper is None:
            return
        optimizer = self._stepper.optimizer
        for group, names in zip(optimizer.param_groups, self.group_names, strict=True):
            found = (self._stepper.stretch(name) for name in names)
            group["params"] = [stretch for stretch in found if stretch is not None]
        if isinstance(self._stepper, GeneralStepper | WholeStepper):
            self._stepper.begin()

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """Has the groups with their settings, for schedulers; None if there is none."""
        return None if self._stepper is None else self._stepper.optimizer

    def _chunks_of_unit(self, unit: Unit) -> list[Chunk]:
        names = (self._names[parameter] for parameter in unit.parameters)  # type: ignore[index]
        return list(dict.fromkeys(self._chunk_of[name] for name in names if name in self._chunk_of))

    # -- a step -------------------------------------------------------------------------------------------------

    def begin(self, *, last: bool) -> None:
        """Before each micro-step: whether it is the last of an accumulation."""
        if self._flow.was_broken_off:
            self.abandon()
        if self._finished:
            self.forget()
        self._flow.last = last
        self._runtime.begin_step()

    def finish(self, factor: float = 1.0) -> None:
        """After the last backward: gradients are complete, and count times the factor."""
        self._flow.shards()
        self._scale, self._finished = factor, True

    def norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of the whole model's gradient: float64, the same on every rank."""
        everyone = self._mesh.group(*self._mesh.names)
        return self._flow.norm(norm_type, self._power_sum, everyone) * self._scale

    def _power_sum(self, chunk: Chunk, norm_type: float, shard: Tensor) -> Tensor:
        """This rank's part of a norm: of a chunk's shard of the gradient, wherever that lies."""
        alike = self._known[chunk.spec.names[0]].kind.holders
        if alike:
            return power_sum(shard, alike, norm_type)
        sums = []
        for part in chunk.slices:
            holders = self._known[part.name].holders
            if isinstance(holders, Tensor):
                holders = holders[part.parameter_start : part.parameter_start + part.length]
            stretch = shard[part.shard_start : part.shard_start + part.length]
            sums.append(power_sum(stretch, holders, norm_type))
        return combine(sums, norm_type, shard.device)

    def clip(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Let the gradient's norm be at most ``max_norm``, by torch's rule; the norm before."""
        norm = self.norm(norm_type)
        self._scale = self._scale * torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        return norm

    def step(self) -> None:
        """Let the optimizer step on every shard, and show the new weights."""
        if self._stepper is None:
            raise ChunkError("this model has no optimizer: give make_optimizer")
        self._stepper.step(self._flow.shards(), self._scale, self._flow.used())
        for chunk, gradient in self._gradients.items():
            gradient.hand_over(partial(self._stepper.done_with, chunk))
        self._publish(promised=False)
        self.forget()

    def expect(self, *, last: bool) -> None:
        """Right before a backward: whether it is the last of an accumulation, where ``begin`` could not know."""
        self._flow.last = last

    @property
    def takes(self) -> bool:
        """Whether gradients count that come now; those that come while it is False are dropped."""
        return self._flow.takes

    @takes.setter
    def takes(self, yes: bool) -> None:
        self._flow.takes = yes

    def reduce_rest(self) -> None:
        """Reduce what backwards that were not the last have left. All ranks must call, before ``finish``."""
        self._flow.reduce_rest()

    @torch.no_grad()
    def clip_value(self, bound: float) -> None:
        """Bring every element of the gradient, times the factor it counts with, into [-bound, bound]."""
        limit = bound / float(self._scale)
        for shard in self._flow.shards().values():
            shard.clamp_(-limit, limit)

    def forget(self) -> None:
        """Let all gradients go."""
        self._flow.forget()
        self._scale, self._finished = 1.0, False

    def abandon(self) -> None:
        """Forget a micro-step that raised in the middle, with all gradients since the last step."""
        self._flow.abandon()
        self._runtime.abandon()
        self.forget()

    def flush(self) -> None:
        """Let every step that was only promised be done. All ranks must call."""
        if self._stepper is not None:
            self._stepper.finish()
            for chunk in self.chunks:
                chunk.wait_if_resident()

    def publish(self) -> None:
        """Show the true weights to the model."""
        self._publish(promised=True)

    def _publish(self, *, promised: bool) -> None:
        """Show the true weights of all chunks; but for ``promised``, not of those whose step is to come."""
        shown = [chunk for chunk in self.chunks if promised or not chunk.is_due]
        for chunk in shown:
            if self._stepper is not None and chunk in self._gradients:
                self._stepper.publish(chunk)
            else:
                chunk.publish()
        for chunk in shown:
            chunk.wait_if_resident()

    # -- where chunks live --------------------------------------------------------------------------------------

    @property
    def homes(self) -> dict[Chunk, Home]:
        """Where each chunk lives."""
        return dict(self._homes)

    def uses(self) -> list[ChunkUse]:
        """The chunks, in the order of ``chunks``, with the units that need them: what a plan is made of."""
        users: dict[Chunk, dict[str, int]] = {chunk: {} for chunk in self.chunks}
        for unit in self._units:
            for parameter in unit.parameters:
                name = self._names[parameter]  # type: ignore[index]
                chunk = self._chunk_of.get(name)
                if chunk is not None:
                    elements = self._known[name].shape.numel()
                    users[chunk][unit.name] = users[chunk].get(unit.name, 0) + elements
        return [
            ChunkUse(
                name=str(number), elems=chunk.spec.shard_elems, gathered_elems=chunk.spec.size_elems, units=units,
                trainable=chunk in self._gradients,
            )
            for number, (chunk, units) in enumerate(users.items())
        ]  # fmt: skip

    def rehome(self, homes: Mapping[Chunk, Home]) -> None:
        """Let chunks live elsewhere, between steps: training goes on as if nothing had happened. All ranks must call.

        What leaves the device goes first, so that memory does not run out on the way.
        """
        self.flush()
        self.forget()
        self._runtime.rest()
        self._reserve(
            (chunk.dtype, chunk.spec.shard_elems)
            for chunk, home in homes.items()
            if home.state == "disk" != self._homes[chunk].state and chunk in self._gradients
        )
        synchronize(self.memory.device)  # copies that are under way read what is about to go
        for chunk, home in sorted(homes.items(), key=lambda pair: _weight(pair[1])):
            home = self._at_home(home)
            if home == self._homes[chunk]:
                continue
            if self._stepper is not None and chunk in self._gradients:
                self._gradients[chunk].rehome(home.state)
                self._stepper.move(chunk, home)
            else:
                chunk.rehome(home.parameters)
            self._homes[chunk] = home
        self._runtime.reread()

    # -- state --------------------------------------------------------------------------------------------------

    def holds(self, parameter: Tensor) -> bool:
        """Whether a tensor is one of the parameters that lie in chunks."""
        return parameter in self._names

    def read(self, parameter: Tensor) -> Tensor:
        """This rank's block over the tensor axes of a parameter's true value. All ranks of its chunk's group must call."""
        self.flush()
        return self._contents.read(self._name_of(parameter))

    def true_dtype(self, parameter: Tensor) -> torch.dtype:
        """Of a parameter's true value."""
        return self._contents.true_dtype(self._name_of(parameter))

    def write(self, parameter: Tensor, block: Tensor) -> None:
        """Take a parameter's true value, this rank's block over the tensor axes; then ``publish``."""
        self.flush()
        self._contents.fill(self._name_of(parameter), block)

    def state_entries(self) -> dict[str, dict[str, Entry]]:
        """What tensors the optimizer has, by parameter name and key. All ranks of the chunks' groups must call."""
        self.flush()
        return self._contents.state_entries()

    def read_state(self, name: str, key: str, entry: Entry) -> Tensor:
        """This rank's block over the tensor axes of an optimizer's tensor; a number as it is. The chunk's group must call."""
        return self._contents.read_state(name, key, entry)

    def clear_state(self) -> None:
        """Forget the optimizer's state, as if it had not stepped yet."""
        self.flush()
        if self._stepper is not None:
            self._stepper.reset()

    def write_state(self, name: str, key: str, value: Tensor) -> None:
        """Take an optimizer's tensor: this rank's block over the tensor axes, or a number."""
        self.flush()
        self._contents.write_state(name, key, value)

    def _name_of(self, parameter: Tensor) -> str:
        return self._names[parameter]  # type: ignore[index]

    def close(self) -> None:
        """Take all hooks off, and let go of what only training needs: gradients and the optimizer's state."""
        try:
            if self._stepper is not None:
                self.flush()
        finally:  # also if a step that was promised failed
            self._runtime.close()
            self._flow.close()
            self._gradients.clear()
            if self._stepper is not None:
                self._stepper.close()
            for chunk in self.chunks:
                chunk.due = None


def _weight(home: Home) -> int:
    """How much of a chunk is on the device then."""
    return (home.parameters == "device") + 4 * (home.state == "device")


def _replace_meta(model: nn.Module, device: torch.device) -> None:
    """Put real parameters, without elements yet, in the place of those on the meta device; ties stay ties."""
    made: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if parameter not in made:
                    empty = torch.empty(0, dtype=parameter.dtype, device=device)
                    made[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                    made[parameter].__dict__.update(parameter.__dict__)
                module._parameters[name] = made[parameter]
