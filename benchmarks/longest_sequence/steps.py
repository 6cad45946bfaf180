"""What the ranks do: training steps of growing length until one is refused."""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.longest_sequence.memory import OnCPU, OnGPU, is_refusal
from meshfold.mesh import Mesh, all_reduce, barrier
from meshfold.mesh.processes import process_group
from meshfold.models.config import LlamaConfig
from meshfold.models.llama import Llama
from meshfold.sequence import next_tokens, sequence_parallel, shard_sequence


class Decoder(nn.Module):
    """Llama with its blocks recomputed in backward, and the loss taken of a piece of the tokens at a time."""

    def __init__(self, config: LlamaConfig, piece: int) -> None:
        super().__init__()
        self.llama, self.piece = Llama(config), piece

    def forward(self, ids: Tensor) -> Tensor:
        """``1 s`` ids of this rank -> its hidden states ``s hidden``."""
        of, s = self.llama, ids.shape[1]
        rotary = of.rotary(None, s, ids.device)
        x: Tensor = of.embed(ids.reshape(-1))
        for block in of.blocks:
            x = checkpoint(block, x, s, rotary, use_reentrant=False)
        return x

    def loss(self, x: Tensor, targets: Tensor, counted: Tensor) -> Tensor:
        """Return the sum of the losses of this rank's hidden states over ``counted``.

        It is no part of the forward, where tokens are split over ranks: a loss of pieces of a rank's own is the rank's own matter.
        """
        total = x.new_zeros((), dtype=torch.float32)
        for rows, wanted in zip(x.split(self.piece), targets.reshape(-1).split(self.piece), strict=True):
            total = total + checkpoint(self._loss, rows, wanted, use_reentrant=False)
        mean: Tensor = total / counted
        return mean

    def _loss(self, rows: Tensor, wanted: Tensor) -> Tensor:
        logits = self.llama.head(self.llama.norm(rows))
        return F.cross_entropy(logits.float(), wanted, ignore_index=-100, reduction="sum")


