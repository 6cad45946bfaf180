"""Choice of the next token: all rows of a batch at once, on the device, each with settings and random numbers of its own.

The random numbers of a token are a function of (seed of the request, position, word of the vocabulary), see
:mod:`meshfold.kernels.random_bits`. A word is drawn as the one with the largest ``logit / temperature - log(e)``, ``e`` being
exponentially distributed (the Gumbel trick: Maddison, Tarlow, Minka, "A* sampling", 2014). So a draw depends neither on other rows
of the batch nor on ranks. Up to rounding, a request gets the same tokens by itself, in a full batch, and under every spec.

Order of operations, the same as in transformers: repetition penalty (Keskar et al., arXiv 1909.05858), temperature, top-k, top-p
(Holtzman et al., arXiv 1904.09751), min-p (arXiv 2407.01082).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshfold.kernels import choose_words, log_exponential, merge_words, random_bits, random_stream, word_parts
from meshfold.mesh import SpecError
from meshfold.mesh.random import key_of
from meshfold.mesh.spec import argument_checks as settings
from meshfold.tensor_parallel.few_rows import SplitWords

_KEY, _WORD, _REQUEST = (key_of(f"meshfold.inference.{name}") for name in ("position", "word", "request"))
_OFF = 1 << 30
_COLDEST = 1e-30
"""smallest temperature above 0: logits divided by a smaller one are infinite in float32"""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings of one request.

    Attributes:
        max_new_tokens: most tokens that are added.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: draw from the k likeliest words; None: from all.
        top_p: draw from the likeliest words that together have this probability.
        min_p: draw from words at least this many times as likely as the likeliest.
        repetition_penalty: divides positive logits of words that the sequence has already, multiplies negative ones.
        stop_tokens: ids that end the text; the one that does is its last token.
        stop: strings that end the text; they are cut off it, their tokens are kept.
        seed: of the request's random numbers.

    Raises:
        SpecError: for settings out of range.
    """

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_tokens: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        settings.count("max_new_tokens", self.max_new_tokens)
        if not (self.temperature == 0.0 or _COLDEST <= self.temperature < math.inf):
            raise SpecError(
                f"temperature={self.temperature!r}: a number from {_COLDEST:g} up, or 0 for the likeliest token"
            )
        if self.top_k is not None:
            settings.count("top_k", self.top_k)
        if not 0.0 < self.top_p <= 1.0:
            raise SpecError(f"top_p={self.top_p!r}: a probability above 0, at most 1")
        if not 0.0 <= self.min_p <= 1.0:
            raise SpecError(f"min_p={self.min_p!r}: a share of the largest probability, from 0 to 1")
        settings.positive("repetition_penalty", self.repetition_penalty)
        for name in ("stop_tokens", "stop"):
            if isinstance(getattr(self, name), str | int):
                raise SpecError(f"{name}={getattr(self, name)!r}: give a tuple, ({getattr(self, name)!r},)")
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for token in self.stop_tokens:
            settings.count("stop_tokens", token, least=0)
        if not all(isinstance(text, str) and text for text in self.stop):
            raise SpecError(f"stop={self.stop!r}: strings of at least one character")

    @property
    def truncates(self) -> bool:
        """True if some words cannot be drawn."""
        return self.temperature > 0 and (self.top_k is not None or self.top_p < 1.0 or self.min_p > 0.0)


@dataclass(frozen=True, kw_only=True)
class SamplingRows:
    """Settings of the rows of a batch as tensors ``b`` on the device, and the parts of the work that any row needs.

    Attributes:
        drawn: bool, rows that draw at random.
        divisor: of the logits: the temperature, or 1 for rows that do not draw.
        draws: some row draws at random.
        truncates: some row has top-k, top-p or min-p.
        penalizes: some row has a repetition penalty.
    """

    drawn: Tensor
    divisor: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    penalty: Tensor
    seed: Tensor
    draws: bool
    truncates: bool
    penalizes: bool

    @property
    def plain(self) -> bool:
        """True if a choice needs nothing but logits, temperatures and random numbers: ranks may split the words."""
        return not self.truncates and not self.penalizes

    @property
    def parts(self) -> tuple[bool, bool, bool]:
        """The parts of the work that are done; a captured graph depends on them."""
        return self.draws, self.truncates, self.penalizes


