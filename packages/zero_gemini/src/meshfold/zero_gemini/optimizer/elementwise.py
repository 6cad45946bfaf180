"""Any elementwise torch optimizer, which steps slices of the master weights, one per parameter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from meshfold.mesh.parameters import StoredValue, number_keys
from meshfold.zero_gemini.chunks.chunk import Chunk
from meshfold.zero_gemini.chunks.placement import ChunkPlacement
from meshfold.zero_gemini.errors import MemoryPlanError
from meshfold.zero_gemini.memory.arena import Arena, Block, MemoryTier
from meshfold.zero_gemini.optimizer.interface import Entry, StepsAtOnce
from meshfold.zero_gemini.optimizer.master_weights import Weights


class GeneralStepper(StepsAtOnce):
    """See :class:`meshfold.zero_gemini.optimizer.interface.Stepper`. A parameter without a gradient is left out by torch itself.

    The optimizer makes its own state, which is accounted for once it exists. It steps all parameters in one call, so their
    gradients are held until then, even without clipping.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, dtype: torch.dtype | None, *, with_state: bool) -> None:
        """Args:
        optimizer: its groups get this rank's slices as parameters.
        dtype: of the master weights; None: as the model computes.
        with_state: the optimizer makes its state at construction, as Adagrad does.
        """
        self.optimizer, self._dtype = optimizer, dtype
        self._made_with_state = with_state
        self._weights: dict[Chunk, Weights] = {}
        self._chunks: dict[str, Chunk] = {}
        self._counted: dict[nn.Parameter, dict[str, Block]] = {}
        self._number_keys: frozenset[str] = frozenset()

    def reserve(self, shards: Iterable[tuple[torch.dtype, int]]) -> None:
        if any(True for _ in shards):
            self._possible("disk")

    def adopt(self, chunk: Chunk, place: MemoryTier) -> None:
        self._weights[chunk] = Weights(chunk, self._dtype or chunk.dtype, self._possible(place))
        self._chunks.update((part.name, chunk) for part in chunk.slices)

    def move(self, chunk: Chunk, placement: ChunkPlacement) -> None:
        weights = self._weights[chunk]
        place, was = self._possible(placement.state), weights.place
        self._carry(chunk, place)
        try:
            weights.move(place, placement.parameters)
        except BaseException:
            self._carry(chunk, was)
            raise

    def _possible(self, place: MemoryTier) -> MemoryTier:
        if place == "disk":
            raise MemoryPlanError(
                f"the state of {type(self.optimizer).__name__} cannot be on disk, only that of adam and adamw can: use one "
                "of them, or keep it on the host (placement='cpu')"
            )
        return place

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
        return self._weights[chunk].dtype

    @torch.no_grad()
    def fill(self, name: str, block: Tensor) -> None:
        if name in self._chunks:
            chunk = self._chunks[name]
            weights = self._weights[chunk]
            weights.parameters[name].copy_(chunk.cut(name, block))
            if not weights.are_shard:
                chunk.fill(name, block)

    def master(self, name: str) -> Tensor:
        return self._weights[self._chunks[name]].parameters[name].detach()

    def publish(self, chunk: Chunk) -> None:
        self._weights[chunk].show()
        chunk.publish()

    def step(self, gradients: Mapping[Chunk, Tensor], scale: float | Tensor, used: set[str]) -> None:
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
        self.optimizer.step()
        for weights in self._weights.values():
            for parameter in weights.parameters.values():
                parameter.grad = None
        self._count_state()

    def reset(self) -> None:
        self.optimizer.state.clear()
        self._count_state()
        self.begin()
        if any(one.numel() == 1 for weights in self._weights.values() for one in weights.parameters.values()):
            self._number_keys = number_keys(self.optimizer)

    def close(self) -> None:
        """Release all memory."""
        self.optimizer.state.clear()
        self._count_state()
        for weights in self._weights.values():
            weights.free()

    def entries(self, chunk: Chunk) -> dict[str, dict[str, Entry]]:
        return {
            name: {
                key: Entry(_is_like(value, parameter), str(value.dtype).removeprefix("torch."))
                for key, value in self._tensors(parameter)
            }
            for name, parameter in self._weights[chunk].parameters.items()
        }

    def read(self, name: str, key: str) -> Tensor:
        value: Tensor = self.optimizer.state[self.optimizer_parameter(name)][key]  # type: ignore[index]
        return value.detach()

    def parts(self, name: str, key: str | None) -> StoredValue:
        return StoredValue((self.master(name) if key is None else self.read(name, key),))

    def write(self, name: str, key: str, value: Tensor) -> None:
        parameter = self._weights[self._chunks[name]].parameters[name]
        # torch keeps step counts on the CPU; other numbers are on the parameter's device.
        placement = torch.device("cpu") if key == "step" else parameter.device
        if not value.dim() and parameter.numel() == 1 and key not in self._number_keys:
            value = value.reshape(1)  # a scalar parameter's moment, flat like its slice
        self.optimizer.state[parameter][key] = value.to(placement, copy=True)
        self._count_one(self._weights[self._chunks[name]], parameter)

    def _tensors(self, parameter: nn.Parameter) -> Iterator[tuple[str, Tensor]]:
        for key, value in [*self.optimizer.state.get(parameter, {}).items()]:
            if isinstance(value, Tensor):
                yield key, value

    def _count_state(self) -> None:
        """Count the state that exists now, and stop counting state that is gone.

        Raises:
            OutOfBudget: if the optimizer took more than was left.
        """
        for weights in self._weights.values():
            for parameter in weights.parameters.values():
                self._count_one(weights, parameter)

    def _count_one(self, weights: Weights, parameter: nn.Parameter) -> None:
        counted = self._counted.setdefault(parameter, {})
        found = {key: value for key, value in self._tensors(parameter) if _is_like(value, parameter)}
        for key, block in [*counted.items()]:
            if found.get(key) is not block.tensor:
                counted.pop(key).free()
        for key, value in found.items():
            if key not in counted:
                counted[key] = weights.chunk.memory.arena(weights.place).count(value, "optimizer state")


def _is_like(value: Tensor, parameter: Tensor) -> bool:
    return value.dim() > 0 and value.shape == parameter.shape
