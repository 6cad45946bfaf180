"""Proteins to fold: chains of amino acids, from arguments and FASTA files, checked before anything starts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from meshfold.mesh import MeshfoldError

AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWY"
"""The letters of the twenty amino acids."""
MOST_CHAINS, MOST_RESIDUES = 62, 9999
"""Chains of a PDB file, and residues of a chain: its columns have no room for more."""
MOST_TOLD = 8
"""Proteins of a file that one error names."""
_INSTEAD = {
    "U": "selenocysteine: write C",
    "O": "pyrrolysine: write K",
    "B": "D or N: write one of them",
    "Z": "E or Q: write one of them",
    "J": "I or L: write one of them",
    "-": "a gap: give sequences without an alignment",
    ".": "a gap: give sequences without an alignment",
    "/": "chains are joined by ':'",
}


class ProteinError(MeshfoldError):
    """A sequence or a file of sequences that cannot be folded."""


@dataclass(frozen=True)
class Protein:
    """A protein to fold.

    Attributes:
        name: begins the names of its files; unique in a run.
        chains: amino acids of each chain, in capital letters; X for an unknown one.
    """

    name: str
    chains: tuple[str, ...]

    @property
    def residues(self) -> int:
        """The number of amino acids."""
        return sum(map(len, self.chains))


def parse_chains(text: str, where: str) -> tuple[str, ...]:
    """Parse amino acids in one-letter code; ``:`` separates chains, blanks and small letters are taken, a final ``*`` is left out.

    Args:
        text: the sequence.
        where: begins the message of an error: ``--sequence 1``.

    Raises:
        ProteinError: for an unknown letter, an empty chain, and more than a PDB file has room for.
    """
    chains = tuple(re.sub(r"\s+", "", chain).upper().removesuffix("*") for chain in text.split(":"))
    for number, chain in enumerate(chains, 1):
        which = f" of chain {number}" if len(chains) > 1 else ""
        if not chain:
            empty = f"chain {number} is empty" if len(chains) > 1 else "it is empty"
            raise ProteinError(f"{where}: {empty}: give amino acids in one-letter code, such as ACDEFGHIK")
        for position, letter in enumerate(chain, 1):
            if letter not in AMINO_ACIDS and letter != "X":
                why = f" ({_INSTEAD[letter]})" if letter in _INSTEAD else ""
                raise ProteinError(
                    f"{where}: {letter!r} at position {position}{which} is no amino acid{why}. Letters are {AMINO_ACIDS}, "
                    "and X for an unknown one"
                )
        if len(chain) > MOST_RESIDUES:
            raise ProteinError(
                f"{where}: {len(chain)} residues{which}: a PDB file numbers at most {MOST_RESIDUES} in a chain; cut it"
            )
    if len(chains) > MOST_CHAINS:
        raise ProteinError(f"{where}: {len(chains)} chains: a PDB file names at most {MOST_CHAINS}")
    return chains


def read_fasta(path: Path) -> list[Protein]:
    """Read the proteins of a FASTA file: ``>name ...`` and its sequence on the lines below. Names are made unique.

    Raises:
        ProteinError: if it has no protein, text before the first ``>``, or sequences that :func:`parse_chains` refuses; it names
            all of these, up to :data:`MOST_TOLD`.
        OSError: if it cannot be read.
    """
    records: list[tuple[str, int, list[str]]] = []
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise ProteinError(f"{path}: it is not a text file") from None
    for number, line in enumerate(lines, 1):
        if line.startswith(">"):
            words = line[1:].split()
            records.append((words[0] if words else f"protein{len(records) + 1}", number, []))
        elif records:
            records[-1][2].append(line)
        elif line.strip() and not line.startswith(";"):
            raise ProteinError(f"{path}, line {number}: a name comes first, in a line of its own, as in >my_protein")
    if not records:
        raise ProteinError(f"{path}: no protein in it: write >my_protein in a line, and amino acids below it")
    chains: list[tuple[str, ...]] = []
    refused: list[str] = []
    for name, number, text in records:
        try:
            chains.append(parse_chains("".join(text), f"{path}, line {number}, {name!r}"))
        except ProteinError as error:
            refused.append(str(error))
    if refused:
        more = len(refused) - MOST_TOLD
        raise ProteinError("\n".join(refused[:MOST_TOLD] + ([f"and {more} more of its proteins"] if more > 0 else [])))
    names = unique_names(name for name, _, _ in records)
    return [Protein(*pair) for pair in zip(names, chains, strict=True)]


def unique_names(names: Iterable[str]) -> list[str]:
    """Turn names into unique ones that files can have.

    >>> unique_names(["sp|P1|A", "b", "b"])
    ['sp_P1_A', 'b', 'b-2']
    """
    found: dict[str, str] = {}  # by small letters: some file systems know no others
    last: dict[str, int] = {}
    for name in names:
        plain = re.sub(r"[^\w.-]+", "_", name).strip("._")[:100] or "protein"
        made, count = plain, last.get(plain.lower(), 1)
        while made.lower() in found:
            count += 1
            made = f"{plain}-{count}"
        last[plain.lower()] = count
        found[made.lower()] = made
    return list(found.values())
