"""AlphaFold's sizes, and a rank's part of a block of them on the meta device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from experiments.report import read_csv
from experiments.toml_tables import read_tables
from meshfold.folding import EvoformerBlock, parallelize_folding
from meshfold.mesh import Mesh
from meshfold.mesh.testing import fake_world

FOLDER = Path(__file__).resolve().parent
BLOCKS = 48  # of the Evoformer
C_M, C_Z = 256, 128  # channels of the MSA and of pairs
HEADS_MSA, HEADS_PAIR, HEAD = 8, 4, 32
DTYPE = torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A phase of training: a table of settings.toml.

    Attributes:
        name: as in published_training.csv.
        sequences: of the MSA.
        residues: of a crop.
        samples: trained with.
        batch: samples of an optimizer step.
    """

    name: str
    sequences: int
    residues: int
    samples: int
    batch: int

    @property
    def steps(self) -> float:
        """Optimizer steps."""
        return self.samples / self.batch


def phases() -> list[Phase]:
    """Both phases of training."""
    return list(read_tables(FOLDER / "settings.toml", Phase).values())


def headlines() -> dict[str, float]:
    """Single published numbers by name."""
    return {row["name"]: float(row["value"]) for row in read_csv(FOLDER / "published_headlines.csv")}


@contextmanager
def rank_of(ranks: int, *, product_steps: int = 1) -> Iterator[tuple[EvoformerBlock, Mesh]]:
    """Context manager: a block of the Evoformer on the first of some simulated ranks, without memory and without dropout."""
    with fake_world(ranks):
        mesh = Mesh({"axial": ranks})
        with torch.device("meta"):
            block = EvoformerBlock(C_M, C_Z, HEAD, 32, 128, HEAD, HEADS_MSA, HEADS_PAIR, 4, 0.0, 0.0).to(DTYPE)
        parallelize_folding(block, mesh, "dap", product_steps=product_steps)
        yield block, mesh
        mesh.close()


def inputs(ranks: int, sequences: int, residues: int, *, trained: bool = True) -> tuple[Tensor, Tensor]:
    """A rank's part of the MSA and of the pair tensor.

    Raises:
        ValueError: for sizes that the ranks do not divide.
    """
    if sequences % ranks or residues % ranks:
        raise ValueError(f"{sequences} sequences of {residues} residues do not divide over {ranks} ranks")
    m = torch.empty(1, sequences // ranks, residues, C_M, dtype=DTYPE, device="meta", requires_grad=trained)
    z = torch.empty(1, residues // ranks, residues, C_Z, dtype=DTYPE, device="meta", requires_grad=trained)
    return m, z
