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

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.mesh import Group, Mesh
from meshfold.mesh.metadata import placed
from meshfold.zero_gemini.backward import Backward
from meshfold.zero_gemini.building import (
    MakeOptimizer,
    give_stretches,
    lay_out_known,
    make_stepper,
    take_parameters,
)
from meshfold.zero_gemini.chunk import Chunk
from meshfold.zero_gemini.contents import Contents
from meshfold.zero_gemini.early import EarlySteps
from meshfold.zero_gemini.errors import ChunkError, OutOfBudget
from meshfold.zero_gemini.faults import Faults
from meshfold.zero_gemini.gradient_flow import GradientFlow
from meshfold.zero_gemini.gradients import ChunkGradient
from meshfold.zero_gemini.layout import ChunkSpec
from meshfold.zero_gemini.members import slot_align
from meshfold.zero_gemini.memory import Memory, Place
from meshfold.zero_gemini.moving import Move, in_turn
from meshfold.zero_gemini.norm import combine, power_sum
from meshfold.zero_gemini.placing import EVERYTHING_ON_THE_DEVICE, Home, Homes
from meshfold.zero_gemini.runtime import Runtime
from meshfold.zero_gemini.sharded_init import sharded_values
from meshfold.zero_gemini.stepping import AdamStepper, DiskSettings, Entry, Stepper
from meshfold.zero_gemini.stepping.passage import Passage
from meshfold.zero_gemini.stepping.planes import planes_of
from meshfold.zero_gemini.trace.workload import ChunkUse
from meshfold.zero_gemini.transfer import synchronize
from meshfold.zero_gemini.units import Unit, find_units


