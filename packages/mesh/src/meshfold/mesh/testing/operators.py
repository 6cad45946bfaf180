"""Count the operators that run in a test's block: the same numbers on every machine."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Operators(TorchDispatchMode):
    """Context manager: counts the operators of its block, those of backward passes in it too.

    Attributes:
        seen: how often each ran, by its name, such as ``"mm"`` or ``"add_"``.
        largest: the elements of the largest tensor that one of them returned.

    >>> with Operators() as operators:
    ...     _ = torch.zeros(2, 3) @ torch.zeros(3, 5)
    >>> operators.seen["mm"], operators.largest
    (1, 15)
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: Counter[str] = Counter()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.seen[func.overloadpacket.__name__] += 1
        self.largest = max(self.largest, *(one.numel() for one in tree_leaves(found) if isinstance(one, Tensor)), 0)
        return found
