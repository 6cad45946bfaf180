"""Files of ``meshfold fold``: each is written whole or not at all, and a later run finds what is folded."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshfold.cli.arguments import Failure

if TYPE_CHECKING:
    from meshfold.data.proteins import Protein
    from meshfold.huggingface import Structure


@dataclass(frozen=True, kw_only=True)
class FoldSettings:
    """Settings that a structure depends on, beside its chains: ``NAME.json`` has them.

    Attributes:
        model: the folder.
        recycles: passes after the first one; None: the model's.
        precision: of the weights.
        seed: of the noise.
    """

    model: str
    recycles: int | None
    precision: str
    seed: int

    @staticmethod
    def of(arguments: argparse.Namespace) -> FoldSettings:
        """Return those of the arguments of the command."""
        return FoldSettings(
            model=str(Path(arguments.model).resolve()),
            recycles=arguments.recycles,
            precision=arguments.precision,
            seed=arguments.seed,
        )


def make_folder(folder: Path) -> None:
    """Make the folder of the files, before a model is loaded.

    Raises:
        Failure: if it is a file.
        OSError: if it cannot be made.
    """
    if folder.exists() and not folder.is_dir():
        raise Failure(f"--output {str(folder)!r}: it is a file; give a folder")
    folder.mkdir(parents=True, exist_ok=True)


def find_folded(folder: Path, proteins: Iterable[Protein], settings: FoldSettings) -> list[str]:
    """Return the names of the proteins that a run with these settings has folded: those with a JSON file, which is written last.

    Raises:
        Failure: if a protein of that name is there with other chains or settings.
    """
    found = []
    for protein in proteins:
        path = folder / f"{protein.name}.json"
        if path.is_file():
            wanted = dict(chains=list(protein.chains), **asdict(settings))
            other = _difference(_read(path), wanted)
            if other:
                raise Failure(
                    f"{path}: it is of another run: {other}. Give another --output, or write over it with --overwrite"
                )
            found.append(protein.name)
    return found


def _read(path: Path) -> dict[str, Any]:
    """Return chains and settings of a file; nothing if it is not one of ours."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        return dict(chains=told["chains"], **told["settings"])
    except (ValueError, KeyError, TypeError):
        return {}


def _difference(there: dict[str, Any], wanted: dict[str, Any]) -> str:
    """Say in what two runs differ; empty if they do not."""
    if not there:
        return "it does not say of which"
    if there.get("chains") != wanted["chains"]:
        return "its sequence is not this one"
    for name, value in wanted.items():
        if there.get(name) != value:
            return f"its {name} is {there.get(name)}, and now it is {value}"
    return ""


def write_structure(folder: Path, name: str, structure: Structure, settings: FoldSettings) -> list[Path]:
    """Write the files of a structure; return them. Without matplotlib there is no PNG."""
    from meshfold.checkpoint.files import write_atomically
    from meshfold.cli.fold_plot import plot_confidence
    from meshfold.train.plots import can_plot

    scores = dict(
        chains=structure.chains,
        settings=asdict(settings),
        mean_plddt=round(structure.mean_plddt, 2),
        ptm=round(structure.ptm, 4),
        iptm=None if structure.iptm is None else round(structure.iptm, 4),
        plddt=[round(value, 2) for value in structure.plddt.tolist()],
        pae=[[round(value, 2) for value in row] for row in structure.pae.tolist()],
    )
    pdb, numbers, plot = (folder / f"{name}.{ending}" for ending in ("pdb", "json", "png"))
    text = structure.to_pdb()
    write_atomically(pdb, lambda path: path.write_text(text, encoding="ascii"))
    if can_plot():
        write_atomically(plot, lambda path: plot_confidence(path, structure, f"{name}: {scores_of(structure)}"))
    write_atomically(numbers, lambda path: path.write_text(json.dumps(scores) + "\n", encoding="utf-8"))
    return [pdb, numbers, plot] if can_plot() else [pdb, numbers]


def scores_of(structure: Structure) -> str:
    """Return the scores of a structure in a few words."""
    iptm = "" if structure.iptm is None else f", ipTM {structure.iptm:.2f}"
    return f"pLDDT {structure.mean_plddt:.1f}, pTM {structure.ptm:.2f}{iptm}"
