"""Adam on whole chunks, with the kernels of :mod:`meshfold.kernels`: numba for chunks on the host, Triton on the device.

State per parameter, in bytes, including the one that the model computes with:

========= ========= ================================================================== =====
model     regime    master weights and moments                                           bytes
========= ========= ================================================================== =====
float32   A         the parameter; float32                                             12
bfloat16  A         split master (bfloat16 and int16, exact); float32                  12
bfloat16  B         split master; bfloat16, rounded stochastically                      8
bfloat16  C         split master; 8 bits and a scale every 256 elements                6.03
float16   A         float32; float32                                                   14
========= ========= ================================================================== =====

Everything goes to disk except the weights that the model computes with, the first 2 bytes (4 in float32).

Neighbours with equal settings are stepped in one run of the kernel, including the padding between them (it is zero and
stays so).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshfold.zero_gemini.chunks.chunk import Chunk
from meshfold.zero_gemini.chunks.placement import ChunkPlacement
from meshfold.zero_gemini.errors import Faults, MemoryPlanError, OutOfBudget
from meshfold.zero_gemini.memory.arena import MemoryTier
from meshfold.zero_gemini.memory.copies import Arrival
from meshfold.zero_gemini.optimizer.adam_parameters import AdamValues
from meshfold.zero_gemini.optimizer.adam_state import Held
from meshfold.zero_gemini.optimizer.cpu_executor import Halves, Worker
from meshfold.zero_gemini.optimizer.disk_buffers import Piece
from meshfold.zero_gemini.optimizer.disk_state import DiskPlanes, DiskSettings
from meshfold.zero_gemini.optimizer.gpu_streaming import GpuStreaming
from meshfold.zero_gemini.optimizer.kernel_runs import ChunkStep, Run, StepKind, StepTimer, StepTiming
from meshfold.zero_gemini.optimizer.master_weights import planes_of
from meshfold.zero_gemini.optimizer.speculative_updates import SpeculativeUpdates
from meshfold.zero_gemini.optimizers.adam import settings_of

REGIMES = ("A", "B", "C")
_PLAIN = ("amsgrad", "maximize", "capturable", "differentiable")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def suits(optimizer: torch.optim.Optimizer, dtype: torch.dtype, master_dtype: torch.dtype) -> bool:
    """Return True if our Adam computes the same as a torch optimizer: Adam or AdamW without extras, only in float32."""
    return (
        type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
        and dtype in _FLOATS
        and master_dtype == torch.float32
        and not any(group.get(key) for group in optimizer.param_groups for key in _PLAIN)
        and not any(isinstance(group["lr"], Tensor) for group in optimizer.param_groups)
    )


class AdamStepper(AdamValues):
    """See :class:`meshfold.zero_gemini.optimizer.interface.Stepper`.

    Attributes:
        disk: state on disk; None without.
        faults: keeps errors of pending steps, which cannot raise in the middle of a collective.
        timings: of steps on the host.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        regime: str,
        seed: int,
        disk: DiskSettings | None = None,
        faults: Faults | None = None,
    ) -> None:
        """Args:
        optimizer: an Adam or AdamW of torch, for its groups and settings; it never steps itself.
        regime: ``"A"``, ``"B"`` or ``"C"``.
        seed: of stochastic rounding.
        disk: where state on disk is stored; None: no state is on disk.
        faults: keeps the error of a promised step; None: it is raised where the step is waited for.
        """
        self.optimizer, self._regime, self._seed = optimizer, regime, seed
        self.disk = None if disk is None else DiskPlanes(disk)
        self._held: dict[Chunk, Held] = {}
        self._first: dict[Chunk, int] = {}  # global number of the shard's first element
        self._elements = 0
        self._steps: dict[str, int] = {}
        self._chunks: dict[str, Chunk] = {}
        self._worker = Worker()
        self._speculative = SpeculativeUpdates(self._worker)
        self._groups: dict[Tensor, Any] = {}
        self._coming: list[Piece] = []
        self._streaming: GpuStreaming | None = None
        self.faults, self.timings = faults or Faults(), StepTimer()

    def reserve(self, shards: Iterable[tuple[torch.dtype, int]]) -> None:
        """Reserve room on disk for chunks that are about to be adopted on, or moved to, disk, in one file for all of them.

        Args:
            shards: for each chunk the dtype that the model computes in, and the elements of its shard.

        Raises:
            DiskError: if there is less room, or the folder cannot be used; nothing has changed then.
            MemoryPlanError: if there are some and no folder was named.
        """
        wanted = [(planes_of(dtype, self._regime), elements) for dtype, elements in shards]
        if self.disk is not None:
            self.disk.reserve(wanted)
        elif wanted:
            raise MemoryPlanError(
                f"the optimizer state of {len(wanted)} chunks is planned for disk, but no folder is given: set offload_path"
            )

    def adopt(self, chunk: Chunk, place: MemoryTier) -> None:
        if self._regime != "A" and chunk.dtype != torch.bfloat16:
            raise MemoryPlanError(
                f"regime {self._regime!r} is for models in bfloat16, and this one computes in {chunk.dtype}: use "
                "precision='bf16', or regime='A'"
            )
        self._held[chunk] = Held(chunk, self._regime, place, self.disk)
        self._first[chunk] = self._elements + chunk.group.index * chunk.shard.numel()
        self._elements += chunk.spec.size_elems
        for part in chunk.slices:
            self._chunks[part.name] = chunk
            self._steps[part.name] = 0

    def state_bytes(self, dtype: torch.dtype) -> float:
        return sum(plane.dtype.itemsize / plane.each for plane in planes_of(dtype, self._regime))

    @property
    def notes(self) -> tuple[str, ...]:
        return () if self.disk is None else self.disk.notes

    def take_timings(self) -> dict[StepKind, StepTiming]:
        return self.timings.take()

    @property
    def stored_parts(self) -> None:
        """Return None: ranks store slices of chunks."""

    @property
    def one_by_one(self) -> AdamStepper:
        return self

    @property
    def early(self) -> AdamStepper:
        return self

    def stream_on_gpu(self, streaming: GpuStreaming | None) -> None:
        """Let the device step those of the host's chunks that it can take before the cores do. Call :meth:`finish` before.

        ``streaming``: the device's buffers; None: only the cores step.
        """
        self.drop_speculative()
        before, self._streaming = self._streaming, streaming
        if before is not None:
            before.close()

    def move(self, chunk: Chunk, placement: ChunkPlacement) -> None:
        self.drop_speculative()
        self.finish()
        self._held[chunk].move(placement)

    def steps_in_background(self, chunk: Chunk) -> bool:
        return chunk in self._held and self._held[chunk].place != "device"

    def publish(self, chunk: Chunk) -> None:
        self._held[chunk].weights.show()
        chunk.publish()

    def step(
        self,
        gradients: Mapping[Chunk, Tensor],
        scale: float | Tensor,
        used: set[str],
        *,
        stepped: Callable[[Chunk], None] = lambda chunk: None,
    ) -> None:
        """Step on every chunk, in the order of the gradients.

        ``stepped``: called with each chunk that is stepped at once, before the next is.
        """
        groups = self._groups_of()
        self.finish()
        late: dict[Chunk, Halves] = {}
        on_disk = []  # pieces that pass through the buffers, in order
        factors: dict[torch.device, Tensor] = {}  # the factor on each device
        steps: dict[Chunk, ChunkStep] = {}
        for chunk, gradient in gradients.items():
            factor = scale
            if isinstance(scale, Tensor):
                if gradient.device not in factors:
                    factors[gradient.device] = scale.to(gradient.device, torch.float32)
                factor = factors[gradient.device]
            steps[chunk] = self._step_of(chunk, gradient, factor, used, groups)
            self._count(chunk, used)
        made = self._speculative.keep(steps)
        for chunk, step in steps.items():
            if not self.steps_in_background(chunk):
                step.at_once()
                stepped(chunk)
                continue
            # Deferred on every rank of the chunk's group, even if a rank's shard is empty: publishing is a collective.
            if chunk in made:
                chunk.promise_step(_StepOfChunk(self, chunk))
                continue
            late[chunk] = step.halves(self._read_ahead, self._streaming)
            on_disk += step.held.pieces_of(step.spans)
            chunk.promise_step(_StepOfChunk(self, chunk))
        if late:
            then = None
            if self.disk is not None:
                self.disk.ring.expect(on_disk)
                then = partial(self._get_ready, on_disk)
            self._worker.submit(late, list(reversed(late)), then)
        # torch's schedulers warn if they step before the optimizer, whose own step() is never called here.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]

    # -- one by one ---------------------------------------------------------------------------------------------

    def begin_steps(self, chunks: Sequence[Chunk]) -> None:
        for chunk in self._held:
            chunk.wait_step()  # chunks unused in this step may still have a pending one
        self._groups = self._groups_of()
        self._coming = [
            piece
            for chunk in chunks
            for piece in self._held[chunk].pieces_of([(0, chunk.shard.numel())])
            if chunk.slices
        ]
        if self.disk is not None and self._coming:
            self._worker.submit({}, [], partial(self.disk.ring.expect, self._coming))

    def step_one(self, chunk: Chunk, gradient: Tensor, used: set[str], *, ready: Callable[[], None]) -> None:
        step = self._step_of(chunk, gradient, 1.0, used, self._groups)
        self._count(chunk, used)
        if self.steps_in_background(chunk):
            self._worker.submit({chunk: step.in_one(ready, self._read_ahead)}, [])
            chunk.promise_step(_StepOfChunk(self, chunk))
        else:
            ready()
            step.at_once()

    def end_steps(self) -> None:
        if self.disk is not None and self._coming:
            self._worker.submit({}, [], partial(self._get_ready, self._coming))
        self.optimizer._opt_called = True  # type: ignore[attr-defined]

    # -- speculative steps -----------------------------------------------------------------------------------------------

    def keep_second_copies(self, of: Collection[Chunk]) -> bool:
        """Allocate the shadow copies of these chunks, if their state is in host memory, and free those of others. No step may be
        pending.

        Returns:
            True if there are some; none are made if memory does not suffice for all.
        """
        self.drop_speculative()
        chosen = set(of)
        try:
            for chunk, held in sorted(self._held.items(), key=lambda pair: pair[0] in chosen):  # free first
                held.keep_second(chunk in chosen)
        except OutOfBudget:
            return self.keep_second_copies(())
        return any(held.second is not None for held in self._held.values())

    def begin_speculative(self) -> None:
        """Prepare for a backward with speculative steps."""
        self.drop_speculative()
        self._groups = self._groups_of()

    def try_step(self, chunk: Chunk, gradient: Tensor, used: set[str], *, factor: float, ready: Arrival) -> bool:
        """Step a chunk speculatively in parallel with compute: kept if :meth:`step` is called with the same arguments.

        Args:
            chunk: no other code changes its state until then.
            gradient: its shard on the host.
            used: names of the parameters that have a gradient.
            factor: expected factor of the gradient.
            ready: waits until the gradient is on the host; called in another thread.

        Returns:
            True if possible: the chunk has a shadow copy, and all its elements are stepped with the same settings.
        """
        if self._held[chunk].second is None or chunk.step_is_pending:
            return False
        step = self._step_of(chunk, gradient, factor, used, self._groups)
        if step.is_of_all:
            self._speculative.begin(chunk, step, ready, self._streaming)
        return step.is_of_all

    def drop_speculative(self) -> None:
        self._speculative.drop()

    # -- within -------------------------------------------------------------------------------------------------

    def _groups_of(self) -> dict[Tensor, Any]:
        """Return the group of each of the optimizer's parameters."""
        return {p: group for group in self.optimizer.param_groups for p in group["params"]}

    def _read_ahead(self) -> None:
        if self.disk is not None:
            self.disk.ring.advance()

    def _get_ready(self, pieces: list[Piece]) -> None:
        """Start reading the pieces that the next step needs first."""
        if self.disk is not None:
            self.disk.ring.settle()
            self.disk.ring.expect(pieces)

    def _step_of(
        self,
        chunk: Chunk,
        gradient: Tensor,
        factor: float | Tensor,
        used: set[str],
        groups: Mapping[Tensor, Any],
    ) -> ChunkStep:
        """Return the next step of a chunk."""
        return ChunkStep(
            held=self._held[chunk],
            gradient=gradient,
            factor=factor,
            first=self._first[chunk],
            seed=self._seed,
            runs=self._runs(chunk, used, groups),
            timings=self.timings,
        )

    def _count(self, chunk: Chunk, used: set[str]) -> None:
        """Count this step for the parameters that are used."""
        for part in chunk.slices:
            self._steps[part.name] += part.name in used

    def _runs(self, chunk: Chunk, used: set[str], groups: Mapping[Tensor, Any]) -> list[Run]:
        """Return the spans of the shard with equal settings and step counts; merge neighbours."""
        parameters = self._held[chunk].weights.parameters
        runs: list[Run] = []
        key = None
        for part in chunk.slices:
            group = groups[parameters[part.name]]
            mine = (id(group), self._steps[part.name]) if part.name in used else None
            if mine != key:
                if key is not None:
                    runs[-1].end = part.shard_start
                if mine is not None:
                    settings = settings_of(self.optimizer, group)
                    runs.append(Run(part.shard_start, chunk.shard.numel(), settings, mine[1] + 1))
                key = mine
        return runs

    def finish(self) -> None:
        """Finish every pending step, and publish it to the model.

        Raises:
            DiskError: if a step failed, now and from then on; with several ranks ``faults`` keeps it.
        """
        for chunk in self._held:
            chunk.wait_step()
        if self.faults.keep(self._wait) and self.disk is not None:
            self.faults.keep(self.disk.ring.settle)

    def _wait(self) -> None:
        self._worker.wait(but=self._speculative.open)
        self._speculative.land_all()

    def done_with(self, chunk: Chunk) -> None:
        """Wait until a chunk's gradient is no longer needed."""
        self._worker.release_gradient(chunk, self.faults)

    def close(self) -> None:
        """Finish all steps, end the thread, remove the files on disk, and release all memory.

        Raises:
            DiskError: if a step failed and its error was not reported yet; likewise other errors of steps.
        """
        reported = self._worker.failed or self.faults.is_reported
        try:
            self.drop_speculative()
            self.finish()
        except Exception:
            if not reported:
                raise
        finally:
            self._worker.close()
            self.stream_on_gpu(None)
            for chunk, held in self._held.items():
                chunk.drop_step()
                held.free()
            self._held.clear()
            self._chunks.clear()
            if self.disk is not None:
                self.disk.close()


class _StepOfChunk:
    """Pending host step of a chunk (:class:`meshfold.zero_gemini.chunks.chunk.PendingStep`)."""

    def __init__(self, stepper: AdamStepper, chunk: Chunk) -> None:
        self._stepper, self._chunk = stepper, chunk

    def is_done(self) -> bool:
        return self._stepper._worker.is_done(self._chunk)

    def wait(self) -> bool:
        stepper = self._stepper
        return stepper.faults.keep(partial(stepper._worker.wait_parameters, self._chunk))

    def land(self) -> None:
        self._stepper._speculative.land(self._chunk)
        self._stepper._held[self._chunk].weights.show()
