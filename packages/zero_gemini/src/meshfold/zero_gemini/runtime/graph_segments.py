"""CUDA graphs of a step in segments, all in one pool of memory: between two segments the host may wait and queue copies.

A graph cannot wait for the host, and the host's optimizer has new parameters only when they are needed. So a captured step is not
one graph. It is cut where chunks are moved.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor


class Segments(Protocol):
    """Captures pieces of a step, one after the other, while they are run."""

    def begin(self) -> None:
        """Start to capture a segment on the current stream."""

    def end(self) -> Callable[[], None]:
        """End the segment that was begun, which has run once after this call. Return the function that runs it again."""

    def break_off(self) -> None:
        """End a segment that was begun, without running it, after an error."""

    def alias(self, tensor: Tensor) -> Tensor:
        """Return a tensor at the same address that does not keep the memory: a later part of the step may use it too."""


GAPS = 0.1
"""Share by which a pool's first piece may exceed what a step allocates, if the process has memory left."""

_broken: list[torch.cuda.CUDAGraph] = []
"""Graphs that were broken off: torch's allocator of host memory still refers to them."""


class CudaSegments:
    """Segments as CUDA graphs (:class:`Segments`).

    All of them allocate in one pool. What a segment frees a later one may take, so they must be run in the order in which they were
    captured, on one stream. A captured segment has not run: it is launched at once, so that what comes after it sees its results.
    """

    def __init__(self, device: torch.device, peak: int = 0) -> None:
        """Args:
        device: the GPU.
        peak: bytes that were allocated at the peak of such a step; 0: unknown.
        """
        self._device, self._peak = device, peak
        self._open: torch.cuda.CUDAGraph | None = None
        self._pool: Any = None  # made when the first segment begins
        self._first: Callable[[], None] | None = None  # a graph for which the pool keeps its first piece

    def begin(self) -> None:
        if self._pool is None:
            self._take_pool()
        graph = torch.cuda.CUDAGraph()
        # Other threads step chunks and save checkpoints meanwhile.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._open = graph

    def _take_pool(self) -> None:
        """Free cached memory for the pool, which begins with all that the step needs in one piece, as far as the process may.

        torch does not let the pieces of such a pool grow, and pieces of different sizes would leave gaps. Nothing else can use the
        pool's memory, so it is taken when the first segment begins.
        """
        torch.cuda.synchronize(self._device)
        gc.collect()  # no tensor of an earlier step may be freed while a graph is captured
        torch.cuda.empty_cache()
        self._pool = torch.cuda.graph_pool_handle()
        more = self._peak - torch.cuda.memory_allocated(self._device)
        if more <= 0:
            return
        room = _available_bytes(self._device)
        gaps = int(max(0, min(GAPS * more, (room - more) / 2)))
        self.begin()
        with contextlib.suppress(torch.OutOfMemoryError):
            _allocate(min(more + gaps, room), self._device)
        self._first = self.end()
        torch.cuda.reset_peak_memory_stats(self._device)  # the piece does not count as a step's peak

    def end(self) -> Callable[[], None]:
        graph, self._open = self._open, None
        assert graph is not None  # begun before
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")  # two moves without compute between
            graph.capture_end()
        graph.replay()
        return graph.replay

    def break_off(self) -> None:
        graph, self._open = self._open, None
        if graph is None:
            return
        with contextlib.suppress(RuntimeError):  # the error that broke it off is reported
            graph.capture_end()
            return
        # torch stops there: its allocators still ask this graph what to allocate for it, the pool waits for its end, and the
        # generator of random numbers refuses to draw outside of a capture, until another one has ended.
        _broken.append(graph)
        place = torch.cuda.current_device() if self._device.index is None else self._device.index
        for end in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
            with contextlib.suppress(RuntimeError):
                end(place, self._pool)
        with contextlib.suppress(RuntimeError), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
            whole = torch.cuda.CUDAGraph()
            whole.capture_begin(capture_error_mode="thread_local")
            whole.capture_end()

    def alias(self, tensor: Tensor) -> Tensor:
        # As torch._inductor.cudagraph_trees does for the outputs of its graphs.
        storage = tensor.untyped_storage()
        memory = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
        there = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return there.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())


def segments_on(device: torch.device) -> Segments | None:
    """Return what captures segments on a device; None on a CPU, which has no graphs.

    Call it after a step like the one that is captured, and before torch's peak of memory is reset: the pool has that size.
    """
    if device.type != "cuda":
        return None
    return CudaSegments(device, torch.cuda.max_memory_allocated(device))


def _allocate(nbytes: int, device: torch.device) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def _available_bytes(device: torch.device) -> int:
    """Return what this process may still take of a GPU, less what small tensors and libraries need."""
    free, total = torch.cuda.mem_get_info(device)
    allowed = torch.cuda.get_per_process_memory_fraction(device) * total - torch.cuda.memory_reserved(device)
    return max(1, int(0.97 * min(free, allowed)))
