"""State on disk of an optimizer of torch: it steps piece by piece, read ahead and written behind.

The files and buffers are Adam's (:mod:`meshfold.zero_gemini.optimizer.disk_state`). A piece has the tensors that the optimizer
keeps for its elements, found by trying it out, and the master weights unless the model computes with them. Single numbers, such as
step counts, stay in memory. A piece is stepped by a twin of the optimizer, whose parameters are views of it. Every twin sees the
settings and the numbers from before the step, as if there was one call.

Without norms, chunks can be stepped one by one during the backward (:mod:`meshfold.zero_gemini.optimizer.steps_in_backward`).

An optimizer that needs norms of whole tensors steps twice. The first time it steps on copies, until it asks for the norms, and its
sums are noted. All ranks add up the sums of all tensors, in the one all-reduce of the chunks in memory. The second time it gets
them and steps. State is read twice and written once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from meshfold.mesh.parameters import ShardedSquareSums, ShardOfTensor
from meshfold.zero_gemini.chunks.chunk import Chunk
from meshfold.zero_gemini.errors import Faults, MemoryPlanError
from meshfold.zero_gemini.optimizer.disk_buffers import Piece
from meshfold.zero_gemini.optimizer.disk_chunks import MASTER, ChunkOnDisk, ChunksOnDisk
from meshfold.zero_gemini.optimizer.disk_state import DiskSettings
from meshfold.zero_gemini.optimizer.kernel_runs import StepTimer
from meshfold.zero_gemini.optimizer.master_weights import cut
from meshfold.zero_gemini.optimizer.shard_norms import part_of
from meshfold.zero_gemini.optimizer.twins import settings_of, twin_of

Scale = float | Tensor


class _Part(NamedTuple):
    """Elements ``begin`` to ``end`` of a shard, of one parameter and one piece."""

    name: str
    begin: int
    end: int
    value: Tensor
    parameter: nn.Parameter
    views: dict[str, Tensor]
    """the optimizer's tensors, also those that the parameter does not have yet"""


class _Work(NamedTuple):
    held: ChunkOnDisk
    piece: Piece
    gradient: Tensor


class _Asked(Exception):
    """Ends a step on copies: the optimizer has asked for norms."""

    def __init__(self, sums: Tensor) -> None:
        super().__init__()
        self.sums = sums


