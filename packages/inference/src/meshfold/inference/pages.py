"""Accounting of pages: free pages, the users of each page, and pages with tokens that another sequence may share.

A page has room for the keys and values of ``size`` tokens in every attention layer of a rank. Only whole pages are shared. The keys
of a token depend only on the tokens before it, so the previous page and its own tokens identify a page. Two sequences that begin
with the same tokens use the same pages. No page is ever written by two sequences, so nothing is copied.

Everything here is plain Python and deterministic: ranks that make the same calls get the same pages.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from meshfold.mesh import MeshfoldError
from meshfold.mesh.spec import argument_checks as settings


class OutOfPages(MeshfoldError):
    """More pages were requested than are free."""


class Pages:
    """Allocator of pages with reference counts.

    A page is *used* (by one or more sequences), *idle* (no user, but its tokens are known and may be needed again) or *free*. When
    no page is free, the idle page that has been so for longest is taken.
    """

    def __init__(self, count: int, size: int) -> None:
        """Args:
        count: pages there are.
        size: tokens of a page.
        """
        self.count, self.size = settings.count("pages", count), settings.count("page_size", size)
        self._free = list(range(count - 1, -1, -1))
        self._users = [0] * count
        self._idle: OrderedDict[int, None] = OrderedDict()  # the one that has been idle for longest first
        self._known: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}  # -> (its number as a parent, page)
        self._key_of: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._last = 0

    @property
    def available(self) -> int:
        """Pages that can be taken now: free and idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        """Pages that some sequence uses."""
        return self.count - self.available

    def users(self, page: int) -> int:
        """Return the number of sequences that use a page."""
        return self._users[page]

    def needed(self, tokens: int) -> int:
        """Return how many pages so many tokens take."""
        return -(-tokens // self.size)

    def take(self, count: int) -> list[int]:
        """Return ``count`` pages for one sequence, with nothing in them that counts.

        Raises:
            OutOfPages: if fewer are available; none is taken then.
        """
        if count > self.available:
            raise OutOfPages(f"{count} pages wanted, {self.available} of {self.count} available")
        taken = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._idle.popitem(last=False)
                self._unname(page)
            self._users[page] = 1
            taken.append(page)
        return taken

    def share(self, tokens: Sequence[int]) -> tuple[list[int], int]:
        """Use the known pages that hold the first tokens of a sequence.

        At least one token is left over, since the last one has to be computed for its logits.

        Returns:
            The pages, each with one more user, and the number that :meth:`remember` takes as ``parent`` of the next page.
        """
        found, parent = [], 0
        for start in range(0, len(tokens) - self.size, self.size):
            entry = self._known.get((parent, tuple(tokens[start : start + self.size])))
            if entry is None:
                break
            parent, page = entry
            self._idle.pop(page, None)
            self._users[page] += 1
            found.append(page)
        return found, parent

    def remember(self, parent: int, tokens: Sequence[int], page: int) -> int:
        """Make the contents of a full page known, so that others may share it.

        Args:
            parent: what this returned for the page before; 0 for the first page.
            tokens: of the page.
            page: a page in use.

        Returns:
            The number of this run of tokens, the ``parent`` of the next page.
        """
        key = (parent, tuple(tokens))
        if key in self._known:  # computed twice, by two sequences at once: the first page is the one to share
            return self._known[key][0]
        self._last += 1
        self._known[key] = (self._last, page)
        self._key_of[page] = key
        return self._last

    def release(self, pages: Sequence[int]) -> None:
        """Drop one user of each page of a sequence. The last pages are reused first, as fewer sequences share them."""
        for page in reversed(pages):
            if self._users[page] < 1:
                raise MeshfoldError(f"page {page} is released more often than it was taken")
            self._users[page] -= 1
            if not self._users[page]:
                if page in self._key_of:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def forget(self) -> None:
        """Forget what pages hold, as the weights have changed: none is shared any more with sequences to come."""
        for page in list(self._key_of):
            self._unname(page)
        self._free.extend(self._idle)
        self._idle.clear()

    def _unname(self, page: int) -> None:
        del self._known[self._key_of.pop(page)]
