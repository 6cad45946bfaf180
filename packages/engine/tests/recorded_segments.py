"""Stand-in for CUDA graphs on a CPU: a segment is the list of its operators, which a replay runs again into the same tensors.

As under a graph, a replay runs no Python of the model and of hooks, and reads and writes the tensors of the captured step. Its
tensors are all kept, so two that share memory under a graph do not share it here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from meshfold.engine.zero import captured_step
from meshfold.zero_gemini import norm
from meshfold.zero_gemini.memory.arena import Block


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default):
            raise RuntimeError("operation not permitted when stream is capturing")
        out = func(*args, **kwargs)
        known = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        # A parameter is another tensor when its chunk is gathered: keep what it is now.
        args, kwargs = tree_map_only(Tensor, Tensor.detach, (args, kwargs))
        made = [x.detach() if isinstance(x, Tensor) else None for x in tree_leaves(out)]
        fresh = [x is not None and x.untyped_storage().data_ptr() not in known for x in made]

        def again() -> None:
            for old, new, is_fresh in zip(made, tree_leaves(func(*args, **kwargs)), fresh, strict=True):
                if is_fresh and old is not None:
                    old.copy_(new)

        self.calls.append(again)
        return out


class RecordedSegments:
    """See :class:`meshfold.zero_gemini.Segments`."""

    def __init__(self) -> None:
        self._recorder = _Recorder()  # one for all: every node of a backward runs in the modes of its beginning
        self.is_open = False
        self.aliases: list[tuple[int, int]] = []

    def begin(self) -> None:
        assert not self.is_open, "a segment is open"
        self.is_open, self._recorder.calls = True, []
        self._recorder.__enter__()

    def end(self) -> Callable[[], None]:
        assert self.is_open, "no segment is open"
        self.is_open, calls = False, self._recorder.calls
        self._recorder.__exit__(None, None, None)

        def replay() -> None:
            with torch.no_grad():
                for call in calls:
                    call()

        return replay

    def break_off(self) -> None:
        self.end()

    def alias(self, tensor: Tensor) -> Tensor:
        self.aliases.append((tensor.data_ptr(), tensor.numel()))
        return tensor.detach()


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[RecordedSegments]]:
    """Context manager: engines capture on a CPU, in these segments. Chunks keep their memory, as the pool of graphs keeps it."""
    made: list[RecordedSegments] = []

    def segments(device: torch.device) -> RecordedSegments:
        made.append(RecordedSegments())
        return made[-1]

    with monkeypatch.context() as patch:
        patch.setattr(captured_step, "segments_on", segments)
        patch.setattr(Block, "empty", lambda block: None)
        patch.setattr(norm, "_KERNELS", {})  # kernels of numba are no operators
        yield made
