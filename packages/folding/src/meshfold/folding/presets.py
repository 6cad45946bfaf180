"""Folding models of papers by name, as stacks on the meta device: what a plan of memory and time needs, and nothing to run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from meshfold.folding.esmfold import EsmFoldStack
from meshfold.folding.esmfold2 import PairUpdateStack
from meshfold.folding.evoformer import EvoformerStack, ExtraMSAStack
from meshfold.folding.pairformer import PairFormerStack
from meshfold.folding.stack import Stack
from meshfold.mesh import MeshfoldError, did_you_mean


@dataclass(frozen=True, kw_only=True)
class FoldingOutline:
    """A folding model as a plan sees it.

    Attributes:
        name: what users write.
        stack: the blocks, on the meta device.
        sequences: of an MSA, if nothing else is said.
        frozen_bytes: of weights beside the stack that are not trained, such as a language model's.
        recycled_channels: of the pairs that each pass begins with and the stack does not hold; 0: none.
        whole_channels: of pairs beside the stack that every rank has whole.
    """

    name: str
    stack: Stack
    sequences: int = 1
    frozen_bytes: int = 0
    recycled_channels: int = 0
    whole_channels: int = 0

    @property
    def folds(self) -> bool:
        """True if ``meshfold fold`` runs such a model."""
        return self.recycled_channels + self.whole_channels > 0

    def beside(self, residues: int, ranks: int, itemsize: int) -> int:
        """Return the bytes on a rank beside the stack and its weights.

        Args:
            residues: tokens of a chain.
            ranks: that share pairs.
            itemsize: bytes of an element.
        """
        whole = residues**2 * self.whole_channels * itemsize
        return self.frozen_bytes + whole + recycled_bytes(residues, ranks, self.recycled_channels, itemsize)


def recycled_bytes(residues: int, ranks: int, channels: int, itemsize: int) -> int:
    """Return the bytes that recycling keeps on a rank: pairs that each pass begins with, and rows of two tables; 0 without."""
    return -(-(residues**2) // ranks) * (channels * itemsize + 2 * 8) if channels else 0


def _evoformer() -> FoldingOutline:
    """AlphaFold 2, Table 1 of its supplement: 48 blocks, 512 clusters."""
    heads = dict(c_hidden_msa_att=32, c_hidden_pair_att=32, no_heads_msa=8, no_heads_pair=4)
    sizes = dict(c_hidden_opm=32, c_hidden_mul=128, transition_n=4, msa_dropout=0.15, pair_dropout=0.25)
    return FoldingOutline(
        name="folding:evoformer", stack=EvoformerStack(48, 256, 128, 384, **heads, **sizes), sequences=512
    )


def _extra_msa() -> FoldingOutline:
    """AlphaFold 2: 4 blocks, 5,120 sequences."""
    heads = dict(c_hidden_msa_att=8, c_hidden_pair_att=32, no_heads_msa=8, no_heads_pair=4)
    sizes = dict(c_hidden_opm=32, c_hidden_mul=128, transition_n=4, msa_dropout=0.15, pair_dropout=0.25)
    return FoldingOutline(name="folding:extra-msa", stack=ExtraMSAStack(4, 64, 128, **heads, **sizes), sequences=5120)


def _pairformer() -> FoldingOutline:
    """AlphaFold 3: 48 blocks."""
    heads = dict(c_hidden_pair_bias=24, no_heads_pair_bias=16, c_hidden_pair_att=32, no_heads_pair=4)
    sizes = dict(c_hidden_mul=128, transition_n=4, pair_dropout=0.25)
    return FoldingOutline(name="folding:pairformer", stack=PairFormerStack(48, 384, 128, **heads, **sizes))


def _esmfold() -> FoldingOutline:
    """ESMFold: a trunk of 48 blocks, and weights beside it in two bytes: ESM-2 3B, its combination, structure module and heads."""
    stack = EsmFoldStack(48, 1024, 128, head_width_s=32, head_width_z=32)
    return FoldingOutline(name="folding:esmfold", stack=stack, frozen_bytes=2 * ESMFOLD_BESIDE, recycled_channels=128)


ESMFOLD_BESIDE = 2_838_932_291
"""Weights of ESMFold beside the blocks of its trunk, counted on transformers' class with the configuration of esmfold_v1."""
PAIRS_OF_ESMFOLD2 = 7
"""Pair tensors that every rank has whole while ESMFold 2's trunk runs: those that passes begin with, of positions and of bonds; the
language model's, with dropout and refined; and their sum."""


def _esmfold2() -> FoldingOutline:
    """ESMFold 2: a trunk of 24 pair updates, and weights beside it in two bytes: ESMC, encoders, structure and confidence heads."""
    stack = PairUpdateStack(24, 256, 1024, chunk_size=64)
    return FoldingOutline(
        name="folding:esmfold2",
        stack=stack,
        frozen_bytes=2 * ESMFOLD2_BESIDE,
        whole_channels=PAIRS_OF_ESMFOLD2 * stack.c_z,
    )


ESMFOLD2_BESIDE = 6_504_321_629
"""Weights of ESMFold 2 beside its folding trunk, counted on transformers' class with its default configuration."""
PRESETS: dict[str, Callable[[], FoldingOutline]] = {
    "folding:evoformer": _evoformer,
    "folding:extra-msa": _extra_msa,
    "folding:pairformer": _pairformer,
    "folding:esmfold": _esmfold,
    "folding:esmfold2": _esmfold2,
}
"""Makers of outlines by name."""


def find_outline(name: str) -> FoldingOutline:
    """Return the folding model of a name, on the meta device.

    Raises:
        MeshfoldError: for an unknown name.
    """
    if name not in PRESETS:
        raise MeshfoldError(
            f"there is no folding model {name!r}.{did_you_mean(name, PRESETS)} Known: {', '.join(PRESETS)}, or a folder of "
            "EsmForProteinFolding or EsmFold2Model"
        )
    with torch.device("meta"):
        return PRESETS[name]()
