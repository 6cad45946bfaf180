"""A predicted structure with its confidence, and its PDB file."""

from __future__ import annotations

import string
from dataclasses import dataclass

from torch import Tensor

from meshfold.mesh import MeshfoldError

CHAIN_NAMES = string.ascii_uppercase + string.ascii_lowercase + string.digits


@dataclass(frozen=True, kw_only=True)
class Atom:
    """An atom of a residue.

    Attributes:
        residue: its number over all chains, from 0.
        name: ``CA``, ...
        position: x, y, z in Å.
        plddt: confidence, 0 to 100.
    """

    residue: int
    name: str
    position: tuple[float, float, float]
    plddt: float


@dataclass(frozen=True, kw_only=True)
class Structure:
    """A predicted structure.

    Attributes:
        chains: amino acids of each chain.
        residue_names: three letters for each residue.
        atoms: in the order of residues.
        plddt: of each residue, 0 to 100 (predicted lDDT).
        pae: predicted aligned error in Å, ``aligned residue, scored residue``.
        ptm: predicted TM-score, 0 to 1.
        iptm: the same between chains; None for one chain.
    """

    chains: tuple[str, ...]
    residue_names: tuple[str, ...]
    atoms: tuple[Atom, ...]
    plddt: Tensor
    pae: Tensor
    ptm: float
    iptm: float | None

    @property
    def mean_plddt(self) -> float:
        """The mean confidence of the residues, 0 to 100."""
        return float(self.plddt.mean())

    def to_pdb(self) -> str:
        """Return the text of a PDB file: chains A, B, ..., residues from 1 in each, pLDDT as B-factor.

        Raises:
            MeshfoldError: if a coordinate has no room in the columns of the format.
        """
        numbers = [
            (chain, number) for chain, residues in enumerate(self.chains) for number in range(1, len(residues) + 1)
        ]
        lines: list[str] = []
        serial = 0
        previous: int | None = None

        def end_chain(residue: int) -> None:
            nonlocal serial
            serial += 1
            chain, number = numbers[residue]
            lines.append(
                f"TER   {serial % 100000:>5}      {self.residue_names[residue]:>3} {CHAIN_NAMES[chain]}{number:>4}"
            )

        for atom in self.atoms:
            chain, number = numbers[atom.residue]
            if previous is not None and numbers[previous][0] != chain:
                end_chain(previous)
            serial += 1
            name = atom.name if len(atom.name) == 4 else f" {atom.name}"
            where = "".join(f"{value:>8.3f}" for value in atom.position)
            if len(where) > 24 or "n" in where:
                raise MeshfoldError(
                    f"atom {atom.name} of residue {number} lies at {atom.position} Å, which a PDB file has no room for: the "
                    "weights are damaged, or the precision is too low"
                )
            lines.append(
                f"ATOM  {serial % 100000:>5} {name:<4} {self.residue_names[atom.residue]:>3} {CHAIN_NAMES[chain]}{number:>4}    "
                f"{where}{1.0:>6.2f}{atom.plddt:>6.2f}          {atom.name[0]:>2}  "
            )
            previous = atom.residue
        if previous is not None:
            end_chain(previous)
        return "\n".join([*lines, "END", ""])
