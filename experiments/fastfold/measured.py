"""One rank of ``meshfold reproduce fastfold --measure N``: blocks of the Evoformer under axial parallelism, run for real.

For 1, 2, 4, ... up to N ranks: training at both sizes, with collectives beside operators (async) and with a wait for each
(sync), and prediction of longer chains. Where a measurement takes fewer ranks than there are, the others do the same beside it.
Bytes of tensor parallelism are counted before the ranks meet.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from experiments.fastfold import traffic
from experiments.fastfold.settings import C_M, C_Z, HEAD, HEADS_MSA, HEADS_PAIR, phases
from experiments.measuring import ON_CPU, Measured, Notes, largest_of_ranks, median
from experiments.report import NONE, markdown
from meshfold.folding import EvoformerStack, folding_cost, parallelize_folding, sum_gradients
from meshfold.folding.axial.redistribute import Redistribution
from meshfold.mesh import Mesh, Pending, record
from meshfold.mesh.model_io import saved_for_backward

PRODUCT_STEPS = 16  # of a triangle multiplication in prediction
PREDICTION = "prediction"
PAGE = """<!-- made from measured.json by run.py --measure; edit neither -->

# FastFold: blocks that ran

{ranks} ranks on {device}, {kind}; {blocks} blocks of AlphaFold's channels; training: forward, backward and the sum of gradients;
prediction: forward with {msa} sequences and products in {steps} pieces; median of {repeats}, of half as many in prediction.
*GB*: {memory}. *Sent*: millions of elements that a rank sends for a block; under tensor parallelism counted. *Off by*: from the
output of one rank with the same weights for a small chain, relative to its largest element.

{table}

{verdict}
"""
ALLOCATED, KEPT = "the most that was allocated", "what autograd kept"


def counts_of(ranks: int) -> list[int]:
    """Powers of two that divide the ranks."""
    return [n for n in (2**power for power in range(10)) if ranks % n == 0]


def planned(options: argparse.Namespace) -> dict[tuple[str, int], float]:
    """Elements that a rank sends for a block under tensor parallelism, for each phase and number of ranks."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    return {
        (name, n): sum(traffic.tensor(n, sequences, residues).values())
        for name, sequences, residues in trainings(options)
        for n in counts_of(ranks)
        if n > 1
    }


