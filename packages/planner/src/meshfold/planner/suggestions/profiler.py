"""Traces of a shortened model: the engine runs one micro-step of a layout with one block and with two, on meta tensors.

A layout is a spec without stages and ``zero``. The second block's share of a :class:`~meshfold.planner.suggestions.profile.Profile`
is every block's. Micro-steps run for some numbers of rows.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from meshfold.engine import Engine
from meshfold.engine.model import find_blocks
from meshfold.engine.sequence import counted_attention
from meshfold.engine.states import PlainStates
from meshfold.mesh import Entry, MeshfoldError, ParallelSpec, SpecError, record
from meshfold.mesh.model_io import DryRun, LiveBytes, Operator, OperatorCounter, saved_for_backward
from meshfold.mesh.processes import start_fake
from meshfold.planner.clock import Work, kernels_of
from meshfold.planner.collected_gradients import release_gradient
from meshfold.planner.estimates import Memory
from meshfold.planner.planner import run_micro_step
from meshfold.planner.step_bytes import allocation_bytes
from meshfold.planner.suggestions.profile import Message, Part, Profile, Step
from meshfold.planner.suggestions.shape import Shape
from meshfold.tensor_parallel.convert import row_multiple

_ROWS = (1, 4, 16)
"""Rows of the micro-steps, by the rows that a layout pads a batch to: code may choose its way by the number of rows, as that of the
loss does for few tokens."""
_MANY_TOKENS = 2048  # of a sequence: then two numbers of rows are enough


class _Ordered(OperatorCounter):
    """Counts operators and keeps their order."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[Operator] = []
        self.turn = 0  # operators of the forward

    def note(self, operator: Operator) -> None:
        super().note(operator)
        self.order += [operator] * self._times

    @contextmanager
    def after_forward(self, around: Any) -> Iterator[None]:
        self.turn = len(self.order)
        with around:
            yield


