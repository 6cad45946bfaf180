"""The memory of all proteins of ``meshfold fold``, planned before the first one is folded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshfold.cli.arguments import Failure
from meshfold.data.proteins import MOST_TOLD

if TYPE_CHECKING:
    from meshfold.data.proteins import Protein
    from meshfold.folding import MemoryPlan, MemoryPlanError
    from meshfold.huggingface import FoldingModel


def plan_proteins(
    model: FoldingModel, proteins: Sequence[Protein], limit: int, *, asked: bool
) -> dict[int, MemoryPlan]:
    """Return plans by their numbers of tokens, from the longest protein to the first that needs no chunks: shorter ones fit too.

    Args:
        model: loaded.
        proteins: to fold.
        limit: bytes of a rank.
        asked: the limit was asked for with ``--memory``.

    Raises:
        Failure: if proteins do not fit; it names them, what they need and what to change.
    """
    from meshfold.folding import MemoryPlanError
    from meshfold.mesh.spec import format_bytes

    room = f"the {format_bytes(limit)} of {'--memory' if asked else 'a GPU'}"
    plans: dict[int, MemoryPlan] = {}
    refused: list[tuple[Protein, MemoryPlanError]] = []
    for protein in sorted(proteins, key=lambda protein: model.tokens(protein.chains), reverse=True):
        tokens = model.tokens(protein.chains)
        if tokens in plans:
            continue
        try:
            plans[tokens] = model.plan_memory(protein.chains, limit)
        except MemoryPlanError as error:
            refused.append((protein, error))
            continue
        if plans[tokens].settings.chunk_bytes is None:
            break
    if not refused:
        return plans
    lines = [
        f"{protein.name}: {protein.residues:,} residues need {format_bytes(error.least)} of a rank, {_advice(error, limit)}"
        for protein, error in refused[:MOST_TOLD]
    ]
    if len(refused) > MOST_TOLD:
        lines.append(f"and {len(refused) - MOST_TOLD} more, which are shorter")
    count = f"{len(refused)} of {len(proteins)} proteins" if len(proteins) > 1 else "the protein"
    ways = ["use more --ranks", "--precision bf16"][: 2 if model.dtype.itemsize > 2 else 1]
    ways += ["leave out what is too long"] if len(proteins) > len(refused) else ["give a shorter one"]
    ways[-1] = f"or {ways[-1]}"
    does = f"{count} {'does' if len(refused) == 1 else 'do'} not fit into {room}, and nothing was folded"
    raise Failure("\n".join([f"{does}: {', '.join(ways)}", *lines]), 1)


def _advice(error: MemoryPlanError, limit: int) -> str:
    from meshfold.mesh.spec import format_bytes

    if error.ranks is not None:
        return f"and fit over --ranks {error.ranks}"
    if error.fixed >= limit:
        return f"of which {format_bytes(error.fixed)} are weights and what is beside the trunk"
    return f"about {error.residues:,} residues fit" if error.residues else "give a larger --memory"
