"""Adam's state by parameter name, read and written: master weights, moments, step counts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from meshfold.mesh.parameters import StoredValue
from meshfold.zero_gemini.chunks.chunk import Chunk
from meshfold.zero_gemini.optimizer.adam_state import Held
from meshfold.zero_gemini.optimizer.interface import Entry
from meshfold.zero_gemini.optimizer.master_weights import MOMENTS
from meshfold.zero_gemini.optimizer.state_tree import AdamSnapshot


class AdamValues(ABC):
    """The part of :class:`~meshfold.zero_gemini.optimizer.adam.AdamStepper` that reads and writes checkpoints."""

    _held: dict[Chunk, Held]
    _chunks: dict[str, Chunk]  # by name
    _steps: dict[str, int]  # step count by parameter

    @abstractmethod
    def _wait(self) -> None:
        """Wait until no thread works on any chunk."""

    @abstractmethod
    def drop_speculative(self) -> None:
        """Drop speculative steps since the last step: the state they started from has changed."""

    def optimizer_parameter(self, name: str) -> nn.Parameter | None:
        return self._held[self._chunks[name]].weights.parameters[name] if name in self._chunks else None

    def master_dtype(self, chunk: Chunk) -> torch.dtype:
        return torch.float32

    @torch.no_grad()
    def fill(self, name: str, block: Tensor) -> None:
        if name not in self._chunks:
            return
        self.drop_speculative()
        held, (begin, end) = self._idle(name), self._range(name)
        weights = held.weights.tensor[begin:end]
        # Split on the values' device: only half the bytes are copied, directly to page-locked memory, and the device never waits.
        values = held.chunk.cut(name, block).float().contiguous()
        if weights.dtype == torch.float32:
            weights.copy_(values)
        else:
            for _, a, z, state in held.sections([(begin, end)], change=True):
                state.load_master(values[a - begin : z - begin])
        if not held.weights.are_shard:
            held.chunk.shard[begin:end].copy_(weights)

    def master(self, name: str) -> Tensor:
        held, (begin, end) = self._idle(name), self._range(name)
        if held.chunk.dtype == torch.float32:
            return held.weights.tensor[begin:end]
        return _joined(state.master(copy=True) for _, _, _, state in held.sections([(begin, end)], change=False))

    @torch.no_grad()
    def reset(self) -> None:
        self.drop_speculative()
        self._wait()
        self._steps = dict.fromkeys(self._steps, 0)
        for chunk, held in self._held.items():
            for _, _, _, state in held.sections([(0, chunk.shard.numel())], change=True):
                state.zero_moments()

    def entries(self, chunk: Chunk) -> dict[str, dict[str, Entry]]:
        like = dict.fromkeys(MOMENTS, Entry(True, "float32"))
        return {part.name: {**like, "step": Entry(False, "float32")} for part in chunk.slices if self._steps[part.name]}

    def read(self, name: str, key: str) -> Tensor:
        if key == "step":
            return torch.tensor(float(self._steps[name]))
        held = self._idle(name)
        return _joined(state.moment(key) for _, _, _, state in held.sections([self._range(name)], change=False))

    def parts(self, name: str, key: str | None) -> StoredValue:
        held = self._idle(name)
        if key == "step":
            return StoredValue((self.read(name, key),))
        if held.place == "disk":
            return StoredValue((self.master(name) if key is None else self.read(name, key),))
        return held.snapshot().parts(*self._range(name), key)

    def snapshot(self) -> AdamSnapshot | None:
        """Return views of all state, valid until the next step or move; None if some of it is on a disk."""
        self._wait()
        if any(held.place == "disk" for held in self._held.values()):
            return None
        chunks = {chunk: held.snapshot() for chunk, held in self._held.items()}
        return AdamSnapshot(chunks=chunks, chunk_of=self._chunks, steps=dict(self._steps))

    @torch.no_grad()
    def write(self, name: str, key: str, value: Tensor) -> None:
        self.drop_speculative()
        if key == "step":
            self._steps[name] = int(value)
        elif key in MOMENTS:
            held, (begin, end) = self._idle(name), self._range(name)
            for _, a, z, state in held.sections([(begin, end)], change=True):
                state.load_moment(key, value.reshape(-1)[a - begin : z - begin])

    def _idle(self, name: str) -> Held:
        """Wait for the work on a parameter's chunk and return its state."""
        self._wait()
        return self._held[self._chunks[name]]

    def _range(self, name: str) -> tuple[int, int]:
        return self._chunks[name].span(name)


def _joined(parts: Iterable[Tensor]) -> Tensor:
    found = list(parts)
    return found[0] if len(found) == 1 else torch.cat(found)