def trainings(options: argparse.Namespace) -> list[tuple[str, int, int]]:
    """Name, sequences and residues of both phases of training."""
    return [(one.name, one.sequences // options.shrink, one.residues // options.shrink) for one in phases()]


@contextmanager
def waiting() -> Iterator[None]:
    """Context manager: wait for every change of layout where it starts, forward and backward."""
    starts = {name: getattr(Redistribution, name) for name in ("start", "start_adjoint")}

    def at_once(start: Callable[[Redistribution, Tensor], Pending], move: Redistribution, x: Tensor) -> Pending:
        pending = start(move, x)
        pending.wait()
        return pending

    def method(start: Callable[[Redistribution, Tensor], Pending]) -> Callable[[Redistribution, Tensor], Pending]:
        return lambda move, x: at_once(start, move, x)

    try:
        for name, start in starts.items():
            setattr(Redistribution, name, method(start))
        yield
    finally:
        for name, start in starts.items():
            setattr(Redistribution, name, start)


def measure(notes: Notes) -> None:
    """Measure training at both sizes and prediction of all lengths, on all numbers of ranks."""
    Measurement(notes).run()


class Measurement:
    """Blocks on ever more ranks."""

    def __init__(self, notes: Notes) -> None:
        self.notes, self.options, self.device = notes, notes.options, notes.device
        self.world = Mesh({"data": notes.ranks})
        self.group = self.world.group("data")

    def run(self) -> None:
        """Measure all rows."""
        o, notes = self.options, self.notes
        notes.head |= {"memory": ALLOCATED if notes.cuda else KEPT, "steps": PRODUCT_STEPS}
        for name, sequences, residues in trainings(o):
            for n in counts_of(notes.ranks):
                for order in ("async", "sync") if n > 1 else ("async",):
                    row = partial(self.train, name, n, sequences, residues, order)
                    notes.add(f"{name} on {n}, {order}", row)
        for times in (1, 2, 4):
            residues = times * o.length
            for n in counts_of(notes.ranks):
                notes.add(f"{residues} residues on {n}", partial(self.predict, n, residues))
        self.world.close()

    def stack(self, n: int, product_steps: int = 1) -> tuple[EvoformerStack, Mesh, float]:
        """The blocks over n ranks, and how far their output is off for a small chain."""
        mesh = Mesh({"data": self.notes.ranks // n, "axial": n})
        sizes = dict(c_hidden_msa_att=HEAD, c_hidden_opm=32, c_hidden_mul=128, c_hidden_pair_att=HEAD)
        heads = dict(no_heads_msa=HEADS_MSA, no_heads_pair=HEADS_PAIR, transition_n=4)
        with torch.device("meta"):
            made = EvoformerStack(
                self.options.blocks, C_M, C_Z, 384, **sizes, **heads, msa_dropout=0.0, pair_dropout=0.0
            )
        made = made.to_empty(device=self.device)
        torch.manual_seed(0)
        with torch.no_grad(), self.device:  # every rank draws the same there
            for (
                name,
                parameter,
            ) in made.named_parameters():  # as AlphaFold begins, blocks would return what they are given
                if parameter.ndim == 1 and name.endswith("weight"):
                    parameter.fill_(1.0)
                else:
                    parameter.normal_(std=0.02)
            m, z = torch.randn(1, 8, 16, C_M), torch.randn(1, 16, 16, C_Z)
        made, m, z = made.to(self.notes.dtype), m.to(self.notes.dtype), z.to(self.notes.dtype)
        with torch.no_grad():
            wanted = made(m, z)[1]
            parallelize_folding(made, mesh, "dap", product_steps=product_steps)
            seen = made(m, z)[1]
        off = float((seen - wanted).abs().max() / wanted.abs().max())
        return made, mesh, largest_of_ranks(off, self.group, self.device)

    def inputs(self, n: int, sequences: int, residues: int, *, trained: bool) -> tuple[Tensor, Tensor]:
        """A rank's part of the MSA and of the pair tensor."""
        if sequences % n or residues % n:
            raise ValueError(f"{sequences} sequences of {residues} residues do not divide over {n} ranks")
        shapes = ((1, sequences // n, residues, C_M), (1, residues // n, residues, C_Z))
        m, z = (torch.randn(shape, device=self.device, dtype=self.notes.dtype) for shape in shapes)
        return m.requires_grad_(trained), z.requires_grad_(trained)

    def train(self, name: str, n: int, sequences: int, residues: int, order: str) -> dict[str, Any]:
        """Forward, backward and the sum of gradients."""
        made, mesh, off = self.stack(n)
        m, z = self.inputs(n, sequences, residues, trained=True)

        def step() -> None:
            made.zero_grad(set_to_none=True)
            m.grad = z.grad = None
            x, y = m, z
            for block in made.blocks:
                x, y = block(x, y)
            torch.autograd.backward((x, y), [torch.ones_like(x), torch.ones_like(y)])
            sum_gradients(made.blocks)

        with waiting() if order == "sync" else nullcontext():
            with record() as log:
                step()
            memory = self.memory(made, step)
            seconds = median(step, self.options.repeats, self.group, self.device)
        cost = folding_cost(made.blocks, residues=residues, sequences=sequences, itemsize=m.element_size())
        mesh.close()
        each = m.element_size() * self.options.blocks
        return {
            "what": name,
            "N": n,
            "sequences": sequences,
            "residues": residues,
            "order": order,
            "seconds": seconds,
            "bytes": memory,
            "sent": float(sum(entry.bytes for entry in log.entries)) / each,
            "planned": float(sum(entry.bytes for entry in cost.entries)) / each,
            "tensor": (self.notes.plan or {}).get((name, n)),
            "off": off,
        }

    def predict(self, n: int, residues: int) -> dict[str, Any]:
        """Forward without gradients."""
        made, mesh, off = self.stack(n, PRODUCT_STEPS)
        made.eval()
        m, z = self.inputs(n, self.options.msa, residues, trained=False)

        def step() -> None:
            with torch.no_grad():
                x, y = m, z
                for block in made.blocks:
                    x, y = block(x, y)

        with record() as log:
            step()
        memory = self.memory(made, step)
        seconds = median(step, (self.options.repeats + 1) // 2, self.group, self.device)
        mesh.close()
        return {
            "what": PREDICTION,
            "N": n,
            "sequences": self.options.msa,
            "residues": residues,
            "order": "async",
            "seconds": seconds,
            "bytes": memory,
            "sent": float(sum(entry.bytes for entry in log.entries)) / m.element_size() / self.options.blocks,
            "off": off,
        }

    def memory(self, made: EvoformerStack, step: Callable[[], None]) -> float:
        """Bytes of a step, of the fullest rank."""
        if self.notes.cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
            step()
            torch.cuda.synchronize(self.device)
            return largest_of_ranks(torch.cuda.max_memory_allocated(self.device), self.group, self.device)
        with saved_for_backward(list(made.parameters())) as saved:
            step()
        return largest_of_ranks(saved.bytes, self.group, self.device)


def page(found: Mapping[str, Any]) -> str:
    """measured.md."""
    first = {(row["what"], row["residues"]): row for row in found["rows"] if row["N"] == 1}
    rows = []
    for row in found["rows"]:
        alone = first[row["what"], row["residues"]]
        rows.append(
            [
                f"{row['what']}, {row['sequences']} × {row['residues']}",
                str(row["N"]),
                row["order"],
                f"{1e3 * row['seconds']:.1f}",
                f"{alone['seconds'] / row['seconds']:.2f}",
                f"{row['bytes'] / 1e9:.2f}",
                f"{row['bytes'] / alone['bytes']:.3f}" if alone["bytes"] else NONE,
                f"{row['sent'] / 1e6:.2f}",
                f"{row['tensor'] / 1e6:.2f}" if row.get("tensor") else NONE,
                f"{row['off']:.0e}",
            ]
        )
    head = ["what", "N", "order", "ms", "times", "GB", "of one rank's", "sent, M", "tensor, M", "off by"]
    keys = ("ranks", "device", "kind", "blocks", "msa", "steps", "repeats", "memory")
    return PAGE.format(**{key: found[key] for key in keys}, table=markdown(head, rows), verdict=said(found))


def said(found: Mapping[str, Any]) -> str:
    """Return what the numbers say of the claims; of times by their direction alone."""
    rows = found["rows"]
    first = {(row["what"], row["residues"]): row for row in rows if row["N"] == 1}
    split = [row for row in rows if row["N"] > 1]
    parts = []
    counted = [row for row in split if row.get("tensor")]
    if counted:
        most = max(row["sent"] / row["tensor"] for row in counted)
        parts.append(
            f"A rank sends at most {most:.0%} of what it sends under tensor parallelism: "
            f"{'less, as claimed' if most < 1 else 'not less'}."
        )
    planned = [row for row in rows if "planned" in row]
    if all(abs(row["sent"] - row["planned"]) <= 1e-9 * row["planned"] for row in planned):
        parts.append("It sends what the plan says, to the byte.")
    else:
        parts.append("It does not send what the plan says.")
    kept = [row["N"] * row["bytes"] / alone for row in split if (alone := first[row["what"], row["residues"]]["bytes"])]
    if kept:
        parts.append(f"Its memory is {min(kept):.2f} to {max(kept):.2f} times 1/N of one rank's.")
    parts.append(f"Outputs are at most {max(row['off'] for row in rows):.0e} off.")
    if found["device"] == "CPU":
        return " ".join([*parts, ON_CPU])
    sync = {(row["what"], row["N"]): row["seconds"] for row in rows if row["order"] == "sync"}
    gains = [
        sync[row["what"], row["N"]] / row["seconds"]
        for row in split
        if row["order"] == "async" and (row["what"], row["N"]) in sync
    ]
    if gains:
        least, most = min(gains), max(gains)
        how = "at least as fast, as claimed" if least >= 0.99 else "not always as fast"  # a step varies by a percent
        parts.append(f"Async is {least:.3f} to {most:.3f} times as fast as sync: {how}.")
    return " ".join(parts)


MEASURED = Measured(
    file=__file__,
    about=__doc__,
    sizes=(  # Sizes; on GPUs by default FastFold's benchmark of 12 blocks, at AlphaFold's sizes of training.
        ("blocks", 1, 12, "of the Evoformer"),
        ("shrink", 16, 1, "divides sequences and residues of training"),
        ("msa", 8, 128, "sequences in prediction"),
        (
            "length",
            16,
            768,
            "residues of the shortest chain that is predicted; two more are two and four times as long",
        ),
        ("repeats", 1, 5, "of every time"),
    ),
    shown=("blocks", "shrink", "msa", "length", "repeats"),
    run=measure,
    page=page,
    plan=planned,
)
main = MEASURED.main

if __name__ == "__main__":
    sys.exit(main())
