"""Adam on whole chunks, with the kernels of :mod:`meshfold.kernels`: numba for chunks on the host, Triton on the device.

What is kept of a parameter, in bytes with the one the model computes with:

========= ========= ================================================================== =====
model     regime    true weights and moments                                           bytes
========= ========= ================================================================== =====
float32   A         the parameter; float32                                             12
bfloat16  A         split master (bfloat16 and int16, exact); float32                  12
bfloat16  B         split master; bfloat16, rounded stochastically                      8
bfloat16  C         split master; 8 bits and a scale every 256 elements                6.03
float16   A         float32; float32                                                   14
========= ========= ================================================================== =====

Neighbours that are used alike are stepped in one run of the kernel, the padding between them included (it is zero and
stays so).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.kernels import (
    AdamSettings,
    AdamState,
    QuantizedState,
    SplitState,
    WholeState,
    adam_step,
    adam_update_moments,
    adam_update_parameters,
    join_master,
    split_master,
)
from meshfold.zero_gemini.chunk import Chunk
from meshfold.zero_gemini.errors import MemoryPlanError
from meshfold.zero_gemini.stepping.base import Entry
from meshfold.zero_gemini.stepping.worker import Worker
from meshfold.zero_gemini.transfer import host_empty

REGIMES = ("A", "B", "C")
_MOMENTS = ("exp_avg", "exp_avg_sq")
_PLAIN = ("amsgrad", "maximize", "capturable", "differentiable")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def suits(optimizer: torch.optim.Optimizer, dtype: torch.dtype, true_dtype: torch.dtype) -> bool:
    """Whether our Adam computes what a torch optimizer would: Adam or AdamW without extras, in float32 throughout."""
    return (
        type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
        and dtype in _FLOATS
        and true_dtype == torch.float32
        and not any(group.get(key) for group in optimizer.param_groups for key in _PLAIN)
        and not any(isinstance(group["lr"], Tensor) for group in optimizer.param_groups)
    )


class AdamStepper:
    """See :class:`meshfold.zero_gemini.stepping.base.Stepper`."""

    def __init__(self, optimizer: torch.optim.Optimizer, regime: str, seed: int) -> None:
        """Args:
        optimizer: an Adam or AdamW of torch, for its groups and settings; it never steps itself.
        regime: ``"A"``, ``"B"`` or ``"C"``.
        seed: of stochastic rounding.
        """
        self.optimizer, self._regime, self._seed = optimizer, regime, seed
        self._states: dict[Chunk, AdamState] = {}
        self._first: dict[Chunk, int] = {}  # global number of the shard's first element
        self._elements = 0
        self._steps: dict[str, int] = {}
        self._worker = Worker()
        self._beside: set[Chunk] = set()  # chunks that the host steps while the device computes
        self._stretches: dict[str, tuple[Chunk, nn.Parameter]] = {}

    def adopt(self, chunk: Chunk, home: torch.device) -> None:
        if self._regime != "A" and chunk.dtype != torch.bfloat16:
            raise MemoryPlanError(
                f"regime {self._regime!r} is for models in bfloat16, and this one computes in {chunk.dtype}: use "
                "precision='bf16', or regime='A'"
            )
        shard = chunk.shard
        same = shard.device.type == home.type
        weights = shard if same else host_empty(shard.numel(), shard.dtype, home, shard.device).zero_()
        self._states[chunk] = _fresh(weights, self._regime)
        self._first[chunk] = self._elements + chunk.group.index * shard.numel()
        self._elements += chunk.spec.size_elems
        if home != chunk.device:
            self._beside.add(chunk)
            chunk.due = lambda: self._settle(chunk)
        for part in chunk.slices:
            stretch = nn.Parameter(weights[part.shard_start : part.shard_start + part.length])
            self._stretches[part.name] = (chunk, stretch)
            self._steps[part.name] = 0

    def stretch(self, name: str) -> nn.Parameter | None:
        return self._stretches[name][1] if name in self._stretches else None

    def true_dtype(self, chunk: Chunk) -> torch.dtype:
        return torch.float32

    @torch.no_grad()
    def fill(self, name: str, block: Tensor) -> None:
        if name not in self._stretches:
            return
        chunk, weights = self._stretches[name]
        values = chunk.cut(name, block).to(weights.device, torch.float32).contiguous()
        state = self._part(name)
        if isinstance(state, WholeState):
            state.parameter.copy_(values)
            state.weights.copy_(values)
        else:
            hi, lo = split_master(values)
            state.hi.copy_(hi)
            state.lo.copy_(lo)
        if self._states[chunk].weights is not chunk.shard:
            a, b = self._range(name)
            chunk.shard[a:b].copy_(state.weights)

    def true(self, name: str) -> Tensor:
        state = self._part(name)
        return state.parameter if isinstance(state, WholeState) else join_master(state.hi, state.lo)

    @torch.no_grad()
    def publish(self, chunk: Chunk) -> None:
        weights = self._states[chunk].weights
        if weights is not chunk.shard:
            chunk.shard.copy_(weights, non_blocking=True)
        chunk.publish()

    def step(self, gradients: Mapping[Chunk, Tensor], scale: float | Tensor, used: set[str]) -> None:
        groups = {p: group for group in self.optimizer.param_groups for p in group["params"]}
        self.finish()
        late: dict[Chunk, tuple[Callable[[], None], Callable[[], None]]] = {}
        factors: dict[torch.device, Tensor] = {}  # the factor, once on each device
        for chunk, gradient in gradients.items():
            factor = scale
            if isinstance(scale, Tensor):
                if gradient.device not in factors:
                    factors[gradient.device] = scale.to(gradient.device, torch.float32)
                factor = factors[gradient.device]
            updates = [
                self._update(chunk, gradient, factor, *run, groups) for run in self._runs(chunk, used, groups)
            ]
            if chunk in self._beside and all(update.in_halves for update in updates):
                late[chunk] = (
                    partial(_each, updates, adam_update_parameters),
                    partial(_each, updates, adam_update_moments),
                )
                chunk.is_due = True
            else:
                _each(updates, adam_step)
        if late:
            self._worker.submit(late, list(reversed(late)))
        # Schedulers of torch warn if they are stepped before the optimizer, which never steps itself here.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]

    def _update(
        self,
        chunk: Chunk,
        gradient: Tensor,
        factor: float | Tensor,
        begin: int,
        end: int,
        names: list[str],
        groups: Mapping[Tensor, Any],
    ) -> _Update:
        number = self._steps[names[0]] + 1
        self._steps.update(dict.fromkeys(names, number))
        return _Update(
            state=_cut(self._states[chunk], begin, end),
            gradient=gradient[begin:end],
            settings=_settings(self.optimizer, groups[self._stretches[names[0]][1]]),
            number=number,
            factor=factor,
            start=self._first[chunk] + begin,
            seed=self._seed,
        )

    def _settle(self, chunk: Chunk) -> None:
        """Before a chunk is gathered: its parameters must be there."""
        self._worker.wait_parameters(chunk)
        self.publish(chunk)

    def finish(self) -> None:
        """Let every promised step be done, and the model see it."""
        for chunk in self._states:
            chunk.settle()
        self._worker.wait()

    def done_with(self, chunk: Chunk) -> None:
        """Return once a chunk's gradient is needed no more."""
        self._worker.wait_moments(chunk)

    def close(self) -> None:
        """End the thread, with all steps done."""
        self.finish()
        self._worker.close()

    @torch.no_grad()
    def reset(self) -> None:
        self._steps = dict.fromkeys(self._steps, 0)
        for state in self._states.values():
            for name in _MOMENTS:
                getattr(state, name).zero_()
                if isinstance(state, QuantizedState):
                    getattr(state, f"{name}_scale").zero_()

    def entries(self, chunk: Chunk) -> dict[str, dict[str, Entry]]:
        like = dict.fromkeys(_MOMENTS, Entry(True, "float32"))
        return {
            part.name: {**like, "step": Entry(False, "float32")}
            for part in chunk.slices
            if self._steps[part.name]
        }

    def read(self, name: str, key: str) -> Tensor:
        if key == "step":
            return torch.tensor(float(self._steps[name]))
        state = self._part(name)
        return state.moment(key) if isinstance(state, QuantizedState) else getattr(state, key).float()

    @torch.no_grad()
    def write(self, name: str, key: str, value: Tensor) -> None:
        if key == "step":
            self._steps[name] = int(value)
        elif key in _MOMENTS:
            state = self._part(name)
            if isinstance(state, QuantizedState):
                state.load_moment(key, value.to(state.hi.device, torch.float32))
            else:
                getattr(state, key).copy_(value)

    def _runs(
        self, chunk: Chunk, used: set[str], groups: Mapping[Tensor, Any]
    ) -> Iterator[tuple[int, int, list[str]]]:
        """Stretches of the shard that are stepped alike: from, to, and whose they are."""
        begin, key = 0, None
        names: list[str] = []
        for part in chunk.slices:
            mine = (
                (id(groups[self._stretches[part.name][1]]), self._steps[part.name])
                if part.name in used
                else None
            )
            if mine != key:
                if names:
                    yield begin, part.shard_start, names
                begin, key, names = part.shard_start, mine, []
            if mine is not None:
                names.append(part.name)
        if names:
            yield begin, chunk.shard.numel(), names

    def _range(self, name: str) -> tuple[int, int]:
        part = next(part for part in self._stretches[name][0].slices if part.name == name)
        return part.shard_start, part.shard_start + part.length

    def _part(self, name: str) -> AdamState:
        return _cut(self._states[self._stretches[name][0]], *self._range(name))


