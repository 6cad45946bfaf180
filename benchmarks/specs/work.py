"""What every contestant trains: a Llama of one shape, the same first weights, the same batches in the same order, and the
learning rate of each step."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from meshfold.models import build, preset
from meshfold.models.llama import Llama
from meshfold.train.schedule import lr_schedule


class Work:
    """The model and the batches.

    Attributes:
        args: of the benchmark.
        vocab: words.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self._config = preset(args.model, max_positions=args.seq_len)
        self.vocab = self._config.vocab_size
        generator = torch.Generator().manual_seed(11)
        self._follows = torch.randint(self.vocab, (self.vocab,), generator=generator)
        # Zipf's law: how often a word comes falls with its rank.
        self._shares = (1 / torch.arange(1, self.vocab + 1, dtype=torch.float64)).cumsum(0)
        self._shares /= self._shares[-1].clone()

    def model(self) -> Llama:
        """A new one; made on the meta device it takes no memory."""
        made = build(self._config)
        assert isinstance(made, Llama)  # the command takes no other
        return made

    @property
    def rates(self) -> Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]:
        """Makes the schedule of the learning rate: it rises in a straight line over the first ``--rise`` steps and then stays.
        Without that the first steps of Adam, which all have the same length, throw a large model so far off that no two runs
        agree."""
        return lr_schedule("constant", warmup=self.args.rise, steps=self.args.steps)

    def batch(self, step: int) -> Tensor:
        """Token ids of a step's whole batch, ``rows seq_len``: words by Zipf's law, each followed by the one that always
        follows it, so that there is something to learn from the first step on."""
        generator = torch.Generator().manual_seed(1000 + step)
        shape = (self.args.rows, self.args.seq_len // 2)
        first = torch.searchsorted(self._shares, torch.rand(shape, generator=generator, dtype=torch.float64))
        first = first.clamp(max=self.vocab - 1)
        return torch.stack((first, self._follows[first]), dim=-1).flatten(1)
