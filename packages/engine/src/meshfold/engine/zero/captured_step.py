"""Forward and backward under ``zero`` as CUDA graphs, cut where chunks are moved; replayed while nothing about the step changes.

One form of batch is captured at a time, under one placement of chunks, since its activations keep their memory. The graphs are
freed before anything else may need it: an eager step, another forward of the model, or a move of chunks. The next steps are
captured anew. A step that cannot be captured runs as usual: :mod:`.capture_rules` decides, and says why.

A micro-step is captured after another of the same form ran as usual under the same placement: kernels are compiled then, and the
order of units is known. What is moved between graphs: :mod:`meshfold.zero_gemini.runtime.captured_moves`.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from meshfold.engine.captured_step import Counted, Inputs
from meshfold.engine.errors import TrainingError
from meshfold.engine.model.mask_choice import masks_by_shape
from meshfold.engine.zero.capture_rules import CaptureRules
from meshfold.mesh import collector_paused
from meshfold.zero_gemini import BackwardRole, CapturedMoves, segments_on

if TYPE_CHECKING:
    from meshfold.engine.batches.batch import Batch
    from meshfold.engine.batches.sharding import Shares
    from meshfold.engine.forward import Forward
    from meshfold.engine.model.recompute import RecomputedBlocks
    from meshfold.engine.states.accumulation import Accumulation
    from meshfold.engine.zero.states import ZeroStates

MOST_RELIEVED = 2
"""How often a capture that runs out of memory makes room, until such steps run eagerly."""


class CapturedZeroSteps:
    """Graphs of the micro-steps of a model in chunks.

    Attributes:
        report: for the user.
    """

    def __init__(
        self,
        forward: Forward,
        states: ZeroStates,
        model: nn.Module,
        device: torch.device,
        blocks: RecomputedBlocks | None,
    ) -> None:
        """Args:
        forward: calls the model.
        states: have its chunks.
        model: whose micro-steps are captured.
        device: where they run.
        blocks: those that recompute; None if none does.
        """
        self._forward, self._states, self._device, self._blocks = forward, states, device, blocks
        self._stream = _stream_of(device) if device.type == "cuda" else None
        self._rules = CaptureRules(forward, states, model, blocks, warns=device.type == "cuda")
        self.report = self._rules.report
        self._relieved = 0
        self._capturing: _Step | None = None
        self._step: _Step | None = None
        self._replays = 0  # of the step that is captured
        free = WeakMethod(self.free)

        def freed(moves: bool) -> None:
            if (call := free()) is not None:
                call(moves=moves)

        states.gemini.free_graphs_by(freed)

    def run(
        self,
        work: Batch,
        shares: Shares,
        kind: BackwardRole | None,
        gradients: Accumulation,
        *,
        in_step: Callable[[Tensor], Tensor],
        eagerly: Callable[[], Tensor],
        relieve: Callable[[], None],
        shown: bool,
    ) -> Tensor:
        """Accumulate a micro-step's gradient, by a replay of graphs if it can be one; return this rank's share of the global loss.

        Args:
            work: the batch, on the device.
            shares: its part of the global batch.
            kind: role of the backward; None: hooks must see this micro-step, so it runs eagerly.
            gradients: since the last optimizer step.
            in_step: returns the factor of the mean loss before backward, from the rank's share.
            eagerly: does the same without graphs.
            relieve: frees memory, after ``states.can_relieve``.
            shown: as for ``gradients.taking``.
        """
        with self._on_its_stream():
            relieves, hooks = False, _hooks_on_saved_tensors()
            if kind is not None and self._replays_it(work, shares.count, kind, first=not gradients.backwards):
                gradients.begin()
                try:
                    share = shares.weight()
                    loss = self._run_forward(work, shares.count, in_step(share))
                    with gradients.taking(kind, shown=shown):
                        self._run_backward()
                    return loss * share
                except Exception as error:
                    gradients.break_off()
                    if not self._gives_up(error):
                        raise
                    relieves = self._states.can_relieve(error) and self._relieved < MOST_RELIEVED
                self._recover(hooks)  # the error is gone, and with it the graph of autograd
                if relieves:
                    self._relieved += 1
                    relieve()
            with self._warming_up():
                return eagerly()

    @contextmanager
    def _on_its_stream(self) -> Iterator[None]:
        """Context manager of a micro-step: on the stream of the graphs."""
        if self._stream is None:
            yield
            return
        outer = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outer)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            outer.wait_stream(self._stream)

    @contextmanager
    def _warming_up(self) -> Iterator[None]:
        """Context manager of a micro-step that runs eagerly."""
        # cuDNN's plans are made for each thread, and none can be made while a graph is captured: see _captures.
        with masks_by_shape(), torch.autograd.set_multithreading_enabled(False):
            yield
        self._rules.ran_eagerly()

    def _replays_it(self, work: Batch, count: Tensor, kind: BackwardRole, *, first: bool) -> bool:
        """Return True if a micro-step is replayed or captured; ``report`` says why not.

        ``first``: it is the first of its optimizer step.
        """
        rules = self._rules
        key, last = rules.key_of(work), rules.key
        if key != last:
            self.free(moves=last is None or key.placement != last.placement)
            rules.begin(key)
        why = rules.why_not(kind, first=first, captured=self._step is not None)
        if not why and self._step is None:
            segments = segments_on(self._device)
            if segments is None:
                why = "a CPU has no CUDA graphs"
            elif not (why := rules.why_draws(work, count)):
                self._capturing = _Step(CapturedMoves(segments))
        rules.say(why)
        return not why

    def _run_forward(self, work: Batch, count: Tensor, weight: Tensor) -> Tensor:
        """Run the forward of a batch with ``count`` targets; return its mean loss, which backward multiplies by ``weight``."""
        if self._capturing is not None:
            return self._capture_forward(self._capturing, work, count, weight)
        step = self._step
        assert step is not None and step.inputs is not None and step.loss is not None  # it was captured
        step.inputs.fill(work, count, weight)
        with self._freed_on_error():
            self._states.gemini.replay(step.moves, backward=False)
        return step.loss.clone()

    def _run_backward(self) -> None:
        """Run the backward, inside ``States.backward``."""
        step = self._capturing
        if step is None:
            assert self._step is not None  # the forward was replayed
            with self._freed_on_error():
                self._states.gemini.replay(self._step.moves, backward=True)
            self._replays += 1
            self.report.replays += 1
            return
        share, step.share = step.share, None
        assert share is not None  # the forward was captured
        with self._captures(step):
            share.backward()
        self._step, self._capturing, self._replays = step, None, 0
        self.report.captures += 1
        self.report.graphs = step.moves.segments

    def _gives_up(self, error: Exception) -> bool:
        """Return True if an error came while a micro-step was captured, which can run eagerly then; say so."""
        if self._capturing is None:
            return False
        self._capturing = None
        first = str(error).strip().partition("\n")[0]
        self._rules.fail(f"it cannot be captured: {type(error).__name__}: {first}")
        return True

    def _recover(self, hooks: object) -> None:
        """Forget a micro-step whose capture raised an error.

        Args:
            hooks: on saved tensors, before the micro-step.

        Raises:
            TrainingError: if a block that was left in the middle still has its hooks, which would save other blocks' tensors.
        """
        gc.collect()  # a checkpoint removes its hooks when nothing refers to its frame; the error's traceback did, in cycles
        self._states.gemini.abandon()
        if _hooks_on_saved_tensors() != hooks:
            raise TrainingError(
                f"cuda_graph=True: {self._rules.failure} The step cannot be repeated without graphs either: leave "
                "cuda_graph out"
            )
        self._empty_cache()
        self._rules.say(self._rules.failure)

    def _capture_forward(self, step: _Step, work: Batch, count: Tensor, weight: Tensor) -> Tensor:
        step.inputs = inputs = Inputs.like(work, count, weight)
        self._states.gemini.begin_capture()
        with self._captures(step):
            loss = self._forward.loss(inputs.work, Counted(inputs.count))
            step.share, step.loss = loss * inputs.weight, loss.detach()
        return step.loss.clone()

    @contextmanager
    def _captures(self, step: _Step) -> Iterator[None]:
        with ExitStack() as inside:
            inside.enter_context(masks_by_shape())
            inside.enter_context(collector_paused())  # what it frees may make calls that no graph can contain
            # A graph is begun and ended by one thread, and hooks of a backward do both. The eager steps before run in it too.
            inside.enter_context(torch.autograd.set_multithreading_enabled(False))
            if self._blocks is not None:
                inside.enter_context(self._blocks.without_random_numbers())
            inside.enter_context(self._states.gemini.capturing(step.moves))
            yield

    @contextmanager
    def _freed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.free()  # it stopped in the middle
            raise

    # -- the graphs' memory -------------------------------------------------------------------------------------

    def free(self, *, moves: bool = False) -> None:
        """Free the graphs with their memory, if there are some; later steps are captured anew.

        Args:
            moves: chunks move, so what was seen of steps before does not count.
        """
        step, self._step = self._step, None
        self._rules.freed(None if step is None else self._replays, moves=moves)
        if step is None:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # copies of gradients may still read its memory
        del step
        self._empty_cache()

    def close(self) -> None:
        """Free the graphs, and capture no more."""
        self.free()
        self._states.gemini.free_graphs_by(None)

    def _empty_cache(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def _hooks_on_saved_tensors() -> object:
    """Return the functions through which autograd saves tensors now; None: it keeps them."""
    top: object = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return top


@functools.cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of a device's graphs, one for all engines: what others launch on it would be captured."""
    return torch.cuda.Stream(device)


@dataclass(eq=False)
class _Step:
    """A captured micro-step.

    Attributes:
        moves: its graphs, and the moves between them.
        inputs: what the graphs read.
        loss: what the forward writes.
        share: whose backward is still to be captured.
    """

    moves: CapturedMoves
    inputs: Inputs | None = None
    loss: Tensor | None = None
    share: Tensor | None = None
