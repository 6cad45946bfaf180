"""One read or write of a block on its way, and what its caller holds."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from torch import Tensor

from meshfold.zero_gemini.errors import DiskError
from meshfold.zero_gemini.nvme.layout import BlockPlace
from meshfold.zero_gemini.nvme.memory import Bytes


@dataclass(eq=False)
class Request:
    """A read or write of one whole block, done in pieces. `tensor` keeps the memory of `data` alive."""

    place: BlockPlace
    writes: bool
    data: Bytes
    tensor: Tensor | None
    left: int = 0
    error: DiskError | None = None
    finished: threading.Event = field(default_factory=threading.Event)


class Pending:
    """A read or write that was started. Until `wait` returns, a source must not be changed nor a target be read."""

    def __init__(self, request: Request) -> None:
        self._request = request

    def done(self) -> bool:
        """Return whether `wait` would return, or raise, at once."""
        return self._request.finished.is_set()

    def wait(self) -> None:
        """Return once the block is in the file (write) or in the tensor (read). May be called again.

        Raises:
            DiskError: names the file, the block and the reason (its ``errno`` is that of the system). The source of a
                failed write is untouched; the target of a failed read holds anything.
        """
        self._request.finished.wait()
        if self._request.error is not None:
            raise self._request.error
