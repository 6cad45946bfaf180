"""Inputs of folding models for several chains: one sequence with linkers (ESMFold), or features of a complex (ESMFold 2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

LINKER, GAP = 25, 512
"""Glycines between the chains that ESMFold gets as one, and how many positions the next chain is moved: as ESM's own code does."""


def join_chains(chains: Sequence[str]) -> tuple[str, list[int], list[int]]:
    """Join chains by linkers; return the letters, the position of each one, and the numbers of those that are no linker."""
    letters, positions, kept = "", list[int](), list[int]()
    for number, chain in enumerate(chains):
        kept += range(len(letters), len(letters) + len(chain))
        part = chain + "G" * LINKER * (number + 1 < len(chains))
        positions += range(len(letters) + number * GAP, len(letters) + len(part) + number * GAP)
        letters += part
    return letters, positions, kept


_ATOMS = 32  # features of atoms are padded to a multiple of this
_OF_MSA = ("msa", "msa_attention_mask", "has_deletion", "deletion_value")
_OF_ATOMS = (
    "ref_pos",
    "ref_element",
    "ref_charge",
    "ref_atom_name_chars",
    "ref_space_uid",
    "atom_attention_mask",
    "atom_to_token",
)


def complex_features(parts: Sequence[dict[str, Tensor]], chains: Sequence[str]) -> dict[str, Tensor]:
    """Join the features of single chains, as transformers' ``prepare_protein_features`` makes them, to those of a complex.

    Residues keep their numbers within a chain. Chains get numbers (``asym_id``), equal ones one entity (``entity_id``, from 1) and
    numbers within it (``sym_id``).

    Args:
        parts: the features of each chain.
        chains: their amino acids.
    """
    if len(parts) == 1:
        return parts[0]
    entities = list(dict.fromkeys(chains))
    tokens = atoms = 0
    moved: list[dict[str, Tensor]] = []
    for number, (part, chain) in enumerate(zip(parts, chains, strict=True)):
        count = int(part["atom_attention_mask"].sum())
        one = {name: x[:, :count] if name in _OF_ATOMS else x for name, x in part.items()}
        for name, offset in (
            ("token_index", tokens),
            ("atom_to_token", tokens),
            ("ref_space_uid", tokens),
            ("distogram_atom_idx", atoms),
        ):
            one[name] = one[name] + offset
        for name, value in (
            ("asym_id", number),
            ("entity_id", entities.index(chain) + 1),
            ("sym_id", list(chains[:number]).count(chain)),
        ):
            one[name] = torch.full_like(one[name], value)
        moved.append(one)
        tokens, atoms = tokens + len(chain), atoms + count
    found = {
        name: torch.cat([one[name] for one in moved], 2 if name in _OF_MSA else 1)
        for name in parts[0]
        if name != "token_bonds"
    }
    found["token_bonds"] = parts[0]["token_bonds"].new_zeros(1, tokens, tokens, 1)
    padding = -atoms % _ATOMS
    for name in _OF_ATOMS:
        x = found[name]
        found[name] = functional.pad(x, [0, 0] * (x.dim() - 2) + [0, padding])
    return found
