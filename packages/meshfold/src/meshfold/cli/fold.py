"""Predict the structures of proteins with a Hugging Face folder of ESMFold or ESMFold 2, on one rank or many.

  meshfold fold --model ~/models/esmfold_v1 --sequence MLKNVQVQLV
  meshfold fold --model ~/models/esmfold_v1 --fasta proteins.fasta --recycles 3 --output structures
  meshfold fold --model ~/models/esmfold_v1 --sequence MKTAYIAK:GSHMLEDP                   # two chains
  meshfold fold --model ~/models/esmfold_v1 --fasta long.fasta --ranks 4                   # pair rows over four GPUs
  meshfold fold --model ~/models/esmfold_v1 --fasta long.fasta --axial 2x4                 # rows x columns

Of each protein DIR gets NAME.pdb (pLDDT as B-factor), NAME.json (pLDDT, PAE, pTM) and NAME.png, which shows them. FILE is in
FASTA format; ':' separates the chains of a protein. Ranks share the pair tensor of the trunk, whose memory grows with the
square of the residues; each holds all weights. Nothing is downloaded. Proteins whose files are there are left out, so the same
command goes on after an interruption.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshfold.cli.arguments import Failure, byte_size, natural, positive
from meshfold.cli.fold_files import FoldSettings, find_folded, make_folder, scores_of, write_structure

if TYPE_CHECKING:
    from meshfold.data.proteins import Protein
    from meshfold.folding import MemoryPlan
    from meshfold.huggingface import FoldingModel, Structure
    from meshfold.mesh import Mesh

INTERRUPTED = 130
"""Exit code of a launcher whose ranks Ctrl-C has ended."""
PRECISIONS = {"fp32": "float32", "bf16": "bfloat16"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``meshfold fold``."""
    parser.usage = "meshfold fold --model DIR (--sequence ACDE... | --fasta FILE) [options]"
    parser.add_argument(
        "--model",
        required=True,
        metavar="DIR",
        help="a local folder of EsmForProteinFolding or EsmFold2Model, with weights",
    )
    source = parser.add_argument_group("proteins")
    source.add_argument(
        "--sequence",
        action="append",
        default=[],
        metavar="ACDE...",
        help="amino acids in one-letter code, ':' between chains; several times for several proteins",
    )
    source.add_argument("--fasta", type=Path, metavar="FILE", help="proteins of a FASTA file")
    how = parser.add_argument_group("how it runs")
    how.add_argument("--recycles", type=natural, metavar="N", help="passes after the first (default: the model's)")
    how.add_argument("--ranks", type=positive, metavar="N", help="how many processes share a protein (1)")
    how.add_argument(
        "--axial",
        default="",
        metavar="MODE",
        help="dap: rows of pairs over the ranks; grid: rows and columns; 2x4: a grid of that size; 2x2x2: of machines, rows "
        "and columns (dap)",
    )
    how.add_argument(
        "--memory",
        type=byte_size,
        metavar="SIZE",
        help="of a rank, for weights and trunk, which computes in chunks that fit (default: what a GPU has)",
    )
    how.add_argument("--precision", choices=PRECISIONS, default="fp32", help="of the weights (fp32)")
    how.add_argument("--device", choices=("cpu", "cuda"), help="(default: the GPU if there is one)")
    how.add_argument("--seed", type=natural, default=0, help="of the noise that ESMFold 2 begins with (0)")
    parser.add_argument(
        "--output", type=Path, default=Path("folded"), metavar="DIR", help="folder of the files (folded)"
    )
    parser.add_argument("--overwrite", action="store_true", help="fold again what is in the folder, and write over it")


def run(arguments: argparse.Namespace) -> int:
    """Run ``meshfold fold``, in the process that starts the ranks, or as one of them."""
    from meshfold.huggingface import open_folding
    from meshfold.mesh import Mesh
    from meshfold.mesh.processes import Environment, launch
    from meshfold.mesh.processes import start as join

    here = Environment.detect()
    alone = here.source == "single"
    layout = read_axial(arguments.axial, arguments.ranks, None if alone else here.world_size)
    proteins = read_proteins(arguments)
    open_folding(arguments.model, f"--model {arguments.model!r}")  # first, so that no rank starts without it
    settings = FoldSettings.of(arguments)
    folded: list[str] = []
    if here.rank == 0:  # other ranks may be on machines that do not see the folder
        make_folder(arguments.output)
        folded = [] if arguments.overwrite else find_folded(arguments.output, proteins, settings)
        if folded and alone:
            print(
                f"{len(folded)} of {_count(len(proteins), 'protein')} in {arguments.output} already: left out "
                "(--overwrite folds them again)",
                file=sys.stderr,
            )
            if len(folded) == len(proteins):
                return 0
    if alone:
        _check_devices(arguments.device, layout.ranks)
    try:
        if not alone or layout.ranks == 1:
            with join(device=arguments.device) as process:
                _fold(arguments, Mesh(layout.axes), layout, proteins, folded, settings, process.device)
            return 0
        code = launch(["-m", "meshfold.cli", "fold", *arguments.argv], layout.ranks)
        if code == INTERRUPTED:
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        if alone:
            done = len(find_folded(arguments.output, proteins, settings))
            left = "" if arguments.overwrite else "; the same command goes on from there"
            print(f"\n{done} of {_count(len(proteins), 'protein')} in {arguments.output}{left}", file=sys.stderr)
        raise
    return code


