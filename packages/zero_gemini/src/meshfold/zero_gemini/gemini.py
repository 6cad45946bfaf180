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

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.mesh import Group, Mesh, ParameterMeta, all_gather, all_reduce
from meshfold.mesh.metadata import placed
from meshfold.zero_gemini.agree import tell_all
from meshfold.zero_gemini.chunk import Chunk
from meshfold.zero_gemini.errors import ChunkError, MemoryPlanError
from meshfold.zero_gemini.gradients import ChunkGradient
from meshfold.zero_gemini.layout import ChunkSpec, Item, lay_out
from meshfold.zero_gemini.norm import combine, holders_of, power_sum
from meshfold.zero_gemini.runtime import Runtime
from meshfold.zero_gemini.search import search_chunk_size
from meshfold.zero_gemini.stepping import AdamStepper, Entry, GeneralStepper, Stepper
from meshfold.zero_gemini.stepping.adam import suits
from meshfold.zero_gemini.units import Unit, find_units

MakeOptimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, kw_only=True)
class Placing:
    """Where a model's state lives.

    What is used first stays on the device first: its gradients come last, and its parameters are needed first.

    Attributes:
        device: where the model computes.
        host: where the rest lives.
        host_parameters: share of the parameters' bytes that live on the host; above 0 under stage 3 only.
        host_optimizer: share of the bytes of true weights and optimizer state that live on the host; not less.
    """

    device: torch.device
    host: torch.device = field(default_factory=lambda: torch.device("cpu"))
    host_parameters: float = 0.0
    host_optimizer: float = 0.0

    def __post_init__(self) -> None:
        for name in ("host_parameters", "host_optimizer"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise MemoryPlanError(f"{name}={getattr(self, name)!r}: a share is a number from 0 to 1")
        if self.host_parameters > self.host_optimizer:
            raise MemoryPlanError(
                f"host_parameters={self.host_parameters} is above host_optimizer={self.host_optimizer}: parameters on the host "
                "have their optimizer state there too; raise host_optimizer"
            )

    def homes(self, before: int, elements: int) -> tuple[torch.device, torch.device]:
        """Where a chunk's parameters and its optimizer state live, by the share of all elements that come before it."""
        place = before / max(elements, 1)
        return (
            self.host if place >= 1.0 - self.host_parameters else self.device,
            self.host if place >= 1.0 - self.host_optimizer else self.device,
        )


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
        placing: Placing,
        dtype: torch.dtype | None = None,
        master_dtype: torch.dtype | None = None,
        gradient_dtype: torch.dtype | None = None,
        make_optimizer: MakeOptimizer | None = None,
        regime: str = "A",
        seed: int = 0,
        values: Callable[[str, nn.Parameter, torch.dtype], Tensor] | None = None,
        chunk_elems: int | None = None,
        prefetch: int = 1,
    ) -> None:
        """Args:
        model: its parameters are put into chunks, in place; those on the meta device are replaced by real ones.
        mesh: gives the group of each parameter's ``sum_axes``: the ranks that share a chunk.
        stage: 1, 2 or 3.
        placing: where things live.
        dtype: in which the model computes; None keeps each parameter's.
        master_dtype: of the true weights; None: as the model computes.
        gradient_dtype: in which gradients are summed over micro-steps and ranks; None: ``master_dtype``.
        make_optimizer: makes an elementwise torch optimizer of parameters. Adam and AdamW are carried out by our kernels.
        regime: what Adam keeps of a bfloat16 model, see :mod:`meshfold.zero_gemini.stepping.adam`.
        seed: of stochastic rounding, in regimes B and C.
        values: the first values of a meta parameter: this rank's block over the tensor axes, by name, in its dtype.
        chunk_elems: size of a chunk in elements; None searches for the least waste.
        prefetch: units gathered ahead of the one that runs.

        Raises:
            ChunkError: for a meta parameter whose values nobody knows.
        """
        self._mesh, self._placing = mesh, placing
        self.chunks: list[Chunk] = []
        self._known: dict[str, _Known] = {}
        self._chunk_of: dict[str, Chunk] = {}
        self._stepper: Stepper | None = None
        self._gradients: dict[Chunk, ChunkGradient] = {}
        first = {name: p.detach() for name, p in model.named_parameters()}
        _replace_meta(model, placing.device)
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
        if make_optimizer is not None:
            self._stepper = self._make_stepper(make_optimizer, master_dtype, regime, seed)
        align = 256 if regime == "C" else 64  # moments in 8 bits share a scale every 256 elements
        elements = sum(known.shape.numel() for known in self._known.values())
        for group, specs, slices in self._lay_out(chunk_elems, align):
            for spec, mine in zip(specs, slices, strict=True):
                chunk = self._make_chunk(spec, mine, group, stage, master_dtype, gradient_dtype, elements)
                for name in spec.names:
                    whole = first.pop(name)
                    if whole.is_meta:
                        if values is None:
                            raise ChunkError(
                                f"{name!r} is on the meta device and nothing says its first values"
                            )
                        whole = values(name, self._known[name].parameter, whole.dtype)
                    self._fill(name, whole)
                chunk.publish()
                chunk.wait_if_resident()
        self._names = {known.parameter: name for name, known in self._known.items()}
        self._give_stretches()
        units = find_units(model)
        self._runtime = Runtime(model, units, self._chunks_of_unit, prefetch=prefetch)
        self._last = True
        self._next = 0
        self._in_backward = False
        self._scale: float | Tensor = 1.0
        self._finished = False
        self._handles = [
            self._known[name].parameter.register_post_accumulate_grad_hook(self._arrival(gradient, place))
            for chunk, gradient in self._gradients.items()
            for place, name in enumerate(chunk.spec.names)
        ]

    # -- building -----------------------------------------------------------------------------------------------

    def _lay_out(self, chunk_elems: int | None, slot_align_elems: int) -> Any:
        """Group, chunks and this rank's slices of each, for every set of axes that gradients are summed over."""
        for axes in dict.fromkeys(known.meta.sum_axes for known in self._known.values()):
            group = self._mesh.group(*axes)
            items = [
                Item(name, known.shape.numel(), known.kind)
                for name, known in self._known.items()
                if known.meta.sum_axes == axes and known.shape.numel()
            ]
            size = chunk_elems or search_chunk_size(items, group.size).chunk_elems
            layout = lay_out(items, size, group.size, slot_align_elems=slot_align_elems)
            yield group, layout.chunks, [layout.shard_slices(chunk, group.index) for chunk in layout.chunks]

    def _make_chunk(
        self,
        spec: ChunkSpec,
        slices: Any,
        group: Group,
        stage: int,
        master_dtype: torch.dtype | None,
        gradient_dtype: torch.dtype | None,
        elements: int,
    ) -> Chunk:
        members = [self._known[name] for name in spec.names]
        kind = members[0].kind
        before = sum(chunk.spec.used_elems for chunk in self.chunks)
        home, step_home = self._placing.homes(before, elements)
        chunk = Chunk(
            spec, slices, [known.parameter for known in members], [known.shape for known in members], group,
            dtype=kind.dtype, device=self._placing.device, home=home, resident=stage < 3,
        )  # fmt: skip
        self.chunks.append(chunk)
        self._chunk_of.update(dict.fromkeys(spec.names, chunk))
        if kind.trained and self._stepper is not None:
            self._stepper.adopt(chunk, step_home)
            self._gradients[chunk] = ChunkGradient(
                chunk, gradient_dtype or master_dtype or kind.dtype, step_home, every_time=stage > 1
            )
        return chunk

    def _make_stepper(
        self, make: MakeOptimizer, master_dtype: torch.dtype | None, regime: str, seed: int
    ) -> Stepper:
        """What steps on shards: of the optimizer that is made of parameters of the whole ones' shapes, without memory."""
        trained = {name: known for name, known in self._known.items() if known.kind.trained}
        stand_ins = {
            name: nn.Parameter(torch.empty((), device=self._placing.host).expand(known.shape))
            for name, known in trained.items()
        }
        made = make(list(stand_ins.values()))
        names = {parameter: name for name, parameter in stand_ins.items()}
        self.group_names = [[names[p] for p in group["params"]] for group in made.param_groups]
        with_state = bool(made.state)
        made.state.clear()
        dtypes = {known.kind.dtype for known in trained.values()}
        if all(suits(made, dtype, master_dtype or dtype) for dtype in dtypes):
            return AdamStepper(made, regime, seed)
        if regime != "A":
            raise MemoryPlanError(
                f"regime {regime!r} is how Adam keeps its state, and the optimizer is {type(made).__name__} "
                f"(in {', '.join(map(str, dtypes))}): use adamw or adam with precision='bf16', or regime='A'"
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
        if isinstance(self._stepper, GeneralStepper):
            self._stepper.begin()

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """Has the groups with their settings, for schedulers; None if there is none."""
        return None if self._stepper is None else self._stepper.optimizer

    def _fill(self, name: str, block: Tensor) -> None:
        chunk = self._chunk_of[name]
        if self._stepper is None or chunk not in self._gradients:
            chunk.fill(name, block)
        else:
            self._stepper.fill(name, block)

    def _chunks_of_unit(self, unit: Unit) -> list[Chunk]:
        names = (self._names[parameter] for parameter in unit.parameters)  # type: ignore[index]
        return list(dict.fromkeys(self._chunk_of[name] for name in names if name in self._chunk_of))

    # -- a step -------------------------------------------------------------------------------------------------

    def begin(self, *, last: bool) -> None:
        """Before each micro-step: whether it is the last of an accumulation."""
        if self._finished:
            self.forget()
        self._last = last
        self._runtime.begin_step()

    def finish(self, factor: float = 1.0) -> None:
        """After the last backward: gradients are complete, and count times the factor."""
        for gradient in self._gradients.values():
            gradient.finish()
        self._scale, self._finished = factor, True

    def norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of the whole model's gradient: float64, the same on every rank."""
        sums = []
        for chunk, gradient in self._gradients.items():
            shard = gradient.finish()
            if self._known[chunk.spec.names[0]].kind.holders:
                sums.append(power_sum(shard, self._known[chunk.spec.names[0]].kind.holders, norm_type))
                continue
            for part in chunk.slices:
                holders = self._known[part.name].holders
                if isinstance(holders, Tensor):
                    holders = holders[part.parameter_start : part.parameter_start + part.length]
                stretch = shard[part.shard_start : part.shard_start + part.length]
                sums.append(power_sum(stretch, holders, norm_type))
        total = combine(sums, norm_type, self._placing.device)
        everyone = self._mesh.group(*self._mesh.names)
        if math.isinf(norm_type):
            return all_reduce(total, everyone, "max") * self._scale
        return all_reduce(total, everyone) ** (1.0 / norm_type) * self._scale

    def clip(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Let the gradient's norm be at most ``max_norm``, by torch's rule; the norm before."""
        norm = self.norm(norm_type)
        self._scale = self._scale * torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        return norm

    def step(self) -> None:
        """Let the optimizer step on every shard, and show the new weights."""
        if self._stepper is None:
            raise ChunkError("this model has no optimizer: give make_optimizer")
        shards = {chunk: gradient.finish() for chunk, gradient in self._gradients.items()}
        self._stepper.step(shards, self._scale, self._used())
        for chunk, gradient in self._gradients.items():
            gradient.hand_over(partial(self._stepper.done_with, chunk))
        self._publish(promised=False)
        self.forget()

    def forget(self) -> None:
        """Let all gradients go."""
        for gradient in self._gradients.values():
            gradient.clear()
        self._scale, self._finished = 1.0, False

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

    def _used(self) -> set[str]:
        """Names of the parameters that had a gradient on some rank."""
        used: set[str] = set()
        for chunk, gradient in self._gradients.items():
            names = chunk.spec.names
            if chunk.group.size > 1:
                flags = torch.zeros(len(names), device=self._placing.device)
                for place in gradient.used:
                    flags[place] = 1.0
                flags = all_reduce(flags, chunk.group, "max")
                if len(gradient.used) < len(names):
                    used.update(names[place] for place in flags.nonzero().flatten().tolist())
                    continue
            used.update(names[place] for place in gradient.used)
        return used

    def _arrival(self, gradient: ChunkGradient, place: int) -> Callable[[Tensor], None]:
        def arrive(parameter: Tensor) -> None:
            if parameter.grad is not None:
                if not self._in_backward:
                    self._in_backward = True
                    torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)
                gradient.add(place, parameter.grad)
                parameter.grad = None
                self._reduce_ready()

        return arrive

    def _reduce_ready(self) -> None:
        """Reduce, in order, the chunks whose gradients are all there; backward comes to the last chunk first."""
        waiting = list(reversed(self._gradients.values()))
        while self._next < len(waiting) and waiting[self._next].is_full:
            waiting[self._next].reduce(last=self._last)
            self._next += 1

    def _backward_ended(self) -> None:
        for gradient in list(reversed(self._gradients.values()))[self._next :]:
            gradient.reduce(last=self._last)
        self._next, self._in_backward = 0, False
        for gradient in self._gradients.values():
            gradient.begin()

    # -- state --------------------------------------------------------------------------------------------------

    def holds(self, parameter: Tensor) -> bool:
        """Whether a tensor is one of the parameters that lie in chunks."""
        return parameter in self._names

    def read(self, parameter: Tensor) -> Tensor:
        """This rank's block over the tensor axes of a parameter's true value. All ranks of its chunk's group must call."""
        self.flush()
        name = self._names[parameter]  # type: ignore[index]
        chunk = self._chunk_of[name]
        mine = next((part for part in chunk.slices if part.name == name), None)
        if mine is None:
            stretch = torch.zeros(0, dtype=self.true_dtype(parameter), device=self._placing.device)
        elif self._stepper is not None and chunk in self._gradients:
            stretch = self._stepper.true(name)
        else:
            stretch = chunk.shard[mine.shard_start : mine.shard_start + mine.length]
        return self._join_stretch(name, stretch)

    def true_dtype(self, parameter: Tensor) -> torch.dtype:
        """Of a parameter's true value."""
        chunk = self._chunk_of[self._names[parameter]]  # type: ignore[index]
        trained = self._stepper is not None and chunk in self._gradients
        return self._stepper.true_dtype(chunk) if self._stepper is not None and trained else chunk.dtype

    def write(self, parameter: Tensor, block: Tensor) -> None:
        """Take a parameter's true value, this rank's block over the tensor axes; then ``publish``."""
        self.flush()
        self._fill(self._names[parameter], block)  # type: ignore[index]

    def state_entries(self) -> dict[str, dict[str, Entry]]:
        """What tensors the optimizer has, by parameter name and key. All ranks of the chunks' groups must call."""
        found: dict[str, dict[str, Entry]] = {}
        if self._stepper is None:
            return found
        self.flush()
        for chunk in self._gradients:
            for told in tell_all(self._stepper.entries(chunk), chunk.group, self._placing.device):
                for name, entries in told.items():
                    found.setdefault(name, {}).update({key: Entry(*entry) for key, entry in entries.items()})
        return {name: dict(sorted(found[name].items())) for name in self._known if found.get(name)}

    def read_state(self, name: str, key: str, entry: Entry) -> Tensor:
        """This rank's block over the tensor axes of an optimizer's tensor; a number as it is. The chunk's group must call."""
        stepper, chunk, dtype = self._stepper, self._chunk_of[name], getattr(torch, entry.dtype)
        value = None if stepper is None or stepper.stretch(name) is None else stepper.read(name, key)
        if entry.like:
            return self._join_stretch(name, torch.zeros(0, dtype=dtype) if value is None else value)
        number = torch.full((), -math.inf, dtype=torch.float64) if value is None else value.detach().double()
        return all_reduce(number.to(self._placing.device), chunk.group, "max").to("cpu", dtype)

    def clear_state(self) -> None:
        """Forget the optimizer's state, as if it had not stepped yet."""
        self.flush()
        if self._stepper is not None:
            self._stepper.reset()

    def write_state(self, name: str, key: str, value: Tensor) -> None:
        """Take an optimizer's tensor: this rank's block over the tensor axes, or a number."""
        self.flush()
        if self._stepper is None or self._stepper.stretch(name) is None:
            return
        like = value.dim() > 0 and value.shape == self._known[name].shape
        self._stepper.write(name, key, self._chunk_of[name].cut(name, value) if like else value)

    def _join_stretch(self, name: str, stretch: Tensor) -> Tensor:
        """A parameter's elements from all ranks of its chunk's group, in its shape."""
        chunk = self._chunk_of[name]
        lengths = chunk.lengths(name)
        padded = torch.zeros(max(lengths), dtype=stretch.dtype, device=self._placing.device)
        padded[: stretch.numel()] = stretch
        rows = all_gather(padded[None], chunk.group, 0)
        whole = torch.cat([row[:length] for row, length in zip(rows, lengths, strict=True)])
        return whole.view(self._known[name].shape)

    def close(self) -> None:
        """Take all hooks off, and let go of what only training needs: gradients and the optimizer's state."""
        if self._stepper is not None:
            self.flush()
            self._stepper.close()
        self._runtime.close()
        for handle in self._handles:
            handle.remove()
        self._gradients.clear()
        for chunk in self.chunks:
            chunk.due = None


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