class Gemini:
    """Holds a model in chunks and trains it.

    Attributes:
        chunks: all of them, in order of registration.
        group_names: names of the parameters in each of the optimizer's groups.
        holds_gradients: whether the last step began when all gradients were there; else chunks were stepped as theirs came.
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
        self._chunk_of: dict[str, Chunk] = {}
        self._homes: dict[Chunk, Home] = {}
        self._stepper: Stepper | None = None
        # Ranks with other parameters (stages of a pipeline) have other chunks, and do not come where these come.
        others = {axis for p in model.parameters() for axis in placed(p, mesh).only_at}
        alike = [axis for axis in mesh.names if axis not in others]
        self._faults = Faults(mesh.group(*alike), memory.device)
        self._promised = False  # a step whose outcome the ranks have not told each other yet
        self._gradients: dict[Chunk, ChunkGradient] = {}
        values = values or sharded_values(model, memory.device)
        self._known, first = take_parameters(model, mesh, memory.device, dtype)
        self.group_names: list[list[str]] = []
        self._regime = regime
        if make_optimizer is not None:
            made = make_stepper(
                make_optimizer, self._known, master_dtype=master_dtype, regime=regime, seed=seed, disk=disk, faults=self._faults
            )  # fmt: skip
            self._stepper, self.group_names, self._regime = made.stepper, made.group_names, made.regime
        self._contents = Contents(
            self._chunk_of, {name: known.shape for name, known in self._known.items()}, self._gradients,
            self._stepper, memory.device, self._faults,
        )  # fmt: skip
        laid = [
            *lay_out_known(
                self._known, mesh, chunk_elems=chunk_elems, slot_align_elems=slot_align(self._regime)
            )
        ]
        chosen = iter(self._chosen(homes, [spec for _, specs, _ in laid for spec in specs]))
        for group, specs, slices in laid:
            for spec, mine in zip(specs, slices, strict=True):
                with self._faults.together():
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
        if self._stepper is not None:
            give_stretches(self._stepper, self.group_names)
        self._units = find_units(model)
        self._runtime = Runtime(
            model, self._units, self._chunks_of_unit, prefetch=prefetch, before_evaluation=self.flush
        )
        self._early = (
            EarlySteps(self._stepper, self._runtime, memory)
            if isinstance(self._stepper, AdamStepper)
            else None
        )
        self._flow = GradientFlow(self._gradients, memory.device, self._runtime, self._early)
        if self._early is not None:
            self._runtime.on_left, self._runtime.check = self._early.go, self._early.check
        self.holds_gradients = True
        self._scale: float | Tensor = 1.0
        self._finished = False

    # -- building -----------------------------------------------------------------------------------------------

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
            with self._faults.together():
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

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """Has the groups with their settings, for schedulers; None if there is none."""
        return None if self._stepper is None else self._stepper.optimizer

    def _chunks_of_unit(self, unit: Unit) -> list[Chunk]:
        names = (self._names[parameter] for parameter in unit.parameters)  # type: ignore[index]
        return list(dict.fromkeys(self._chunk_of[name] for name in names if name in self._chunk_of))

    # -- a step -------------------------------------------------------------------------------------------------

    def begin(self, *, last: bool) -> None:
        """Before each micro-step: whether it is the last of an accumulation.

        Raises:
            ChunkError: from when on a step was broken off in the middle, see :meth:`expect`.
        """
        self._check()
        if self._flow.was_broken_off:
            self.abandon()
        if self._finished:
            self.forget()
        self._flow.expect("last" if last else "more")
        self._runtime.begin_step()

    def finish(self, factor: float = 1.0) -> None:
        """After the last backward: gradients are complete, and count times the factor.

        Raises:
            DiskError: on all ranks, if the last step could not be done on one of them, as :meth:`flush` says it.
        """
        self._flow.complete()
        if self._flow.steps_early:
            self._keep_as_they_are(factor == 1.0, f"to count {factor} times")
            self._agree()
        else:
            self.flush()
        self._scale, self._finished = factor, True

    def norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of the whole model's gradient: float64, the same on every rank."""
        if self._flow.steps_early:
            self._faults.check()
        else:
            self.flush()
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
        self._keep_as_they_are(not self._flow.steps_early, "to be clipped")
        norm = self.norm(norm_type)
        self._scale = self._scale * torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        return norm

    def step(self) -> None:
        """Let the optimizer step on every shard, and show the new weights."""
        if self._stepper is None:
            raise ChunkError("this model has no optimizer: give make_optimizer")
        self.holds_gradients = not self._flow.steps_early
        if self.holds_gradients:
            self.flush()
            self._stepper.step(self._flow.shards(), self._scale, self._flow.used())
            for chunk, gradient in self._gradients.items():
                gradient.hand_over(partial(self._stepper.done_with, chunk))
        else:
            self._faults.check()
            self._flow.complete()
            self._agree()
        self._promised = any(chunk.due is not None for chunk in self.chunks)
        self._publish(promised=False)
        if self._early is not None and not self.holds_gradients:
            self._early.end()
        self.forget()

    def expect(self, kind: Backward) -> None:
        """Right before a backward: what it is to the step, where ``begin`` could not know.

        In a ``"final"`` one Adam steps chunks as soon as their gradients are there, and none is held; the norm is known all
        the same, after ``finish``. If it is broken off when some chunks have made the step, all that trains, reads or moves
        the model raises from then on: it is between two steps. Other optimizers step when all gradients are there.
        """
        self._flow.expect(kind)

    @property
    def is_half_stepped(self) -> bool:
        """Whether some chunks have made the step that is under way, and others may not have."""
        return self._early is not None and self._early.is_half

    def _check(self) -> None:
        self._faults.check()
        if self._early is not None:
            self._early.check()

    def _keep_as_they_are(self, yes: bool, what: str) -> None:
        if not yes:
            raise ChunkError(
                f"gradients were {what}, and they were stepped with as they came: say before the backward that it is not 'final'"
            )

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
        self._keep_as_they_are(not self._flow.steps_early, "to be clipped")
        self.flush()
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
        """Let every step that was only promised be done. All ranks must call.

        Raises:
            DiskError: if one could not be on some rank: on all of them, naming the rank and the cause. So does every
                further call: training cannot go on from there.
        """
        self._check()
        if self._stepper is not None:
            self._stepper.finish()
            for chunk in self.chunks:
                chunk.wait_if_resident()
        self._agree()

    def _agree(self) -> None:
        """Raise what the last step has come to, on all ranks; it is done."""
        if self._promised:
            self._promised = False
            self._faults.agree()

    def publish(self) -> None:
        """Show the true weights to the model. All ranks must call; they raise what any could not write."""
        self._faults.agree()
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

    # -- several uses in a step ---------------------------------------------------------------------------------

    @property
    def staying_bytes(self) -> int:
        """Of gathered chunks that nobody computes with, and that wait on the device for their next use in the step.

        All ranks that share chunks must set the same, between steps. Whoever does lets them go before the optimizer steps,
        by :meth:`rest`.
        """
        return self._runtime.staying.most_bytes

    @staying_bytes.setter
    def staying_bytes(self, most: int) -> None:
        self._runtime.staying.most_bytes = most

    def rest(self, *, unlearn: bool = False) -> None:
        """Release all chunks that come and go.

        Args:
            unlearn: what was run since the step began was no part of it.
        """
        self._runtime.rest()
        if unlearn:
            self._runtime.unlearn()

    @contextmanager
    def shapes_only(self) -> Iterator[None]:
        """Around forwards of which only the shapes are wanted, on some of the ranks perhaps: nothing is gathered for them."""
        self.rest()
        self._runtime.is_quiet = True
        for chunk in self.chunks:
            chunk.show_shapes(True)
        try:
            yield
        finally:
            for chunk in self.chunks:
                chunk.show_shapes(False)
            self._runtime.is_quiet = False

    # -- where chunks live --------------------------------------------------------------------------------------

    @property
    def homes(self) -> dict[Chunk, Home]:
        """Where each chunk lives."""
        return dict(self._homes)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know of this rank's files: no direct I/O, what a killed process left and was removed."""
        disk = self._stepper.disk if isinstance(self._stepper, AdamStepper) else None
        return () if disk is None else disk.notes

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

        They go in turns, so that memory does not run out on the way. A chunk that cannot be moved on
        one of the ranks stays where it was on all, and all raise.
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
        moves = [
            self._as_move(chunk, self._at_home(home))
            for chunk, home in homes.items()
            if self._at_home(home) != self._homes[chunk]
        ]
        for move in in_turn(moves):
            self._carry(*move.what)
        self._runtime.reread()

    def pass_through(self, on: bool) -> bool:
        """Let the device step a part of the host's chunks, whose state passes through it: whether it does from now on.

        It takes :data:`~meshfold.zero_gemini.stepping.passage.PASSAGE_BYTES` of the device, and changes no bit. Nothing but
        Adam is stepped so.
        """
        self.flush()
        if not isinstance(self._stepper, AdamStepper):
            return False
        self._stepper.pass_through(None)
        if on:
            try:
                self._stepper.pass_through(Passage(memory=self.memory))
            except OutOfBudget:
                return False
        return on

    def _as_move(self, chunk: Chunk, home: Home) -> Move[tuple[Chunk, Home]]:
        """What it is to the two memories that a chunk changes homes; of the state that torch's optimizers keep, about."""
        elements, width, was = chunk.shard.numel(), chunk.dtype.itemsize, self._homes[chunk]
        state = 0.0
        if chunk in self._gradients:
            planes = planes_of(chunk.dtype, self._regime) if isinstance(self._stepper, AdamStepper) else ()
            state = sum(plane.dtype.itemsize / plane.each for plane in planes) or 2.0 * width

        def more(place: Place) -> int:
            parameters = (home.parameters == place) - (was.parameters == place)
            return round(
                elements * (width * parameters + state * ((home.state == place) - (was.state == place)))
            )

        return Move(what=(chunk, home), device_bytes=more("device"), host_bytes=more("host"))

    def _carry(self, chunk: Chunk, home: Home) -> None:
        """Move a chunk, on all ranks or, if one cannot, on none."""
        was, moved = self._homes[chunk], False
        try:
            with self._faults.together():
                self._move(chunk, home)
                moved = True
        except BaseException:
            if moved:  # here, and not on another rank
                self._move(chunk, was)
            self._runtime.reread()  # chunks before this one have moved
            raise
        self._homes[chunk] = home

    def _move(self, chunk: Chunk, home: Home) -> None:
        if self._stepper is None or chunk not in self._gradients:
            chunk.rehome(home.parameters)
            return
        gradient, was = self._gradients[chunk], self._gradients[chunk].home
        gradient.rehome(home.state)
        try:
            self._stepper.move(chunk, home)
        except BaseException:
            gradient.rehome(was)
            raise

    # -- state --------------------------------------------------------------------------------------------------

    def holds(self, parameter: Tensor) -> bool:
        """Whether a tensor is one of the parameters that lie in chunks."""
        return parameter in self._names

    def read(self, parameter: Tensor) -> Tensor:
        """This rank's block over the tensor axes of a parameter's true value. All ranks of its chunk's group must call.

        What a rank cannot read from its disk is NaN, and :meth:`check` and :meth:`agree` raise then.
        """
        self.flush()
        return self._contents.read(self._name_of(parameter))

    def check(self) -> None:
        """Raise what could not be read or written on this rank since all agreed; in its place NaN was read.

        Readers of many tensors go through the collectives of all, and let the other ranks know then.
        """
        self._faults.check_own()

    def agree(self) -> None:
        """Raise on all ranks what could not be read or written on any. All ranks must call."""
        self._faults.agree()

    def true_dtype(self, parameter: Tensor) -> torch.dtype:
        """Of a parameter's true value."""
        return self._contents.true_dtype(self._name_of(parameter))

    def write(self, parameter: Tensor, block: Tensor) -> None:
        """Take a parameter's true value, this rank's block over the tensor axes; then ``publish``."""
        self.flush()
        self._faults.keep(partial(self._contents.fill, self._name_of(parameter), block))

    def state_entries(self) -> dict[str, dict[str, Entry]]:
        """What tensors the optimizer has, by parameter name and key. All ranks of the chunks' groups must call."""
        self.flush()
        return self._contents.state_entries()

    def read_state(self, name: str, key: str, entry: Entry) -> Tensor:
        """This rank's block over the tensor axes of an optimizer's tensor; a number as it is. The chunk's group must call."""
        return self._contents.read_state(name, key, entry)

    def kept(self, parameter: Tensor) -> range:
        """Which elements this rank alone of its chunk's group keeps: of its block over the tensor axes, row by row."""
        return self._contents.kept(self._name_of(parameter))

    def read_kept(self, parameter: Tensor) -> Tensor:
        """These elements of a parameter's true value, flat; good until the next step. After ``flush``, no communication.

        Raises:
            DiskError: if they cannot be read.
        """
        return self._contents.read_kept(self._name_of(parameter))

    def read_kept_state(self, name: str, key: str) -> Tensor:
        """Likewise of an optimizer's tensor; a number as it is."""
        return self._contents.read_kept_state(name, key)

    def axes_over(self, parameter: Tensor) -> tuple[str, ...]:
        """The axes whose ranks share a parameter's chunk."""
        return self._chunk_of[self._name_of(parameter)].group.axes

    def is_on_disk(self, parameter: Tensor) -> bool:
        """Whether the optimizer's state of a parameter lives on disk."""
        chunk = self._chunk_of[self._name_of(parameter)]
        return chunk in self._gradients and self._homes[chunk].state == "disk"

    def clear_state(self) -> None:
        """Forget the optimizer's state, as if it had not stepped yet."""
        self.flush()
        if self._stepper is not None:
            self._faults.keep(self._stepper.reset)

    def write_state(self, name: str, key: str, value: Tensor) -> None:
        """Take an optimizer's tensor: this rank's block over the tensor axes, or a number."""
        self.flush()
        self._faults.keep(partial(self._contents.write_state, name, key, value))

    def _name_of(self, parameter: Tensor) -> str:
        return self._names[parameter]  # type: ignore[index]

    def close(self) -> None:
        """Take all hooks off, and let go of what only training needs: gradients and the optimizer's state."""
        try:
            if self._stepper is not None and not self._faults.told and not self.is_half_stepped:
                self.flush()
        finally:  # also if a step that was promised failed
            self._runtime.close()
            self._flow.close()
            self._gradients.clear()
            if self._stepper is not None:
                self._stepper.close()
            for chunk in self.chunks:
                chunk.due = None