@dataclass(frozen=True)
class AxialLayout:
    """The axial mode of a run, and its mesh.

    Attributes:
        mode: its name.
        axes: name to size.
    """

    mode: str
    axes: dict[str, int]

    @property
    def ranks(self) -> int:
        """The number of processes."""
        count = 1
        for size in self.axes.values():
            count *= size
        return count

    def __str__(self) -> str:
        if self.ranks == 1:
            return "one rank"
        return f"{self.mode} {' x '.join(f'{name}={size}' for name, size in self.axes.items())}"


def read_axial(text: str, ranks: int | None, started: int | None = None) -> AxialLayout:
    """Parse ``--axial`` and ``--ranks``.

    Args:
        text: ``dap``, ``grid``, ``2x4`` or ``2x2x2``; empty: ``dap``.
        ranks: as asked for; None: what the mode says, else 1.
        started: ranks that a launcher has started; None: there is none.

    Raises:
        Failure: for another text, and ranks that do not fit.
    """
    if started is not None and ranks not in (None, started):
        raise Failure(f"--ranks {ranks}, but the launcher started {started}: leave --ranks out")
    count = ranks if started is None else started
    if re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", text):
        sizes = [int(size) for size in text.split("x")]
        names = ("depth", "row", "col")[-len(sizes) :]
        found = AxialLayout("grid" if len(sizes) == 2 else "grid+depth", dict(zip(names, sizes, strict=True)))
        if count not in (None, found.ranks):
            by = f"the launcher started {count}" if started is not None else f"--ranks is {count}"
            raise Failure(
                f"--axial {text} takes {found.ranks} ranks, and {by}: leave --ranks out, or write --axial grid"
            )
        return found
    count = count or 1
    if text in ("", "dap"):
        return AxialLayout("dap", {"axial": count})
    if text == "grid":
        rows = max(size for size in range(1, int(count**0.5) + 1) if count % size == 0)
        return AxialLayout("grid", {"row": rows, "col": count // rows})
    raise Failure(f"--axial {text!r} is not known: write dap, grid, or a grid's size such as 2x4")


def read_proteins(arguments: argparse.Namespace) -> list[Protein]:
    """Return the proteins of the arguments.

    Raises:
        Failure: if there are none.
        MeshfoldError: for a sequence that cannot be folded.
    """
    from meshfold.data.proteins import Protein, parse_chains, read_fasta

    for text in arguments.sequence:
        if "." in text and Path(text).is_file():
            raise Failure(f"--sequence {text}: it is a file; write --fasta {text}")
    count = len(arguments.sequence)
    found = [
        Protein(
            f"sequence{number}" if count > 1 else "sequence",
            parse_chains(text, f"--sequence number {number}" if count > 1 else "--sequence"),
        )
        for number, text in enumerate(arguments.sequence, 1)
    ]
    if arguments.fasta is not None:
        if found:
            raise Failure("--sequence and --fasta cannot both be given: put all proteins into the file")
        if re.fullmatch(r"[A-Z:]{4,}", str(arguments.fasta)) and not arguments.fasta.exists():
            raise Failure(
                f"--fasta {arguments.fasta}: there is no such file; write amino acids as --sequence {arguments.fasta}"
            )
        found = read_fasta(arguments.fasta)
    if not found:
        raise Failure("nothing to fold: give --sequence MLKNVQVQLV, or --fasta FILE")
    return found


def _check_devices(device: str | None, ranks: int) -> None:
    """Refuse more ranks than GPUs: ranks that share a GPU hold its weights several times and gain nothing."""
    import torch

    there = torch.cuda.device_count()
    if device == "cuda" and not there:
        raise Failure("--device cuda: there is no GPU that torch can use; write --device cpu")
    if device != "cpu" and 0 < there < ranks:
        raise Failure(f"{ranks} ranks, and this machine has {there} GPUs: use --ranks {there}, or --device cpu")


def _fold(
    arguments: argparse.Namespace,
    mesh: Mesh,
    layout: AxialLayout,
    proteins: list[Protein],
    folded: list[str],
    settings: FoldSettings,
    device: Any,
) -> None:
    """Load the model and fold every protein that is not folded; rank 0 knows these, writes and prints."""
    import torch

    from meshfold.cli.fold_plan import plan_proteins
    from meshfold.huggingface import open_folding, silence_transformers
    from meshfold.mesh.collectives import all_gather_object
    from meshfold.mesh.processes import start_largest

    silence_transformers()
    first, everyone = mesh.rank == 0, mesh.group(*mesh.axes)
    there = set(all_gather_object(folded, everyone, device)[0])
    proteins = [protein for protein in proteins if protein.name not in there]
    begin = time.perf_counter()
    folder = open_folding(arguments.model)
    dtype = getattr(torch, PRECISIONS[arguments.precision])
    model = folder.load(mesh, layout.mode, device=device, dtype=dtype)
    show = _Display(first)
    show.line(f"{folder.model_class} loaded in {time.perf_counter() - begin:.1f} s; {layout} on {device.type}")
    memory = arguments.memory
    if memory is None and device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
        memory = -start_largest(-free, everyone)()  # all ranks make the same plan
    plans = {} if memory is None else plan_proteins(model, proteins, memory, asked=arguments.memory is not None)
    for number, protein in enumerate(proteins, 1):
        label = f"{number}/{len(proteins)} {protein.name}"
        plan = None
        if memory is not None:
            plan = plans.get(model.tokens(protein.chains)) or model.plan_memory(protein.chains, memory)
            model.use_plan(plan)
        show.line(f"{label}: {_told(model, protein, layout, dtype, plan)}")
        begin = time.perf_counter()
        try:
            structure = model.predict(
                protein.chains,
                arguments.recycles,
                seed=arguments.seed,
                on_pass=lambda done, passes, label=label: show.progress(f"{label}: pass {done + 1} of {passes}"),  # type: ignore[misc]
            )
        except torch.OutOfMemoryError as error:
            raise Failure(
                f"{protein.name}: the memory of {layout.ranks} GPU{'s' * (layout.ranks > 1)} is too small for "
                f"{protein.residues} residues: use --ranks {2 * layout.ranks}, or --precision bf16",
                1,
            ) from error
        seconds = time.perf_counter() - begin
        show.progress("")
        if first:
            files = write_structure(arguments.output, protein.name, structure, settings)
            print(_summary(protein, structure, seconds, files), flush=True)


def _told(model: FoldingModel, protein: Protein, layout: AxialLayout, dtype: Any, plan: MemoryPlan | None) -> str:
    """Return what is known of a protein before it is folded: sizes, chunks, and what the ranks hold and send."""
    from meshfold.folding import folding_cost
    from meshfold.mesh.spec import format_bytes

    tokens = model.tokens(protein.chains)
    whole = tokens**2 * model.pair_channels * dtype.itemsize
    text = f"{_count(protein.residues, 'residue')}, {_count(len(protein.chains), 'chain')}"
    text += f"; a pair tensor has {format_bytes(whole)}"
    trunk = "" if plan is None else f"; a rank needs {format_bytes(plan.bytes)}, {plan.settings}"
    if layout.ranks == 1:
        return text + trunk
    cost = folding_cost(model.model, residues=tokens, itemsize=dtype.itemsize)
    sent = float(sum(entry.bytes for entry in cost.entries if entry.phase == "forward"))
    return f"{text}, {format_bytes(whole // layout.ranks)} of it a rank, which sends {format_bytes(sent)} a pass{trunk}"


def _summary(protein: Protein, structure: Structure, seconds: float, files: list[Path]) -> str:
    unknown = sum(chain.count("X") for chain in protein.chains)
    bare = f" ({_count(unknown, 'unknown residue')} without atoms)" if unknown else ""
    plot = "" if len(files) > 2 else " (no plot: pip install meshfold[plot])"
    ends = ", ".join(file.suffix for file in files[1:])
    return f"{protein.name}: {scores_of(structure)}, {seconds:.1f} s -> {files[0]}, {ends}{bare}{plot}"


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"


class _Display:
    """Progress on standard error: the pass that runs, in a line of its own that is written over on a terminal."""

    def __init__(self, shown: bool) -> None:
        self._shown, self._over = shown, sys.stderr.isatty()

    def line(self, text: str) -> None:
        """Print a line."""
        if self._shown:
            print(text, file=sys.stderr, flush=True)

    def progress(self, text: str) -> None:
        """Show where it is; an empty text ends it."""
        if self._shown and self._over:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
        elif text:
            self.line(text)
