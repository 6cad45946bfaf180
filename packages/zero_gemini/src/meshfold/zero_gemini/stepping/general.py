"""Any elementwise optimizer of torch: it steps on stretches of the true weights, one a parameter."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from meshfold.zero_gemini.chunk import Chunk
from meshfold.zero_gemini.stepping.base import Entry


class GeneralStepper:
    """See :class:`meshfold.zero_gemini.stepping.base.Stepper`. A parameter without a gradient is left out by torch itself."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, dtype: torch.dtype | None, *, with_state: bool
    ) -> None:
        """Args:
        optimizer: its groups will be given stretches.
        dtype: of the true weights; None: as the model computes.
        with_state: it makes its state as soon as it is made, as Adagrad does.
        """
        self.optimizer, self._dtype = optimizer, dtype
        self._made_with_state = with_state
        self._planes: dict[Chunk, Tensor] = {}
        self._stretches: dict[str, tuple[Chunk, nn.Parameter]] = {}

    def adopt(self, chunk: Chunk, home: torch.device) -> None:
        shard, dtype = chunk.shard, self._dtype or chunk.dtype
        same = shard.dtype == dtype and shard.device.type == home.type
        plane = shard if same else torch.zeros(shard.numel(), dtype=dtype, device=home)
        self._planes[chunk] = plane
        for part in chunk.slices:
            stretch = nn.Parameter(plane[part.shard_start : part.shard_start + part.length])
            self._stretches[part.name] = (chunk, stretch)

    def begin(self) -> None:
        """Make the optimizer anew where it keeps state from the start; its groups have their stretches by now."""
        if self._made_with_state:
            self.optimizer = type(self.optimizer)(self.optimizer.param_groups, **self.optimizer.defaults)

    def stretch(self, name: str) -> nn.Parameter | None:
        return self._stretches[name][1] if name in self._stretches else None

    def true_dtype(self, chunk: Chunk) -> torch.dtype:
        return self._planes[chunk].dtype

    @torch.no_grad()
    def fill(self, name: str, block: Tensor) -> None:
        found = self._stretches.get(name)
        if found is not None:
            chunk, stretch = found
            stretch.copy_(chunk.cut(name, block))
            if self._planes[chunk] is not chunk.shard:
                chunk.fill(name, block)

    def true(self, name: str) -> Tensor:
        return self._stretches[name][1].detach()

    @torch.no_grad()
    def publish(self, chunk: Chunk) -> None:
        if self._planes[chunk] is not chunk.shard:
            chunk.shard.copy_(self._planes[chunk], non_blocking=True)
        chunk.publish()

    def step(self, gradients: Mapping[Chunk, Tensor], scale: float | Tensor, used: set[str]) -> None:
        scaled: dict[Chunk, Tensor] = {}
        for chunk, shard in gradients.items():
            gradient = shard.to(self._planes[chunk].dtype)
            if isinstance(scale, Tensor):
                gradient = gradient * scale.to(gradient)
            elif scale != 1.0:
                gradient = gradient * scale
            scaled[chunk] = gradient
            for part in chunk.slices:
                stretch = gradient[part.shard_start : part.shard_start + part.length]
                self._stretches[part.name][1].grad = stretch if part.name in used else None
        self.optimizer.step()
        for _, stretch in self._stretches.values():
            stretch.grad = None

    def finish(self) -> None:
        pass  # its steps are done at once

    def done_with(self, chunk: Chunk) -> None:
        pass

    def reset(self) -> None:
        self.optimizer.state.clear()
        self.begin()

    def close(self) -> None:
        pass

    def entries(self, chunk: Chunk) -> dict[str, dict[str, Entry]]:
        found = {}
        for part in chunk.slices:
            stretch = self._stretches[part.name][1]
            found[part.name] = {
                key: Entry(
                    value.dim() > 0 and value.shape == stretch.shape, str(value.dtype).removeprefix("torch.")
                )
                for key, value in self.optimizer.state.get(stretch, {}).items()
                if isinstance(value, Tensor)
            }
        return found

    def read(self, name: str, key: str) -> Tensor:
        value: Tensor = self.optimizer.state[self._stretches[name][1]][key]
        return value.detach()

    def write(self, name: str, key: str, value: Tensor) -> None:
        stretch = self._stretches[name][1]
        # torch counts steps on the CPU, whatever the device; other numbers are where the parameter is.
        home = torch.device("cpu") if key == "step" else stretch.device
        self.optimizer.state[stretch][key] = value.to(home, copy=True)
