"""Requests: a prompt with the tokens generated after it, and which of its tokens a forward computes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from meshfold.inference.sampling import Sampling
from meshfold.mesh import SpecError


@dataclass(eq=False)
class Request:
    """A prompt and the tokens generated after it.

    Attributes:
        number: of the request, counted from 0 in the order of submission.
        prompt: token ids.
        sampling: settings.
        tokens: the new ones.
        logprobs: of the new tokens.
        finish: why it ended: "length", "stop" or "cancelled"; empty while it runs.
        text: of the new tokens, up to a stop string; only if text was requested.
        evictions: how often its pages were taken away.
        restored: how often they came back from the host.
        shared: tokens at its start whose pages were there already when it was admitted last.
        part: of the rows, where its pages are.
    """

    number: int
    prompt: tuple[int, ...]
    sampling: Sampling
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str = ""
    text: str = ""
    evictions: int = 0
    restored: int = 0
    shared: int = 0
    part: int = 0
    pages: list[int] = field(default_factory=list, repr=False)
    computed: int = field(default=0, repr=False)  # tokens whose keys and values are in pages
    named: int = field(default=0, repr=False)  # full pages whose contents are known
    chain: int = field(default=0, repr=False)
    saved: tuple[int, ...] = field(default=(), repr=False)  # places of its pages on the host
    kept: int = field(default=0, repr=False)  # tokens that these hold

    @property
    def length(self) -> int:
        """Tokens of prompt and text."""
        return len(self.prompt) + len(self.tokens)

    def slice(self, start: int, stop: int) -> Sequence[int]:
        """Return tokens of prompt and text."""
        n = len(self.prompt)
        if stop <= n:
            return self.prompt[start:stop]
        return (*self.prompt[start:], *self.tokens[max(start - n, 0) : stop - n])


@dataclass(frozen=True)
class Span:
    """Tokens of one sequence that a step computes: ``count`` of them from ``start`` on."""

    request: Request
    start: int
    count: int

    @property
    def stop(self) -> int:
        """The position after the last token; the number of tokens that it sees."""
        return self.start + self.count

    @property
    def samples(self) -> bool:
        """True if the next token is new: its logits are needed."""
        return self.stop == self.request.length


@dataclass(frozen=True)
class Step:
    """One forward: sequences with one token each first, then chunks of prompts."""

    decode: tuple[Span, ...]
    prefill: tuple[Span, ...]

    @property
    def spans(self) -> tuple[Span, ...]:
        """All of them, in the order of the rows."""
        return (*self.decode, *self.prefill)


def ids_of(prompt: Iterable[int]) -> tuple[int, ...]:
    """Return a prompt's ids as a tuple.

    Raises:
        SpecError: for an empty one, or one that is not of whole numbers from 0 up.
    """
    if isinstance(prompt, (str, int)):  # a text, or one of the ids of a prompt
        raise SpecError(
            f"a prompt {prompt!r}: give lists of token ids, [[1, 2, 3], ...], such as tokenizer.encode makes of a text"
        )
    ids = tuple(prompt.tolist() if hasattr(prompt, "tolist") else prompt)
    kinds = set(map(type, ids))  # of a prompt there are few, and of tokens many
    if not ids or not all(issubclass(kind, int) and kind is not bool for kind in kinds) or min(ids) < 0:
        raise SpecError(f"a prompt {list(ids[:8])!r}: give at least one token id, whole numbers from 0 up")
    return ids


def append(request: Request, tokens: Sequence[int], logprobs: Sequence[float]) -> int:
    """Add new tokens to a request up to its end, and note the end; return how many it got."""
    stops, count = request.sampling.stop_tokens, len(tokens)
    left = request.sampling.max_new_tokens - len(request.tokens)
    if stops:
        count = next((at + 1 for at, token in enumerate(tokens) if token in stops), count)
    count = min(count, left)
    request.tokens += tokens[:count]
    request.logprobs += logprobs[:count]
    if request.tokens[-1] in stops:
        request.finish = "stop"
    elif count == left:
        request.finish = "length"
    return count