@dataclass(frozen=True, kw_only=True)
class _Update:
    """One run of the kernel, to be done at any time."""

    state: AdamState
    gradient: Tensor
    settings: AdamSettings
    number: int
    factor: float | Tensor
    start: int
    seed: int

    @property
    def in_halves(self) -> bool:
        """Whether parameters can be written before moments."""
        return self.settings.adamw_mode or not self.settings.weight_decay

    def run(self, kernel: Callable[..., None]) -> None:
        kernel(
            self.state, self.gradient, self.settings, step=self.number, grad_scale=self.factor, start=self.start,
            seed=self.seed,
        )  # fmt: skip


def _each(updates: list[_Update], kernel: Callable[..., None]) -> None:
    for update in updates:
        update.run(kernel)


def _settings(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> AdamSettings:
    beta1, beta2 = group["betas"]
    return AdamSettings(
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        adamw_mode=bool(group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))),
    )


def _fresh(weights: Tensor, regime: str) -> AdamState:
    """The state of weights that are zero, and will be filled; ``weights`` itself is in it."""
    whole = torch.zeros(weights.numel(), dtype=torch.float32, device=weights.device)
    if weights.dtype != torch.bfloat16:
        copy = None if weights.dtype == torch.float32 else weights
        return WholeState(
            parameter=weights if copy is None else whole,
            exp_avg=whole.clone(),
            exp_avg_sq=whole.clone(),
            copy=copy,
        )
    lo = torch.zeros(weights.numel(), dtype=torch.int16, device=weights.device)
    if regime != "C":
        moments = whole if regime == "A" else whole.bfloat16()
        return SplitState(hi=weights, lo=lo, exp_avg=moments.clone(), exp_avg_sq=moments)
    like = QuantizedState.of(whole)
    return QuantizedState(
        hi=weights, lo=lo, exp_avg=like.exp_avg, exp_avg_scale=like.exp_avg_scale, exp_avg_sq=like.exp_avg_sq,
        exp_avg_sq_scale=like.exp_avg_sq_scale,
    )  # fmt: skip


def _cut(state: AdamState, begin: int, end: int) -> AdamState:
    """The elements from ``begin`` up to ``end`` of a state: views."""
    if isinstance(state, WholeState):
        return WholeState(
            parameter=state.parameter[begin:end], exp_avg=state.exp_avg[begin:end],
            exp_avg_sq=state.exp_avg_sq[begin:end], copy=None if state.copy is None else state.copy[begin:end],
        )  # fmt: skip
    if isinstance(state, SplitState):
        return SplitState(
            hi=state.hi[begin:end], lo=state.lo[begin:end], exp_avg=state.exp_avg[begin:end],
            exp_avg_sq=state.exp_avg_sq[begin:end],
        )  # fmt: skip
    blocks = slice(begin // 256, -(-end // 256))
    return QuantizedState(
        hi=state.hi[begin:end], lo=state.lo[begin:end], exp_avg=state.exp_avg[begin:end],
        exp_avg_scale=state.exp_avg_scale[blocks], exp_avg_sq=state.exp_avg_sq[begin:end],
        exp_avg_sq_scale=state.exp_avg_sq_scale[blocks],
    )  # fmt: skip
