"""Any elementwise torch optimizer, which steps slices of the master weights, one per parameter.

State on disk is stepped in pieces by :mod:`meshfold.zero_gemini.optimizer.disk_steps`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from meshfold.mesh.parameters import OptimizerProbeError, StoredValue, number_keys, state_layout
from meshfold.zero_gemini.chunks.chunk import Chunk
from meshfold.zero_gemini.chunks.placement import ChunkPlacement
from meshfold.zero_gemini.errors import Faults, MemoryPlanError
from meshfold.zero_gemini.memory.arena import Arena, Block, MemoryTier
from meshfold.zero_gemini.optimizer.disk_chunks import MASTER, ChunkOnDisk
from meshfold.zero_gemini.optimizer.disk_state import DiskSettings
from meshfold.zero_gemini.optimizer.disk_steps import DiskSteps
from meshfold.zero_gemini.optimizer.interface import Entry, StepsAtOnce
from meshfold.zero_gemini.optimizer.kernel_runs import StepKind, StepTimer, StepTiming
from meshfold.zero_gemini.optimizer.master_weights import Weights
from meshfold.zero_gemini.optimizer.steps_in_backward import StepsInBackward
from meshfold.zero_gemini.optimizer.written_copies import WrittenCopies


class GeneralStepper(StepsAtOnce):
    """See :class:`meshfold.zero_gemini.optimizer.interface.Stepper`. A parameter without a gradient is left out by torch itself.

    The optimizer makes its own state, which is accounted for once it exists. With a disk it steps chunk by chunk in the backward if
    nothing needs all gradients before (:attr:`early`). Else it steps all parameters in one call, and gradients are held until then.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        dtype: torch.dtype | None,
        *,
        with_state: bool,
        disk: DiskSettings | None = None,
        faults: Faults | None = None,
    ) -> None:
        """Args:
        optimizer: its groups get this rank's slices as parameters.
        dtype: of the master weights; None: as the model computes.
        with_state: the optimizer makes its state at construction, as Adagrad does.
        disk: where state on disk is stored; None: no state is on disk.
        faults: keeps errors of the disk until all ranks agree; None: this rank is alone.
        """
        self.optimizer, self._dtype = optimizer, dtype
        self._made_with_state = with_state
        self._weights: dict[Chunk, Weights] = {}
        self._chunks: dict[str, Chunk] = {}
        self._counted: dict[nn.Parameter, dict[str, Block]] = {}
        self._number_keys: frozenset[str] = frozenset()
        self._state_bytes: dict[torch.dtype, float] = {}
        self._faults, self._timings = faults or Faults(), StepTimer()
        self.disk: DiskSteps | None = None
        if disk is not None:
            self.disk = DiskSteps(optimizer, disk, dtype, self._faults, self._timings, with_state=with_state)
        self._early: StepsInBackward | None = None
        self._copies = WrittenCopies(optimizer)

    @property
    def early(self) -> StepsInBackward | None:
        """Steps of single chunks during the backward, of a model whose chunks are all adopted.

        None without a disk, for an optimizer that needs norms, and for one whose step changes more than its state.
        """
        norms = getattr(self.optimizer, "sight", None) == "norms"
        dtypes = {chunk.dtype for chunk in self._weights}
        if self._early is None and self.disk is not None and not norms and self.disk.steps_one_by_one(dtypes):
            self._early = StepsInBackward(
                self.optimizer, self.disk, self._weights, self._faults, self._timings, self._count_chunk
            )
        return self._early

    def reserve(self, shards: Iterable[tuple[torch.dtype, int]]) -> None:
        """Reserve room on disk for chunks that are about to be adopted on, or moved to, disk.

        Args:
            shards: for each chunk the dtype that the model computes in, and the elements of its shard.

        Raises:
            DiskError: if there is less room, or the folder cannot be used; nothing has changed then.
            MemoryPlanError: if there are some and no folder was named, or the optimizer cannot step in pieces.
        """
        wanted = list(shards)
        if wanted:
            self._steps_on_disk(f"{len(wanted)} chunks").reserve(wanted)

    def _steps_on_disk(self, what: str) -> DiskSteps:
        if self.disk is None:
            raise MemoryPlanError(
                f"the optimizer state of {what} is planned for disk, but no folder is given: set offload_path"
            )
        return self.disk

    def _on_disk(self, name: str) -> ChunkOnDisk | None:
        return None if self.disk is None else self.disk.held.get(self._chunks[name])

    def adopt(self, chunk: Chunk, place: MemoryTier) -> None:
        if place == "disk" and self._steps_on_disk(str(chunk)).planes_of(chunk.dtype):
            self._adopt_on_disk(self._steps_on_disk(str(chunk)), chunk)
        else:
            self._weights[chunk] = Weights(chunk, self.master_dtype(chunk), place)
        self._chunks.update((part.name, chunk) for part in chunk.slices)

    def _adopt_on_disk(self, disk: DiskSteps, chunk: Chunk) -> None:
        weights = Weights(chunk, chunk.dtype, "disk")
        try:
            disk.held[chunk] = disk.take(chunk, weights)
        except BaseException:
            weights.free()
            raise
        self._weights[chunk] = weights

    def move(self, chunk: Chunk, placement: ChunkPlacement) -> None:
        self.finish()
        held = None if self.disk is None else self.disk.held.get(chunk)
        to_disk = placement.state == "disk" and bool(self._steps_on_disk(str(chunk)).planes_of(chunk.dtype))
        if held is not None and not to_disk:
            self._read_in(held, placement)
        elif held is None and to_disk:
            self._write_out(chunk, placement)
        elif held is not None:
            held.weights.move("disk", placement.parameters)
        else:
            self._move_in_memory(chunk, placement)

    def _move_in_memory(self, chunk: Chunk, placement: ChunkPlacement) -> None:
        weights = self._weights[chunk]
        place, was = placement.state, weights.place
        self._carry(chunk, place)
        try:
            weights.move(place, placement.parameters)
        except BaseException:
            self._carry(chunk, was)
            raise

    @torch.no_grad()
    def _write_out(self, chunk: Chunk, placement: ChunkPlacement) -> None:
        """Move a chunk's state, and master weights of another dtype than the model's, to disk."""
        disk, weights = self._steps_on_disk(str(chunk)), self._weights[chunk]
        state = {name: dict(self._alike(p)) for name, p in weights.parameters.items()}
        disk.check_keys(chunk.dtype, {key for found in state.values() for key in found})
        held = disk.take(chunk, weights)
        try:
            for a, z, views in disk.views(held, 0, chunk.shard.numel(), change=True, now=True):
                if held.is_wide:
                    views[MASTER].copy_(weights.tensor[a:z])
                for part in chunk.slices:
                    start, end = max(a, part.shard_start), min(z, part.shard_start + part.length)
                    for key, value in state[part.name].items() if start < end else ():
                        views[key][start - a : end - a].copy_(value[start - part.shard_start : end - part.shard_start])
            disk.disk.ring.flush()
            weights.move("disk", placement.parameters, chunk.dtype)
        except BaseException:
            disk.give_back(held)
            raise
        held.present = {name: set(found) for name, found in state.items() if found}
        disk.held[chunk] = held
        for name, parameter in weights.parameters.items():
            for key in state[name]:
                del self.optimizer.state[parameter][key]
            self._count_one(weights, parameter)

    @torch.no_grad()
    def _read_in(self, held: ChunkOnDisk, placement: ChunkPlacement) -> None:
        """Move a chunk's state from disk to memory."""
        assert self.disk is not None  # it is held there
        chunk, weights, arena = held.chunk, held.weights, held.chunk.memory.arena(placement.state)
        dtypes, was = {plane.name: plane.dtype for plane in held.planes}, chunk.tier
        blocks: dict[tuple[str, str], Block] = {}
        moved = False
        try:
            for part in chunk.slices:
                for key in held.present.get(part.name, ()):
                    blocks[part.name, key] = arena.allocate(part.length, dtypes[key], "optimizer state")
            weights.move(placement.state, placement.parameters, self.master_dtype(chunk))
            moved = True
            self.disk.disk.ring.expect(held.pieces)
            for a, z, views in self.disk.views(held, 0, chunk.shard.numel(), change=False):
                if held.is_wide:
                    weights.tensor[a:z].copy_(views[MASTER])
                for part in chunk.slices:
                    start, end = max(a, part.shard_start), min(z, part.shard_start + part.length)
                    for key in held.present.get(part.name, ()) if start < end else ():
                        into = blocks[part.name, key].tensor
                        into[start - part.shard_start : end - part.shard_start].copy_(views[key][start - a : end - a])
        except BaseException:
            for block in blocks.values():
                block.free()
            if moved:
                weights.move("disk", was, chunk.dtype)
            raise
        for (name, key), block in blocks.items():
            parameter = weights.parameters[name]
            self.optimizer.state[parameter][key] = block.tensor
            self._counted.setdefault(parameter, {})[key] = block
        self.disk.give_back(held)

    def _carry(self, chunk: Chunk, place: MemoryTier) -> None:
        """Move a chunk's optimizer state to a tier, one tensor at a time."""
        arena, moved = chunk.memory.arena(place), []
        try:
            for parameter in self._weights[chunk].parameters.values():
                for key, value in self._tensors(parameter):
                    old = self._counted.get(parameter, {}).get(key)
                    before = None if old is None else old.arena
                    if before is not None and before is not arena:
                        self._replace(parameter, key, arena)
                        moved.append((parameter, key, before))
                    elif old is None and key != "step":  # torch keeps step counts on the CPU
                        self.optimizer.state[parameter][key] = value.to(arena.device)
        except BaseException:
            for parameter, key, before in moved:
                self._replace(parameter, key, before)
            raise

    def _replace(self, parameter: nn.Parameter, key: str, arena: Arena) -> None:
        """Copy an optimizer tensor to an arena, and drop the old one."""
        old = self._counted[parameter][key]
        new = arena.allocate(old.tensor.numel(), old.tensor.dtype, old.purpose)
        new.tensor.copy_(old.tensor)
        self.optimizer.state[parameter][key], self._counted[parameter][key] = new.tensor, new
        old.free()

    def optimizer_parameter(self, name: str) -> nn.Parameter | None:
        return self._weights[self._chunks[name]].parameters[name] if name in self._chunks else None

    def master_dtype(self, chunk: Chunk) -> torch.dtype:
        return self._dtype or chunk.dtype

    @torch.no_grad()
    def fill(self, name: str, block: Tensor) -> None:
        if name in self._chunks:
            chunk, held = self._chunks[name], self._on_disk(name)
            weights = self._weights[chunk]
            if self.disk is not None and held is not None and held.is_wide:
                self.disk.write(held, name, MASTER, chunk.cut(name, block))
            weights.parameters[name].copy_(chunk.cut(name, block))
            if not weights.are_shard:
                chunk.fill(name, block)

    def master(self, name: str) -> Tensor:
        held = self._on_disk(name)
        if self.disk is not None and held is not None and held.is_wide:
            return self.disk.read(held, name, MASTER)
        return self._weights[self._chunks[name]].parameters[name].detach()

    def publish(self, chunk: Chunk) -> None:
        if not self._copies.take(chunk):
            self._weights[chunk].show()
        chunk.publish()

    def step(self, gradients: Mapping[Chunk, Tensor], scale: float | Tensor, used: set[str]) -> None:
        if self.disk is None or not self.disk.held:
            self._step_in_memory(gradients, scale, used)
            return
        here = {chunk: shard for chunk, shard in gradients.items() if chunk not in self.disk.held}
        self.disk.step(gradients, scale, used, lambda: self._step_in_memory(here, scale, used))

    def _step_in_memory(self, gradients: Mapping[Chunk, Tensor], scale: float | Tensor, used: set[str]) -> None:
        for chunk, shard in gradients.items():
            weights = self._weights[chunk]
            gradient = shard.to(weights.dtype)
            if isinstance(scale, Tensor):
                gradient = gradient * scale.to(gradient)
            elif scale != 1.0:
                gradient = gradient * scale
            for part in chunk.slices:
                grad = gradient[part.shard_start : part.shard_start + part.length]
                weights.parameters[part.name].grad = grad if part.name in used else None
        with self._copies.writing(self._weights.values()):
            self.optimizer.step()
        for weights in self._weights.values():
            for parameter in weights.parameters.values():
                parameter.grad = None
        self._count_state()

    def finish(self) -> None:
        """Finish steps of a backward, and wait until state is on the disk."""
        succeeded = self._early is None or self._early.finish()
        if self.disk is not None and succeeded:
            self._faults.keep(self.disk.disk.ring.settle)

    def steps_in_background(self, chunk: Chunk) -> bool:
        """Return True for a chunk off the device, if chunks are stepped during the backward."""
        return self._early is not None and chunk in self._weights and self._weights[chunk].place != "device"

    def done_with(self, chunk: Chunk) -> None:
        """Wait until the step of a chunk has read its gradient."""
        if self._early is not None:
            self._early.done_with(chunk)

    def state_bytes(self, dtype: torch.dtype) -> float:
        """Return the bytes an element of what the optimizer keeps, found by trying it out, and of wider master weights."""
        if dtype not in self._state_bytes:
            master = self._dtype or dtype
            try:
                like = state_layout(self.optimizer, master, with_state=self._made_with_state).like
            except OptimizerProbeError:
                return super().state_bytes(dtype)
            kept = sum(one.itemsize for one in like.values())
            self._state_bytes[dtype] = float(kept + (master.itemsize if master != dtype else 0))
        return self._state_bytes[dtype]

    @property
    def notes(self) -> tuple[str, ...]:
        return () if self.disk is None else self.disk.disk.notes

    def take_timings(self) -> dict[StepKind, StepTiming]:
        """Return timings of steps of state on disk."""
        return self._timings.take()

    def reset(self) -> None:
        self.optimizer.state.clear()
        if self.disk is not None:
            for held in self.disk.held.values():
                held.present.clear()
        self._count_state()
        self.begin()
        if any(one.numel() == 1 for weights in self._weights.values() for one in weights.parameters.values()):
            self._number_keys = number_keys(self.optimizer)

    def begin(self) -> None:
        if self.disk is None or not self.disk.held or not self._made_with_state:
            super().begin()
            return
        away = {p for held in self.disk.held.values() for p in held.weights.parameters.values()}
        all_params = [group["params"] for group in self.optimizer.param_groups]
        for group, params in zip(self.optimizer.param_groups, all_params, strict=True):
            group["params"] = [parameter for parameter in params if parameter not in away]
        super().begin()
        for group, params in zip(self.optimizer.param_groups, all_params, strict=True):
            group["params"] = params
        self.disk.make_state()

    def close(self) -> None:
        """Release all memory, and remove the files on disk.

        Raises:
            DiskError: if state could not be written and that was not reported yet.
        """
        reported = self._faults.is_reported or (self._early is not None and self._early.failed)
        try:
            self.finish()
        except Exception:
            if not reported:
                raise
        finally:
            if self._early is not None:
                self._early.close()
            self.optimizer.state.clear()
            self._count_state()
            for weights in self._weights.values():
                weights.free()
            if self.disk is not None:
                self.disk.close()

    def entries(self, chunk: Chunk) -> dict[str, dict[str, Entry]]:
        held = None if self.disk is None else self.disk.held.get(chunk)
        away = {} if held is None else {plane.name: _named(plane.dtype) for plane in held.planes}
        found: dict[str, dict[str, Entry]] = {}
        for name, parameter in self._weights[chunk].parameters.items():
            like = {} if held is None else {key: Entry(True, away[key]) for key in sorted(held.present.get(name, ()))}
            here = {
                key: Entry(held is None and _is_like(value, parameter), _named(value.dtype))
                for key, value in self._tensors(parameter)
            }
            found[name] = like | here
        return found

    def read(self, name: str, key: str) -> Tensor:
        held = self._on_disk(name)
        if self.disk is not None and held is not None and key in held.present.get(name, ()):
            return self.disk.read(held, name, key)
        value: Tensor = self.optimizer.state[self.optimizer_parameter(name)][key]  # type: ignore[index]
        return value.detach()

    def parts(self, name: str, key: str | None) -> StoredValue:
        return StoredValue((self.master(name) if key is None else self.read(name, key),))

    def write(self, name: str, key: str, value: Tensor) -> None:
        held, parameter = self._on_disk(name), self._weights[self._chunks[name]].parameters[name]
        if self.disk is not None and held is not None and any(plane.name == key for plane in held.planes):
            self.disk.write(held, name, key, value)
            return
        if self.disk is not None and held is not None and value.numel() > 1:
            self.disk.check_keys(held.chunk.dtype, {key})
        # torch keeps step counts on the CPU; other numbers are on the parameter's device.
        placement = torch.device("cpu") if key == "step" else parameter.device
        if not value.dim() and parameter.numel() == 1 and key not in self._number_keys:
            value = value.reshape(1)  # a scalar parameter's moment, flat like its slice
        self.optimizer.state[parameter][key] = value.to(placement, copy=True)
        self._count_one(self._weights[self._chunks[name]], parameter)

    def _alike(self, parameter: nn.Parameter) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that have the parameter's shape."""
        yield from ((key, value) for key, value in self._tensors(parameter) if _is_like(value, parameter))

    def _tensors(self, parameter: nn.Parameter) -> Iterator[tuple[str, Tensor]]:
        for key, value in [*self.optimizer.state.get(parameter, {}).items()]:
            if isinstance(value, Tensor):
                yield key, value

    def _count_state(self) -> None:
        """Count the state that exists now, and stop counting state that is gone.

        Raises:
            OutOfBudget: if the optimizer took more than was left.
        """
        for chunk in self._weights:
            self._count_chunk(chunk)

    def _count_chunk(self, chunk: Chunk) -> None:
        for parameter in self._weights[chunk].parameters.values():
            self._count_one(self._weights[chunk], parameter)

    def _count_one(self, weights: Weights, parameter: nn.Parameter) -> None:
        counted = self._counted.setdefault(parameter, {})
        found = dict(self._alike(parameter))
        for key, block in [*counted.items()]:
            if found.get(key) is not block.tensor:
                counted.pop(key).free()
        for key, value in found.items():
            if key not in counted:
                counted[key] = weights.chunk.memory.arena(weights.place).count(value, "optimizer state")


def _is_like(value: Tensor, parameter: Tensor) -> bool:
    return value.dim() > 0 and value.shape == parameter.shape


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