def sampling_rows(rows: Sequence[Sampling], device: torch.device) -> SamplingRows:
    """Return the settings of some requests as tensors, a row each."""
    numbers = torch.tensor(
        [[s.temperature, s.top_p, s.min_p, s.repetition_penalty] for s in rows], dtype=torch.float64
    ).to(device)
    whole = torch.tensor([[_OFF if s.top_k is None else s.top_k, _signed(s.seed)] for s in rows], dtype=torch.int64).to(
        device
    )
    drawn = numbers[:, 0] > 0
    return SamplingRows(
        drawn=drawn,
        divisor=torch.where(drawn, numbers[:, 0], 1.0),
        top_p=numbers[:, 1],
        min_p=numbers[:, 2],
        penalty=numbers[:, 3],
        top_k=whole[:, 0],
        seed=whole[:, 1],
        draws=any(s.temperature > 0 for s in rows),
        truncates=any(s.truncates for s in rows),
        penalizes=any(s.repetition_penalty != 1.0 for s in rows),
    )


def sample(
    logits: Tensor, positions: Tensor, rows: SamplingRows, seen: Tensor | None = None, words: SplitWords | None = None
) -> tuple[Tensor, Tensor]:
    """Choose the next token of every row.

    Args:
        logits: ``b v``.
        positions: ``b`` int64, the place that the new token will have in its sequence.
        rows: settings.
        seen: ``b v`` bool, words that a row has already; needed if some row has a repetition penalty.
        words: logits are of these; no row may have a penalty or be truncated then. None: of all words.

    Returns:
        Tokens ``b`` int64, and their log-probs ``b`` in float32 (float64 for float64 logits): those of the model at the row's
        temperature (at 1 where it is 0), before any penalty and truncation. A trainer computes the same for these tokens.
    """
    drawn, divisor = rows.drawn, rows.divisor
    states = _states(rows.seed, positions) if rows.draws else None
    if rows.plain:
        noise = (states, drawn if rows.draws else None)
        if words is None:
            return choose_words(logits, divisor, *noise)
        return merge_words(words.gathered(word_parts(logits[:, : words.count], divisor, words.first, *noise)))
    top, total = word_parts(logits, divisor)[:, 3:].unbind(1)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    divisor = divisor.to(wide.dtype).unsqueeze(1)
    scores = wide / divisor
    chosen = scores
    if rows.penalizes and seen is not None:
        penalty = rows.penalty.to(wide.dtype).unsqueeze(1)
        chosen = torch.where(seen, torch.where(wide < 0, wide * penalty, wide / penalty), wide) / divisor
    if rows.truncates:
        chosen = truncated(chosen, rows)
    if states is not None:
        chosen = torch.where(drawn.unsqueeze(1), chosen - log_exponential(states, chosen.shape[-1]), chosen)
    tokens = chosen.argmax(-1)
    return tokens, scores.gather(1, tokens.unsqueeze(1)).squeeze(1) - top - total.log()


def _signed(seed: int) -> int:
    """Return the int64 with the same 64 bits."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


def request_seed(seed: int, number: int) -> int:
    """Return the seed of the ``number``-th of many requests that are made with one seed."""
    return int(random_bits(seed, _REQUEST, torch.tensor(number)))


def truncated(scores: Tensor, rows: SamplingRows) -> Tensor:
    """Return scores with -inf for words that top-k, top-p and min-p leave out; words as likely as one that stays stay too."""
    ordered = scores.sort(-1, descending=True).values
    last = (rows.top_k.clamp(max=scores.shape[-1]) - 1).unsqueeze(1)
    least = ordered.gather(1, last)
    ordered = ordered.masked_fill(ordered < least, -torch.inf)
    before = torch.softmax(ordered, -1).cumsum(-1).roll(1, -1)  # probability of the likelier words
    before[:, 0] = -1.0  # the likeliest always stays
    inside = (before < rows.top_p.unsqueeze(1).to(scores.dtype)) | (rows.top_p.unsqueeze(1) >= 1)
    least = torch.maximum(least, ordered.masked_fill(~inside, torch.inf).amin(-1, keepdim=True))
    likely = ordered[:, :1] + rows.min_p.to(scores.dtype).log().unsqueeze(1)
    least = torch.maximum(least, likely)
    return torch.where((scores >= least) | ~rows.drawn.unsqueeze(1), scores, -torch.inf)


def _states(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return the state of each row's random numbers at its position, int64 ``b``."""
    found = random_stream(random_bits(seeds, _KEY, positions), _WORD)
    assert isinstance(found, Tensor)
    return found
