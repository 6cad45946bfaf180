"""One rank of ``meshfold reproduce sequence-parallelism --measure N``: table 4's weak scaling, run for real.

For 1, 2, 4, ... up to N ranks the layers of a stage run forward and backward under tensor parallelism, under ring
self-attention and under our ring, both as batch grows with the ranks and as the sequence does. Where a measurement takes
fewer ranks than there are, the others do the same beside it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from experiments.measuring import Measured, Notes, largest_of_ranks, median, shared_cores
from experiments.report import markdown
from experiments.sequence_parallelism.bert import Stack
from experiments.sequence_parallelism.counting import RING, RING_SELF, TENSOR, split
from experiments.sequence_parallelism.plan import MB
from experiments.sequence_parallelism.tables import NAMES
from meshfold.mesh import Mesh
from meshfold.mesh.model_io.dry_run import saved_for_backward
from meshfold.sequence import gather_sequence, shard_sequence

SCHEMES = (TENSOR, RING_SELF, RING)
ALLOCATED = "the most that was allocated, weights and gradients included"
KEPT = "what autograd kept, counted, as a CPU has no such meter"
PAGE = """<!-- made from measured.json by run.py --measure; edit neither -->

# Ring self-attention: weak scaling that ran

{ranks} ranks on {device}, {kind}; {layers} layers of {hidden} with {heads} heads, dropout 0.1 (rings: none on scores), forward and
backward, median of {repeats}. *Memory*: {memory}. *Off by*: from the output of one rank with the same weights, dropout off,
relative to its largest element.

{table}