class Trainer:
    """A model on every rank, and a step of a sequence of any length."""

    def __init__(self, args: argparse.Namespace, mesh: Mesh, device: torch.device) -> None:
        self.args, self.mesh, self.device = args, mesh, device
        config = LlamaConfig(
            vocab_size=args.vocab,
            hidden=args.hidden,
            layers=args.layers,
            heads=args.heads,
            kv_heads=args.kv_heads,
            ffn=args.ffn,
            rope_theta=500000.0,
        )
        torch.manual_seed(0)
        with torch.device("meta"):
            model = Decoder(config, args.piece).to(getattr(torch, args.dtype))
        self.model: Decoder = model.to_empty(device=device)
        for parameter in model.parameters():
            with torch.no_grad():
                if parameter.dim() == 1:
                    parameter.fill_(1)
                else:
                    parameter.normal_(std=0.02)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        sequence_parallel(model, mesh, args.mode, kernel=args.kernel)

    def step(self, tokens: int) -> float:
        """One whole training step of a sequence of so many tokens: its loss."""
        mode, group = self.args.mode, self.mesh.group("seq")
        generator = torch.Generator().manual_seed(tokens)
        whole = torch.randint(self.args.vocab, (1, tokens), generator=generator)
        ids = shard_sequence(whole, self.mesh, mode).to(self.device)
        targets = shard_sequence(next_tokens(whole), self.mesh, mode, pad=-100).to(self.device)
        counted = torch.tensor(float(tokens - 1), device=self.device)
        share = self.model.loss(self.model(ids), targets, counted)
        share.backward()
        for parameter in self.model.parameters():
            if parameter.grad is not None and group.size > 1:
                parameter.grad.copy_(all_reduce(parameter.grad, group))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(all_reduce(share.detach(), group))

    def tensors(self) -> list[Tensor]:
        """What lives between steps."""
        states = [x for state in self.optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
        return [*self.model.parameters(), *states]


class Tried(NamedTuple):
    """A step of some length.

    Attributes:
        peak: bytes of the fullest rank.
        begin, end: seconds since the epoch.
        loss: of the sequence.
    """

    peak: int
    begin: float
    end: float
    loss: float


def run(args: argparse.Namespace, job: dict[str, Any]) -> int:
    """One rank: measure the line if it is not known, then steps until one is refused or the bracket is close."""
    world = process_group.start(timeout=180)
    if world.device.type == "cpu":
        torch.set_num_threads(1)
    mesh = Mesh({"seq": world.world_size})
    limit = int(args.memory * 2**30)
    on_gpu = OnGPU(limit, world.device) if world.device.type == "cuda" else None
    trainer = Trainer(args, mesh, world.device)
    memory = on_gpu or OnCPU(limit, trainer.tensors())
    file = Path(job["folder"]) / f"rank{world.rank}.jsonl"
    ranks = world.world_size

    def note(**what: Any) -> None:
        with file.open("a") as out:
            out.write(json.dumps(what) + "\n")

    def tried(tokens: int) -> Tried:
        barrier(mesh.group("seq"), world.device)
        memory.begin()
        begin = time.time()
        with memory.around():
            loss = trainer.step(tokens)
        peak = torch.tensor(float(memory.peak()), dtype=torch.float64, device=world.device)
        end = time.time()
        return Tried(int(all_reduce(peak, mesh.group("seq"), "max")), begin, end, loss)

    line = job["line"]
    if line is None:
        line = _line(args, ranks, memory.limit, tried)
        if world.rank == 0:
            note(kind="line", line=line)
    tokens = _first(args, job, line, ranks)
    while tokens is not None:
        try:
            step = tried(tokens)
        except Exception as error:
            if is_refusal(error):
                note(kind="step", fits=False, tokens=tokens, why=str(error).splitlines()[0][:200])
                os._exit(1)  # at once: a tidy end would wait for ranks that wait for this one
            raise
        if world.rank == 0:
            note(
                kind="step",
                fits=True,
                tokens=tokens,
                peak_bytes=step.peak,
                seconds=step.end - step.begin,
                span=(step.begin, step.end),
                loss=step.loss,
            )
        tokens = _longer(args, job, tokens, ranks)
    world.close()
    return 0


def _line(args: argparse.Namespace, ranks: int, limit: int, tried: Callable[[int], Tried]) -> dict[str, Any]:
    """Bytes that do not depend on the length, bytes for each token of a rank, and the length at which both fill the limit."""
    tried(args.short * ranks)  # the optimizer's state is there from now on
    one, two = tried(args.short * ranks).peak, tried(2 * args.short * ranks).peak
    a_token = (two - one) / args.short
    fixed = one - a_token * args.short
    foretold = int((limit - fixed) / a_token) * ranks if a_token > 0 else 0
    return {"fixed": fixed, "a_token": a_token, "foretold": foretold, "limit": limit, "peaks": [one, two]}


def _first(args: argparse.Namespace, job: dict[str, Any], line: dict[str, float], ranks: int) -> int | None:
    """The length to begin with: just below the foretold, or between what is known to fit and known to be refused."""
    fits: int = job["fits"]
    refused: int = job["refused"]
    if fits and refused:
        return _round(args, ranks, (fits + refused) / 2)
    if refused:  # even the first was too long
        return _round(args, ranks, refused * (1 - args.resolution))
    if fits:
        return _longer(args, job, fits, ranks)
    return _round(args, ranks, line["foretold"] * (1 - args.margin))


def _longer(args: argparse.Namespace, job: dict[str, Any], fits: int, ranks: int) -> int | None:
    """The next length: one that, if refused, ends the search; None if the refused one is close enough."""
    refused: int = job["refused"]
    if refused and refused <= fits * (1 + args.resolution):
        return None
    unit: int = args.multiple * ranks
    longer = max(math.floor(fits * (1 + args.resolution) / unit) * unit, fits + unit)
    if refused and longer >= refused:
        longer = _round(args, ranks, (fits + refused) / 2)
        return longer if longer > fits else None
    return int(longer)


def _round(args: argparse.Namespace, ranks: int, tokens: float) -> int:
    """Down to a multiple that every rank gets as much of."""
    unit: int = args.multiple * ranks
    return max(int(tokens // unit), 1) * unit
