"""Batches cut from a row of tokens.

The global batch of a step only depends on (tokens, seed, step), so that every spec and every restart trains on the
same batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from meshfold.data.corpus import Corpus, Tokens
from meshfold.mesh import SpecError
from meshfold.mesh.random import key_of
from meshfold.mesh.spec import join_choices


class Batches:
    """Windows of ``seq_len`` tokens, in a new order each epoch.

    An epoch's windows are consecutive from a random offset, so that cuts differ each time.
    """

    def __init__(self, corpus: Corpus, *, batch_size: int, seq_len: int, seed: int = 0) -> None:
        """Args:
            corpus: where from.
            batch_size: windows a global batch.
            seq_len: tokens a window.
            seed: of the order.

        Raises:
            SpecError: for a corpus with less than one batch.
        """
        self._corpus, self.batch_size, self.seq_len, self.seed = corpus, batch_size, seq_len, seed
        self.windows = (corpus.train_tokens - seq_len + 1) // seq_len
        if self.windows < batch_size:
            tokens, least = corpus.train_tokens, (batch_size + 1) * seq_len - 1
            most, longest = (tokens + 1) // seq_len - 1, (tokens + 1) // (batch_size + 1)
            changes = [f"--batch-size {most}"] if most > 0 else []
            changes += [f"--seq-len {longest}"] if longest > 1 else []
            raise SpecError(
                f"{tokens} token{' is' if tokens == 1 else 's are'} too few to train on, for a batch of {batch_size} "
                f"window{'' if batch_size == 1 else 's'} of {seq_len}: it takes {least} at least; "
                f"{join_choices(['use more text', *changes])}"
            )
        self._order = lru_cache(maxsize=2)(self._order_of)

    def batch(self, step: int) -> Tensor:
        """Return global batch number ``step``: ``b s`` int64."""
        rows = []
        for position in range(step * self.batch_size, (step + 1) * self.batch_size):
            epoch, place = divmod(position, self.windows)
            offset, order = self._order(epoch)
            start = offset + int(order[place]) * self.seq_len
            rows.append(self._corpus.tokens[start : start + self.seq_len])
        return _tensor(rows)

    def validation(self, batches: int) -> Iterator[Tensor]:
        """Yield at most ``batches`` global batches, the same ones each time; the last may have fewer rows."""
        starts = range(self._corpus.train_tokens, len(self._corpus.tokens) - self.seq_len + 1, self.seq_len)
        for number in range(min(batches, -(-len(starts) // self.batch_size))):
            mine = starts[number * self.batch_size : (number + 1) * self.batch_size]
            yield _tensor([self._corpus.tokens[start : start + self.seq_len] for start in mine])

    def _order_of(self, epoch: int) -> tuple[int, npt.NDArray[np.int64]]:
        """Return the offset of an epoch's first window, and the order of its windows."""
        draw = np.random.default_rng(key_of(f"windows/{self.seed}/{epoch}"))
        return int(draw.integers(self.seq_len)), draw.permutation(self.windows)


def _tensor(rows: list[Tokens]) -> Tensor:
    return torch.from_numpy(np.stack(rows).astype(np.int64))
