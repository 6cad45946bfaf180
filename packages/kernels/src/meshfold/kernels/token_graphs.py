"""CUDA graphs of a generated token: the fastest of a few ways to launch its kernels that gives the same results.

A plain graph is compared with one whose kernels begin early, and with such as fetch weights ahead beside either.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from meshfold.kernels.overlap import overlapped_launches
from meshfold.kernels.weights_ahead import WeightsAhead

_TRIES = 3
_TOKENS = 4
"""In a row, for a time: ranks that share a model begin a single one at different moments."""
_tried: deque[str] = deque(maxlen=64)


def tried_graphs() -> list[str]:
    """Return a line about each of the newest graphs that were tried in this process, with their times."""
    return list(_tried)


@dataclass(frozen=True, eq=False)
class TokenGraphs:
    """Graphs of one token, which are tried from one state.

    Attributes:
        advance: launches the token's kernels.
        changing: tensors that it changes; from equal values it writes the same everywhere else too.
        before: their values, from which all graphs start.
        ids: of changing, what the token begins with: another leaves other values wherever a kernel could read too early.
        found: returns what graphs must have alike.
        agree: returns whether all ranks that share the model say yes.
    """

    advance: Callable[[], None]
    changing: Sequence[Tensor]
    before: Sequence[Tensor]
    ids: Tensor
    found: Callable[[], Tensor]
    agree: Callable[[bool], bool]

    def fastest(self, plain: torch.cuda.CUDAGraph) -> torch.cuda.CUDAGraph:
        """Return the fastest graph that gives the same results as the plain one, which it may be itself."""
        best = self._faster(plain, lambda: self._made(WeightsAhead(), early=True), "begin early")
        ahead = WeightsAhead()
        self.restore()
        with ahead.token():  # records its products
            self.advance()
        for early in (False, True) if ahead.fetches else ():
            what = "fetch weights ahead" + " and begin early" * early
            best = self._faster(best, lambda early=early: self._made(ahead, early=early), what)  # type: ignore[misc]
        if not ahead.fetches:
            _tried.append("no graph whose kernels fetch weights ahead: no kernel of this token has weights to fetch")
        return best

    @staticmethod
    def capture(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Return a CUDA graph of what a function launches."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads watch ranks
            run()
        return graph

    def restore(self) -> None:
        """Put back the state from before."""
        for part, value in zip(self.changing, self.before, strict=True):
            part.copy_(value)

    def _made(self, ahead: WeightsAhead, *, early: bool) -> torch.cuda.CUDAGraph:
        """Return a graph whose kernels fetch what ``ahead`` has recorded, and begin early or not."""

        def token() -> None:
            with ahead.token() if ahead.fetches else nullcontext():
                self.advance()

        with overlapped_launches() if early else nullcontext():
            self.restore()
            token()  # compiles
            if ahead.problem:
                raise RuntimeError(ahead.problem)
            return self.capture(token)

    def _faster(
        self, graph: torch.cuda.CUDAGraph, make: Callable[[], torch.cuda.CUDAGraph], what: str
    ) -> torch.cuda.CUDAGraph:
        """Return another graph if all ranks find that it is faster than this one and gives the same results.

        Args:
            graph: the one that stays otherwise.
            make: returns the other.
            what: the other's kernels do.
        """
        other, reason = None, ""
        try:
            other = make()
        except Exception as problem:  # of Triton's compiler, or of a driver that captures no such launch
            reason = (str(problem) or type(problem).__name__).strip().split("\n")[0]
        if not self.agree(other is not None) or other is None:
            warnings.warn(f"kernels of a token do not {what}, which is slower: {reason or 'on a rank'}", stacklevel=5)
            _tried.append(f"a graph whose kernels {what}: none, {reason or 'because of another rank'}")
            return graph
        times, found = [float("inf")] * 2, [self.ids] * 2
        for _ in range(_TRIES):
            for i, each in enumerate((graph, other)):
                self.restore()
                self.ids.zero_()
                each.replay()
                self.restore()
                times[i] = min(times[i], gpu_ms(each.replay, self.restore))
                found[i] = self.found()
        same = torch.equal(*found)
        if not same:
            warnings.warn(f"kernels of a token that {what} choose other words; they are not taken", stacklevel=5)
        taken = self.agree(same and times[1] < times[0])
        verdict = "taken" if taken else "left" if same else "left: it chooses other words"
        _tried.append(
            f"a graph whose kernels {what}: {times[1]:.4f} ms a token, {times[0]:.4f} ms by the best before: {verdict}"
        )
        return other if taken else graph


def gpu_ms(run: Callable[[], None], restore: Callable[[], None]) -> float:
    """Return the milliseconds that a GPU takes for a token in a row of them.

    Args:
        run: launches a token.
        restore: puts back the state from before it.
    """
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(_TOKENS):
        restore()
        run()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / _TOKENS
