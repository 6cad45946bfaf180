"""Continuous batching: which tokens of which sequences the next forward computes.

Running sequences get one token in every step. Prompts are computed in chunks in the remaining room, so a long prompt does not stop
other sequences. A waiting sequence is admitted when the pages for its tokens are there. When pages run out, the sequence that came
last gives its own back and waits again, in front. Its keys and values wait on the host if there is room; otherwise its tokens are
computed again later (Kwon et al., arXiv 2309.06180, section 4.5). Neither changes any token.

Where ranks share the rows of a batch, as in 2d, each part of the rows has pages and sequences of its own (:class:`Part`). All ranks
plan for all parts.

Plain Python and deterministic: ranks that make the same calls make the same plans.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from meshfold.inference.pages import Pages
from meshfold.inference.requests import Request, Span, Step, append
from meshfold.mesh import SpecError
from meshfold.mesh.spec import argument_checks as settings


class Store(Protocol):
    """Room for pages elsewhere: :class:`meshfold.inference.host_pages.HostPages`."""

    def save(self, pages: Sequence[int]) -> tuple[int, ...]:
        """Copy pages; return their places, none if there is no room for all."""

    def load(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        """Copy from places into pages."""

    def free(self, slots: Sequence[int]) -> None:
        """Give places back."""


@dataclass(frozen=True)
class Part:
    """The pool of the ranks that have one part of a batch's rows in attention.

    Attributes:
        pages: of this pool.
        store: takes the pages of evicted sequences; None: their tokens are computed anew.
    """

    pages: Pages
    store: Store | None = None


class Scheduler:
    """Queue of requests over the pages of one pool, or of one for each part of the rows."""

    def __init__(self, parts: Sequence[Part], *, most_rows: int, chunk: int, share: bool = True) -> None:
        """Args:
        parts: of the rows, at least one, with equally many pages each.
        most_rows: sequences that run at once; each part takes an equal share, rounded up.
        chunk: tokens that one step computes at most, of all parts.
        share: sequences of one part that begin with the same tokens use the same pages.
        """
        self.parts, self.share = tuple(parts), share
        self.most_rows, self.chunk = settings.count("most_rows", most_rows), settings.count("chunk", chunk)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in the order in which they came
        if chunk < most_rows:
            raise SpecError(
                f"chunk={chunk}, most_rows={most_rows}: a step has a token for each row; write chunk={most_rows}"
            )
        self._rows = -(-most_rows // len(self.parts))
        self._tokens = max(chunk // len(self.parts), self._rows)
        self._size = self.parts[0].pages.size

    @property
    def busy(self) -> bool:
        """True while some request has not ended."""
        return bool(self.waiting or self.running)

    @property
    def used_pages(self) -> int:
        """Pages that some sequence uses, of all parts."""
        return sum(part.pages.used for part in self.parts)

    def forget(self) -> None:
        """Forget what pages hold, as the weights may change."""
        for part in self.parts:
            part.pages.forget()

    def submit(self, request: Request) -> None:
        """Put a request at the end of the queue.

        Raises:
            SpecError: if it would not fit into an empty pool.
        """
        most = len(request.prompt) + request.sampling.max_new_tokens - 1  # the last token is never looked at
        pages = self.parts[0].pages
        if pages.needed(most) > pages.count:
            room = pages.count * pages.size
            each = f" for each of the {len(self.parts)} parts of the rows" if len(self.parts) > 1 else ""
            raise SpecError(
                f"a request of {len(request.prompt)} tokens with max_new_tokens={request.sampling.max_new_tokens} takes "
                f"{pages.needed(most)} pages, and there are {pages.count}{each}: together they may have {room + 1} tokens; "
                f"give more pages, or max_new_tokens={max(room + 1 - len(request.prompt), 1)}"
            )
        self.waiting.append(request)

    def plan(self) -> Step:
        """Return what the next forward computes; pages for it are taken. Empty if there is nothing to do."""
        decode: list[Span] = []
        prefill: list[Span] = []
        left = [self._tokens] * len(self.parts)
        evicted: set[int] = set()  # parts that are full
        for request in [r for r in self.running if r.length - r.computed == 1]:
            if not request.pages:
                continue  # evicted for one that came earlier
            if self._grow(request, request.length):
                decode.append(Span(request, request.computed, 1))
                left[request.part] -= 1
            else:
                evicted.add(request.part)
        for request in [r for r in self.running if r.length - r.computed > 1]:
            if left[request.part]:
                prefill.append(self._chunk(request, left[request.part]))
                left[request.part] -= prefill[-1].count
        while self.waiting:
            request = self.waiting[0]
            open_parts = [part for part in self._open_parts(request) if left[part] and part not in evicted]
            if not any(self._admit(request, part) for part in open_parts):
                break
            self.running.append(self.waiting.popleft())
            prefill.append(self._chunk(request, left[request.part]))
            left[request.part] -= prefill[-1].count
        return Step(tuple(decode), tuple(prefill))

    def _open_parts(self, request: Request) -> list[int]:
        """Return the parts that may take one more sequence, those with the fewest first; only its own if its keys wait there."""
        counts = [sum(r.part == part for r in self.running) for part in range(len(self.parts))]
        found = [part for part, count in enumerate(counts) if count < self._rows]
        return [part for part in sorted(found, key=counts.__getitem__) if not request.saved or part == request.part]

    def _chunk(self, request: Request, most: int) -> Span:
        span = Span(request, request.computed, min(request.length - request.computed, most))
        # Others may share pages that this step fills: in each layer it writes keys before it reads any.
        self._name(request, span.stop)
        return span

    def ahead(self, step: Step, most: int) -> int:
        """Return the number of steps, up to ``most``, that the sequences of a step can continue without a new plan.

        Pages for their tokens are taken. 1 if a prompt is being computed, or a waiting sequence could start soon.
        """
        if step.prefill or (self.waiting and self._open_parts(self.waiting[0])):
            return 1
        steps = min(most, max(_left(span) for span in step.decode))
        while steps > 1:
            wanted = [(span.request, self._wanted(span, steps)) for span in step.decode]
            if self._fits(wanted):
                for request, count in wanted:
                    if count:
                        request.pages += self._pages(request).take(count)
                break
            steps -= 1
        return steps

    def follow(self, step: Step, steps: int, most: int) -> tuple[Step, int] | None:
        """Return what comes behind the ``steps`` of :meth:`ahead` before it is known what they compute, and its number of steps.

        Pages for its tokens are taken. None if nothing is left to compute, or a plan would do something else. What it computes of
        sequences that end before is dropped.
        """
        if any(span.request.finish for span in step.decode) or all(_left(span) <= steps for span in step.decode):
            return None
        following = Step(tuple(Span(span.request, span.start + steps, 1) for span in step.decode), ())
        count = self.ahead(following, most)
        return (following, count) if count > 1 else None  # of a single one it does not know whether there is a page

    def _fits(self, wanted: Sequence[tuple[Request, int]]) -> bool:
        """Return True if each part has so many more pages for its sequences."""
        counts = [0] * len(self.parts)
        for request, count in wanted:
            counts[request.part] += count
        return all(count <= part.pages.available for count, part in zip(counts, self.parts, strict=True))

    def commit(self, step: Step, tokens: Sequence[int], logprobs: Sequence[float]) -> list[Request]:
        """Record what a step has computed.

        Args:
            tokens, logprobs: new ones, of the spans that sample, in their order.

        Returns:
            Requests that have ended by it; their pages are released.
        """
        new, ended = iter(zip(tokens, logprobs, strict=True)), []
        for span in step.spans:
            request, samples = span.request, span.samples
            request.computed = span.stop
            self._name(request, span.stop)
            if samples:
                token, logprob = next(new)
                append(request, [token], [logprob])
                if request.finish:
                    ended.append(request)
        for request in ended:
            self.remove(request)
        return ended

    def commit_ahead(
        self, step: Step, tokens: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]]
    ) -> list[int]:
        """Record a step of single tokens and those that followed it, as :meth:`commit` does one by one, but at once.

        Args:
            step: the first of them.
            tokens, logprobs: ``steps b``, of all its sequences; what comes after a sequence's end is dropped.

        Returns:
            How many tokens each sequence got.
        """
        counts = []
        for span, new, new_logprobs in zip(
            step.decode, zip(*tokens, strict=True), zip(*logprobs, strict=True), strict=True
        ):
            request = span.request
            counts.append(append(request, new, new_logprobs))
            request.computed = span.start + counts[-1]
            self._name(request, request.computed)
        for span in step.decode:
            if span.request.finish:
                self.remove(span.request)
        return counts

    def next_step(self, step: Step) -> Step:
        """Return the step that follows one of single tokens without a new plan: those that have not ended, a token further."""
        spans = (span for span in step.decode if not span.request.finish)
        return Step(tuple(Span(s.request, s.request.computed, 1) for s in spans), ())

    def finish(self, request: Request, reason: str) -> None:
        """End a request that runs or waits."""
        request.finish = reason
        if request in self.waiting:
            self.waiting.remove(request)
            self._drop_saved(request)
        else:
            self.remove(request)

    def remove(self, request: Request) -> None:
        """Take a request that has ended out of the running ones, and release its pages."""
        self.running.remove(request)
        self._drop_pages(request)

    def clear(self) -> None:
        """Drop all requests, and what pages hold."""
        for request in (*self.running, *self.waiting):
            request.finish = "cancelled"
            self._drop_saved(request)
        for request in self.running:
            self._drop_pages(request)
        self.running, self.waiting = [], deque()
        self.forget()

    # -- pages ----------------------------------------------------------------------------------------------------

    def _pages(self, request: Request) -> Pages:
        return self.parts[request.part].pages

    def _wanted(self, span: Span, steps: int) -> int:
        """Return how many more pages a sequence needs for so many tokens; it never has more than its request allows."""
        request, stop = span.request, span.start + steps
        if stop <= len(request.pages) * self._size:
            return 0
        most = len(request.prompt) + request.sampling.max_new_tokens - 1
        return max(self._pages(request).needed(min(stop, most)) - len(request.pages), 0)

    def _admit(self, request: Request, part: int) -> bool:
        """Take pages of a part for all tokens of a request; False if there are not enough."""
        pages, store = self.parts[part].pages, self.parts[part].store
        shared, chain = pages.share(request.slice(0, request.length)) if self.share else ([], 0)
        more = pages.needed(request.length) - len(shared)
        if more > pages.available:
            pages.release(shared)
            return False
        request.part, request.pages = part, [*shared, *pages.take(more)]
        request.computed = request.shared = len(shared) * self._size
        request.named, request.chain = len(shared), chain
        if store is not None and request.kept > request.computed:
            store.load(request.saved[len(shared) :], request.pages[len(shared) : len(request.saved)])
            request.computed = request.kept
            request.restored += 1
        self._drop_saved(request)
        return True

    def _grow(self, request: Request, tokens: int) -> bool:
        """Take pages for so many tokens, from those that came later if there is no other way; False if it had to go itself."""
        if tokens <= len(request.pages) * self._size:
            return True
        pages = self._pages(request)
        more = pages.needed(tokens) - len(request.pages)
        while more > pages.available:
            last = next(r for r in reversed(self.running) if r.part == request.part)
            self._evict(last)
            if last is request:
                return False
        if more > 0:
            request.pages += pages.take(more)
        return True

    def _evict(self, request: Request) -> None:
        self.running.remove(request)
        pages, store = self.parts[request.part].pages, self.parts[request.part].store
        if store is not None and request.computed:
            request.saved = store.save(request.pages[: pages.needed(request.computed)])
            request.kept = request.computed if request.saved else 0
        self._drop_pages(request)
        request.evictions += 1
        self.waiting.appendleft(request)

    def _drop_pages(self, request: Request) -> None:
        self._pages(request).release(request.pages)
        request.pages, request.computed, request.named, request.chain = [], 0, 0, 0

    def _drop_saved(self, request: Request) -> None:
        store = self.parts[request.part].store
        if store is not None and request.saved:
            store.free(request.saved)
        request.saved, request.kept = (), 0

    def _name(self, request: Request, computed: int) -> None:
        size = self._size
        if not self.share or computed < (request.named + 1) * size:
            return
        for page in range(request.named, min(computed, request.length) // size):
            tokens = request.slice(page * size, (page + 1) * size)
            request.chain = self._pages(request).remember(request.chain, tokens, request.pages[page])
            request.named = page + 1


def _left(span: Span) -> int:
    """Return how many tokens a sequence may still get from a span on."""
    request = span.request
    return len(request.prompt) + request.sampling.max_new_tokens - span.stop