class DiskSteps(ChunksOnDisk):
    """Steps on the chunks of an optimizer whose state is on disk."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        settings: DiskSettings,
        dtype: torch.dtype | None,
        faults: Faults,
        timings: StepTimer,
        *,
        with_state: bool,
    ) -> None:
        """Args:
        optimizer: of torch, elementwise or with ``sight="norms"``.
        settings: of the disk.
        dtype: of the master weights; None: as the model computes.
        faults: keeps this rank's errors until all agree at the end of a step.
        timings: of steps.
        with_state: the optimizer makes its state at construction.
        """
        super().__init__(optimizer, settings, dtype, with_state=with_state)
        self._faults, self._timings = faults, timings
        self._found: dict[tuple[ChunkOnDisk, str], tuple[set[str], dict[str, Any]]] = {}  # by the present step

    def make_state(self) -> None:
        """Write the state that the optimizer makes at construction."""
        for held in self.held.values():
            for name, parameter in held.weights.parameters.items():
                group = next(
                    group for group in self._optimizer.param_groups if any(p is parameter for p in group["params"])
                )
                for a, z, views in self.views(held, *held.chunk.span(name), change=True):
                    value = views.get(MASTER, held.weights.tensor[a:z])
                    mine = nn.Parameter(value)
                    twin: Any = type(self._optimizer)  # another of its kind
                    state = twin([{**group, "params": [mine]}], **self._optimizer.defaults).state.get(mine, {})
                    part = _Part(name, a, z, value, mine, views)
                    self._take_over(held, part, state)
        self._settle_found()

    # -- stepping -------------------------------------------------------------------------------------------------

    def step(self, gradients: Mapping[Chunk, Tensor], scale: Scale, used: set[str], rest: Callable[[], None]) -> None:
        """Step on the chunks on disk, and let ``rest`` step on the others. All ranks must call.

        Raises:
            DiskError: on all ranks, if state on one of them could not be read or written.
        """
        work = self._work(gradients, used)
        scale = scale.cpu() if isinstance(scale, Tensor) else scale
        settings = settings_of(self._optimizer)
        self._found.clear()
        self.disk.ring.expect(one.piece for one in work)
        if getattr(self._optimizer, "sight", None) == "norms":
            self._step_twice(work, scale, used, rest, settings)
        else:
            rest()
            self._faults.keep(lambda: self._step_all(work, scale, used, settings))
        self._faults.keep(self.disk.ring.settle)
        self._faults.agree()
        self.disk.ring.expect(one.piece for one in work)  # of the next step

    def step_one(self, chunk: Chunk, gradient: Tensor, used: set[str], settings: Sequence[Mapping[str, Any]]) -> None:
        """Step on one chunk on disk, with the given settings of the groups; those of the optimizer stay as they are.

        Raises:
            DiskError: if its state could not be read or written.
        """
        self._found.clear()
        self._step_all(self._work({chunk: gradient}, used), 1.0, used, settings, alone=True)

    def _work(self, gradients: Mapping[Chunk, Tensor], used: set[str]) -> list[_Work]:
        """Return the pieces on disk in which some parameter is used."""
        return [
            _Work(held, piece, gradients[chunk])
            for chunk, held in self.held.items()
            if chunk in gradients
            for piece in held.pieces
            if any(_common(part.shard_start, part.length, piece) and part.name in used for part in chunk.slices)
        ]

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    def _step_all(
        self,
        work: Sequence[_Work],
        scale: Scale,
        used: set[str],
        settings: Sequence[Mapping[str, Any]],
        each: Callable[[ChunkOnDisk, list[_Part]], None] = lambda held, parts: None,
        *,
        alone: bool = False,
    ) -> None:
        """Step on every piece; ``each`` is called before, with what will be stepped. ``alone``: as of :meth:`_call`."""
        for held, piece, gradient in work:
            with (
                self._timings.clock("disk", piece.end - piece.begin),
                self.disk.ring.open(piece, change=True, now=True) as views,
            ):
                parts = self._parts(held, piece, views, gradient, scale, used)
                each(held, parts)
                for part, state in zip(parts, self._call(held, parts, settings, alone=alone), strict=True):
                    self._take_over(held, part, state)
        self._settle_found()

    def _step_twice(
        self,
        work: Sequence[_Work],
        scale: Scale,
        used: set[str],
        rest: Callable[[], None],
        settings: Sequence[Mapping[str, Any]],
    ) -> None:
        optimizer: Any = self._optimizer
        sums: ShardedSquareSums = optimizer.square_sums
        found: list[Tensor] = []
        succeeded = self._faults.keep(lambda: self._note_sums(work, scale, used, settings, sums, found))
        sums.whole = None
        # Other ranks wait for the sums of one that has lost its state.
        sums.more = sum(found[1:], found[0]) if found and succeeded else None if succeeded else torch.tensor(torch.nan)
        self._restore(settings)
        try:
            rest()
        finally:
            sums.more = None
        whole = sums.whole if sums.whole is None else sums.whole.cpu()
        shards: dict[Tensor, ShardOfTensor] = {}
        asked: list[int] = []

        def answer(parameters: Sequence[Tensor], rows: Sequence[Sequence[Tensor]]) -> Tensor:
            asked.append(len(parameters))
            if whole is None or len(asked) > 1 or len(rows) != len(whole):
                self._refuse_sums()
            return whole[:, [shards[parameter].place for parameter in parameters]]

        def before(held: ChunkOnDisk, parts: list[_Part]) -> None:
            asked.clear()
            shards.clear()
            shards.update(self._shards(held, parts, sums))

        if succeeded:
            with self._answering(answer):
                self.disk.ring.expect(one.piece for one in reversed(work))  # the last are in the buffers
                self._faults.keep(lambda: self._step_all([*reversed(work)], scale, used, settings, before))

    def _note_sums(
        self,
        work: Sequence[_Work],
        scale: Scale,
        used: set[str],
        settings: Sequence[Mapping[str, Any]],
        sums: ShardedSquareSums,
        found: list[Tensor],
    ) -> None:
        """Step on copies of every piece until the optimizer asks for norms, and add its sums to a list."""
        for held, piece, gradient in work:
            with self._timings.clock("disk", 0), self.disk.ring.open(piece, change=False) as views:
                parts = self._parts(held, piece, views, gradient, scale, used, copies=True)
                shards = self._shards(held, parts, sums)

                def ask(
                    parameters: Sequence[Tensor],
                    rows: Sequence[Sequence[Tensor]],
                    shards: Mapping[Tensor, ShardOfTensor] = shards,
                ) -> NoReturn:
                    raise _Asked(sums.local([shards[parameter] for parameter in parameters], rows))

                try:
                    with self._answering(ask):
                        self._call(held, parts, settings)
                except _Asked as asked:
                    found.append(asked.sums)

    def _shards(
        self, held: ChunkOnDisk, parts: Sequence[_Part], sums: ShardedSquareSums
    ) -> dict[Tensor, ShardOfTensor]:
        found: dict[Tensor, ShardOfTensor] = {}
        for part in parts:
            start, _ = held.chunk.span(part.name)
            shard = sums.shard_of(held.weights.parameters[part.name])
            found[part.parameter] = part_of(shard, part.begin - start, part.end - start)
        return found

    @contextmanager
    def _answering(self, answer: Callable[..., Tensor]) -> Iterator[None]:
        """Context manager: the optimizer asks this function for sums of squares."""
        optimizer: Any = self._optimizer
        before, optimizer.square_sums = optimizer.square_sums, answer
        try:
            yield
        finally:
            optimizer.square_sums = before

    def _refuse_sums(self) -> NoReturn:
        raise MemoryPlanError(
            f"the state of {type(self._optimizer).__name__} cannot be on disk: it must ask for all sums of squares once a step, "
            "also without parameters; use adamw, lamb or lars, or keep it on the host (leave offload_path out)"
        )

    def _parts(
        self,
        held: ChunkOnDisk,
        piece: Piece,
        views: Mapping[str, Tensor],
        gradient: Tensor,
        scale: Scale,
        used: set[str],
        *,
        copies: bool = False,
    ) -> list[_Part]:
        """Return the parameters of a piece that have a gradient, with it; ``copies``: of what the optimizer changes."""
        found = []
        for part in held.chunk.slices:
            common = _common(part.shard_start, part.length, piece)
            if part.name not in used or not common:
                continue
            begin, end = common.start, common.stop
            mine = cut(held.planes, views, begin - piece.begin, end - piece.begin)
            value = mine.pop(MASTER, held.weights.tensor[begin:end])
            if copies:
                value, mine = value.clone(), {key: view.clone() for key, view in mine.items()}
            parameter = nn.Parameter(value)
            grad = gradient[begin:end].to(value.dtype)
            if isinstance(scale, Tensor):
                grad = grad * scale.to(grad)
            elif scale != 1.0:
                grad = grad * scale
            parameter.grad = grad
            found.append(_Part(part.name, begin, end, value, parameter, mine))
        return found

    def _call(
        self,
        held: ChunkOnDisk,
        parts: Sequence[_Part],
        settings: Sequence[Mapping[str, Any]],
        *,
        alone: bool = False,
    ) -> list[dict[str, Any]]:
        """Let a twin of the optimizer step on some parts, from the given settings; return the state of each.

        What it makes of the settings, the optimizer's groups get, unless it is ``alone``.
        """
        state = self._optimizer.state
        of: dict[Tensor, nn.Parameter] = {held.weights.parameters[part.name]: part.parameter for part in parts}
        twin = twin_of(
            self._optimizer, settings, of
        )  # without hooks: they are called once a step, with the chunks in memory
        for part in parts:
            numbers = copy.deepcopy(dict(state.get(held.weights.parameters[part.name], {})))
            mine = {key: part.views[key] for key in held.present.get(part.name, ())}
            if numbers or mine:
                twin.state[part.parameter] = {**numbers, **mine}
        twin.step()
        if not alone:
            for group, found in zip(self._groups, settings_of(twin), strict=True):
                group.update(found)
        return [twin.state.get(part.parameter, {}) for part in parts]

    def _restore(self, settings: Sequence[Mapping[str, Any]]) -> None:
        """Undo what a step changed in the groups."""
        for group, before in zip(self._groups, settings, strict=True):
            for key in group.keys() - before.keys() - {"params"}:
                del group[key]
            group.update(before)

    def _take_over(self, held: ChunkOnDisk, part: _Part, state: Mapping[str, Any]) -> None:
        """Write what the optimizer made of a part to its piece; note which keys and numbers it has."""
        keys, numbers = self._found.setdefault((held, part.name), (set(), {}))
        for key, value in state.items():
            view = part.views.get(key)
            if view is not None:
                if value.data_ptr() != view.data_ptr():
                    view.copy_(value.reshape(-1))
                keys.add(key)
            elif isinstance(value, Tensor) and value.numel() > 1:
                self.check_keys(held.chunk.dtype, {key})
            else:
                numbers[key] = value
        if part.parameter.data_ptr() != part.value.data_ptr():
            part.value.copy_(part.parameter.detach())
        if held.is_wide:
            held.weights.tensor[part.begin : part.end].copy_(part.value)

    def _settle_found(self) -> None:
        """Let parameters have the keys and numbers that were noted, once all their pieces are stepped."""
        for (held, name), (keys, numbers) in self._found.items():
            held.present[name] = keys
            if numbers:
                self._optimizer.state[held.weights.parameters[name]] = numbers
        self._found.clear()


def _common(start: int, length: int, piece: Piece) -> range:
    """Return the elements of a shard that are in a run of a parameter and in a piece."""
    return range(max(start, piece.begin), min(start + length, piece.end))