{verdict}
"""


def measure(notes: Notes) -> None:
    """Measure all schemes on all numbers of ranks."""
    Measurement(notes).run()


class Measurement:
    """All schemes on all numbers of ranks."""

    def __init__(self, notes: Notes) -> None:
        self.notes, self.options, self.ranks, self.device = notes, notes.options, notes.ranks, notes.device
        self.world = Mesh({"data": notes.ranks})
        self.group = self.world.group("data")

    def run(self) -> None:
        """Measure both ways to scale, for all divisors of the ranks that are powers of two."""
        o, notes = self.options, self.notes
        notes.head["memory"] = ALLOCATED if notes.cuda else KEPT
        counts = [n for n in (2**power for power in range(10)) if self.ranks % n == 0]
        for scaled, n, scheme in product(("batch", "sequence"), counts, SCHEMES):
            if scheme != TENSOR or o.heads % n == 0:
                batch, length = (o.batch * n, o.length) if scaled == "batch" else (o.batch, o.length // 2 * n)
                name = f"{NAMES[scheme]} on {n}, {batch} sequences of {length}"
                notes.add(name, partial(self.one, scheme, n, scaled, batch, length))
        self.world.close()

    def one(self, scheme: str, n: int, scaled: str, batch: int, length: int) -> dict[str, Any]:
        """A scheme on n ranks at a size: memory, time, and how far its output is off."""
        axis = "tensor" if scheme == TENSOR else "seq"
        mesh = Mesh({"data": self.ranks // n, axis: n})
        torch.manual_seed(0)
        with self.device:  # every rank draws the same there
            model = Stack(self.options.hidden, self.options.heads, self.options.layers).to(self.notes.dtype)
            x = torch.randn(batch, length, self.options.hidden).to(self.notes.dtype)
        small = x[:2]  # outputs are compared on two sequences: one rank need not hold them all
        wanted = self.output(model.eval(), small)
        pieces = split(model, mesh, scheme)
        mine = x if pieces == 1 else shard_sequence(x, mesh, scheme)
        seen = self.output(model, small if pieces == 1 else shard_sequence(small, mesh, scheme))
        if pieces > 1:
            seen = gather_sequence(seen, mesh, scheme)
        off = float((seen - wanted).abs().max() / wanted.abs().max())
        model.train()
        flat = mine.flatten(0, 1).requires_grad_()
        del x, small, wanted, seen

        def step() -> None:
            model.zero_grad(set_to_none=True)
            flat.grad = None
            y = model(flat, mine.shape[1])
            y.backward(torch.ones_like(y))

        memory = self.memory(model, step)
        seconds = median(step, self.options.repeats, self.group, self.device)
        found = {
            "scheme": scheme,
            "N": n,
            "scaled": scaled,
            "batch": batch,
            "length": length,
            "off": largest_of_ranks(off, self.group, self.device),
            "bytes": largest_of_ranks(memory, self.group, self.device),
            "seconds": seconds,
        }
        mesh.close()
        return found

    def output(self, model: Stack, x: Tensor) -> Tensor:
        """``b s h -> b s h``, without gradients."""
        with torch.no_grad():
            y: Tensor = model(x.flatten(0, 1), x.shape[1]).view_as(x)
        return y

    def memory(self, model: Stack, step: Callable[[], None]) -> float:
        """Bytes of one step."""
        if self.device.type == "cuda":
            step()
            torch.cuda.reset_peak_memory_stats(self.device)
            step()
            torch.cuda.synchronize(self.device)
            return float(torch.cuda.max_memory_allocated(self.device))
        with saved_for_backward(list(model.parameters())) as saved:
            step()
        return float(saved.bytes)


def page(found: Mapping[str, Any]) -> str:
    """measured.md."""
    rows = found["rows"]
    first = {(row["scheme"], row["scaled"]): row["bytes"] for row in rows if row["N"] == 1}
    table = markdown(
        [
            "grows",
            "N",
            "batch",
            "tokens",
            "scheme",
            "MB",
            "of one rank's",
            "ms",
            "thousand tokens/s",
            "off by",
        ],
        [
            [
                row["scaled"],
                *(str(row[name]) for name in ("N", "batch", "length")),
                NAMES[row["scheme"]],
                f"{row['bytes'] / MB:.2f}",
                f"{row['bytes'] / first[row['scheme'], row['scaled']]:.3f}",
                f"{1e3 * row['seconds']:.1f}",
                f"{1e-3 * row['batch'] * row['length'] / row['seconds']:.1f}",
                f"{row['off']:.0e}",
            ]
            for row in rows
        ],
    )
    keys = ("ranks", "device", "kind", "layers", "hidden", "heads", "repeats", "memory")
    return PAGE.format(**{key: found[key] for key in keys}, table=table, verdict=said(found))


def said(found: Mapping[str, Any]) -> str:
    """Return what the numbers say of the paper's claims: flat memory, and less than tensor parallelism's."""
    rows = found["rows"]
    by = {(row["scheme"], row["scaled"], row["N"]): row for row in rows}
    most = max(row["N"] for row in rows)
    same = [row["bytes"] for row in rows if (row["scheme"], row["scaled"]) == (RING_SELF, "batch")]
    parts = []
    if same:
        flat = max(abs(size / same[0] - 1) for size in same)
        parts.append(f"As the batch grows, memory of ring self-attention is within {flat:.1%} of one rank's.")
    if (RING, "sequence", most) in by and (TENSOR, "sequence", most) in by and most > 1:
        shares = [
            f"{by[scheme, 'sequence', most]['bytes'] / by[TENSOR, 'sequence', most]['bytes']:.2f}"
            for scheme in (RING_SELF, RING)
        ]
        parts.append(
            f"On {most} ranks, as the sequence grows, it is {shares[0]} of tensor parallelism's, our ring's {shares[1]}."
        )
    far = max(row["off"] for row in rows)
    parts.append(f"Outputs are at most {far:.0e} off.")
    return " ".join([*parts, *shared_cores(found)])


MEASURED = Measured(
    file=__file__,
    about=__doc__,
    sizes=(  # Sizes; on GPUs by default a stage of table 4: three layers of BERT-Large, 64 sequences of 512 tokens a rank.
        ("layers", 2, 3, "of the stage"),
        ("hidden", 64, 1024, "elements of the residual stream"),
        ("heads", 4, 16, "of attention; tensor parallelism splits them"),
        ("batch", 4, 64, "sequences of a rank alone; of all ranks where the sequence grows"),
        ("length", 32, 512, "tokens; half as many on a rank alone where the sequence grows"),
        ("repeats", 3, 7, "of every time"),
    ),
    shown=("layers", "hidden", "heads", "batch", "length", "repeats"),
    run=measure,
    page=page,
)
main = MEASURED.main

if __name__ == "__main__":
    sys.exit(main())
