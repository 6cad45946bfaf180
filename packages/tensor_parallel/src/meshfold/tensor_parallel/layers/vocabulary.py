"""Vocabularies over ranks: the words of one, and checks of token ids and labels.

An id or label outside the vocabulary is an error, as in torch, and never a row of zeros.

On the CPU a :class:`TokenError` names the number. On a GPU it is an assertion on the device, as torch's own lookups have:
the host does not wait.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from meshfold.kernels import VocabularyShard
from meshfold.mesh import Mesh, TokenError, collectives


def shard_of(mesh: Mesh, axes: tuple[str, ...], columns: int, words: int) -> VocabularyShard:
    """Return this rank's words of a vocabulary that is split over axes.

    Args:
        columns: that a rank has, with padding.
        words: in the whole vocabulary.
    """
    group, start = mesh.group(*axes), mesh.index(*axes) * columns
    return VocabularyShard(
        start=start,
        valid=min(max(words - start, 0), columns),
        size=words,
        all_reduce_max=lambda values: collectives.all_reduce(values, group, "max"),
        all_reduce_sum=lambda values: collectives.all_reduce(values, group),
    )


def checked(numbers: Tensor, words: int, what: str, ignored: int | None = None) -> Tensor:
    """Return ``numbers`` after a check that each is from 0 up and below ``words``, or ``ignored``.

    Args:
        numbers: integers of any shape, the same on every rank, so that all ranks raise or none does.
        words: in the whole vocabulary.
        what: ``"token id"`` or ``"label"``.
        ignored: the label of tokens that do not count.

    Raises:
        TokenError: on the CPU; on other devices later kernels fail.
    """
    if torch.compiler.is_compiling():
        compiled: Tensor = torch.ops.meshfold.checked_words(numbers, words, what, ignored)
        return compiled
    if not numbers.is_meta:
        with torch._C.DisableTorchFunction():  # bypass the model's function modes
            _check(numbers, words, what, ignored)
    return numbers


def _check(numbers: Tensor, words: int, what: str, ignored: int | None) -> None:
    right = numbers.clamp(0, words - 1) == numbers
    if ignored is not None:
        right |= numbers == ignored
    also = "" if ignored is None else f", or {ignored} where none counts"
    if numbers.device.type != "cpu":
        torch._assert_async(right.all(), f"a {what} is not in the vocabulary: 0 to {words - 1}{also}")
    elif not bool(right.all()):
        raise TokenError(
            f"{what} {int(numbers[~right][0])} is not in the vocabulary of {words} words: 0 to {words - 1}{also}. Is the "
            f"tokenizer the model's own?"
        )


@cache
def prepare() -> Any:
    """Register the custom operation that compiled graphs use for :func:`checked`, before anything is traced."""

    @torch.library.custom_op("meshfold::checked_words", mutates_args=())
    def checked_words(numbers: Tensor, words: int, what: str, ignored: int | None) -> Tensor:
        _check(numbers, words, what, ignored)
        return numbers.clone()

    @checked_words.register_fake
    def _(numbers: Tensor, words: int, what: str, ignored: int | None) -> Tensor:
        return torch.empty_like(numbers)

    return checked_words