@dataclass(kw_only=True)
class Profiler:
    """Traces layouts of one model, each once.

    Attributes:
        build: makes the model.
        seq_len: tokens of a sequence.
        settings: of the engine: precision, rules, kernels, clipping.
        optimizer: a key of :data:`meshfold.planner.optimizer_state.MOMENTS`.
        batch_size: sequences of a global batch: no micro-step has more.
        kind: of the devices.
        traces: micro-steps that ran so far.
    """

    build: Callable[[], nn.Module]
    seq_len: int
    settings: Mapping[str, Any]
    optimizer: str
    batch_size: int
    kind: str = "gpu"
    traces: int = 0
    _found: dict[str, Profile | MeshfoldError] = field(default_factory=dict)
    _shape: Shape | None = None
    _models: dict[int | None, nn.Module] = field(default_factory=dict)

    @property
    def shape(self) -> Shape:
        """The model's shape."""
        if self._shape is None:
            with torch.device("meta"):
                self._shape = Shape.of(self.build())
        return self._shape

    def knows(self, spec: ParallelSpec) -> bool:
        """Return True if a layout was traced already."""
        return str(spec.to_dict()) in self._found

    def of(self, spec: ParallelSpec) -> Profile:
        """Return the profile of a layout.

        Raises:
            MeshfoldError: if the engine refuses it.
        """
        key = str(spec.to_dict())
        if key not in self._found:
            try:
                self._found[key] = self._traced(spec)
            except MeshfoldError as error:
                self._found[key] = error
        found = self._found[key]
        if isinstance(found, MeshfoldError):
            raise found
        return found

    def _traced(self, spec: ParallelSpec) -> Profile:
        shape = self.shape
        if shape.path is None:  # the model is its only block
            whole = self._micro_steps(spec, None)
            return Profile(spec=spec, shape=shape, block=whole, rest=whole.minus(whole))
        one = self._micro_steps(spec, 1)
        block = self._micro_steps(spec, 2).minus(one)
        return Profile(spec=spec, shape=shape, block=block, rest=one.minus(block))

    def _shortened(self, blocks: int | None) -> nn.Module:
        """Return a copy of the model on the meta device, with its first blocks only."""
        if blocks not in self._models:
            with torch.device("meta"):
                model = self.build()
            if blocks is not None and self.shape.path is not None:
                del model.get_submodule(self.shape.path)[blocks:]  # type: ignore[operator]
            self._models[blocks] = model
        return copy.deepcopy(self._models[blocks])

    def _micro_steps(self, spec: ParallelSpec, blocks: int | None) -> Part:
        """Return the costs of a shortened model."""
        with (
            start_fake(spec.world_size),
            DryRun() as stand_in,
            counted_attention(spec, stand_in.add_attention),
        ):
            engine = Engine(lambda: self._shortened(blocks), parallel=spec, device="meta", **self.settings)
            states = engine.states
            if not isinstance(states, PlainStates):
                raise SpecError(f"{spec}: a layout has no zero")
            memory = Memory.without_zero([*engine.model.parameters()], [*states.targets.values()], self.optimizer)
            elements = sum(parameter.numel() for parameter in engine.model.parameters())
            unit, rows = self._rows(engine)
            with_sums = _micro_step(engine, rows[0], self.seq_len, stand_in, self.kind, sums=True)
            states.close()  # else it would take the gradients
            for parameter in engine.model.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(release_gradient)
            steps = {count: _micro_step(engine, count, self.seq_len, stand_in, self.kind, alive=True) for count in rows}
            self.traces += 1 + len(steps)
            return Part(
                steps=steps,
                summed=with_sums.minus(steps[rows[0]]),
                memory=memory,
                elements=elements,
                updated=sum(parameter.requires_grad for parameter in engine.model.parameters()),
                unit=unit,
            )

    def _rows(self, engine: Engine) -> tuple[int, tuple[int, ...]]:
        """Return the number of rows that the layout pads a batch to a multiple of, and the rows of the micro-steps to trace."""
        unit = row_multiple(engine.model, self.seq_len // (engine.world.data_size // engine.world.row_size))
        most = 4 if self.seq_len >= _MANY_TOKENS else 16
        rows = tuple(unit * count for count in _ROWS if count <= most and unit * count <= max(self.batch_size, unit))
        whole = unit * math.ceil(self.batch_size / unit)
        # Weights that travel have the same bytes for any rows: a single number of rows cannot tell them from activations.
        return unit, rows if len(rows) > 1 or whole == rows[0] else (*rows, whole)


class _Alive:
    """The most bytes that are alive in a micro-step while blocks compute, and while all else does."""

    def __init__(self, memory: LiveBytes) -> None:
        self._memory = memory
        self.inside = self.outside = 0.0

    def watch(self, blocks: Sequence[nn.Module]) -> list[Any]:
        """Look at the first block's begin and the last one's end, in forward and in backward; return the hooks' handles."""

        def begin(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._now_inside(False)

        def end(_module: nn.Module, _args: Any, output: Any) -> None:
            self._now_inside(True)
            for tensor in tree_iter(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda gradient: self._now_inside(False))
                    break

        return [
            blocks[0].register_forward_pre_hook(begin, with_kwargs=True),
            blocks[-1].register_forward_hook(end),
        ]

    def _now_inside(self, inside: bool) -> None:
        peak, _ = self._memory.take()
        if inside:
            self.inside = max(self.inside, peak)
        else:
            self.outside = max(self.outside, peak)

    def close(self) -> None:
        """Count what came after the last block's backward began."""
        self._now_inside(True)


def _micro_step(
    engine: Engine, rows: int, seq_len: int, stand_in: DryRun, kind: str, *, sums: bool = False, alive: bool = False
) -> Step:
    batch = engine.shard_batch(torch.empty(rows * engine.world.row_size, seq_len, dtype=torch.int64, device="meta"))
    inputs: list[int] = []

    def look(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point()]
        inputs.append(tensors[0].nbytes if tensors else 0)

    blocks = [*find_blocks(engine.model).values()] or [engine.model]
    handles: list[Any] = [blocks[0].register_forward_pre_hook(look, with_kwargs=True)]
    memory = LiveBytes(round_bytes=allocation_bytes(kind))
    seen = _Alive(memory)
    if alive:
        handles += seen.watch(blocks)
    try:
        with (
            stand_in.counting(_Ordered()) as counter,
            kernels_of(kind, counter, memory),
            memory if alive else nullcontext(),
            saved_for_backward([*engine.model.parameters()]) as saved,
            record() as log,
        ):
            if sums:
                engine.states.begin(first=True)
            around = engine.states.backward("last") if sums else nullcontext()
            run_micro_step(engine, batch, log, counter.after_forward(around))
            if sums:
                log.phase = "backward"
                engine.states.finish(1.0)
                log.phase = "norm"
                engine.states.norm()
            if alive:
                seen.close()
    finally:
        for handle in handles:
            handle.remove()
    return Step(
        forward=Work(operators=Counter(counter.order[: counter.turn])),
        backward=Work(operators=Counter(counter.order[counter.turn :])),
        messages=_messages(log.entries),
        saved=saved.bytes,
        stream=inputs[0] if inputs else 0,
        inside=seen.inside,
        outside=seen.outside,
    )


def _messages(entries: Sequence[Entry]) -> dict[Message, tuple[float, int]]:
    found: dict[Message, tuple[float, int]] = {}
    for entry in entries:
        if entry.group_size > 1:
            key = ("gradients" if _is_bucket(entry) else entry.phase, entry.kind, entry.axes, entry.of_weights)
            size, calls = found.get(key, (0.0, 0))
            found[key] = (size + float(entry.bytes), calls + 1)
    return found


def _is_bucket(entry: Entry) -> bool:
    """Return True for sums of gradients over data axes, which no later operator of the backward waits for."""
    outer = {"data", "seq", "ring", "ulysses"}
    over = any(axis.split("/")[0].split("%")[0] in outer for axis in entry.axes)
    return entry.kind == "all_reduce" and over and (entry.phase == "backward" or entry.of_weights)
