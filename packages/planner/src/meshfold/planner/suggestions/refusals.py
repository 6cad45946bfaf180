"""Sentences for a search that finds nothing: what is wrong, and what would help."""

from __future__ import annotations

from collections.abc import Sequence

from meshfold.mesh.spec import divisors, format_bytes
from meshfold.planner.machines import Machine
from meshfold.planner.suggestions.options import Option, Rejected


def untraceable(error: Exception) -> str:
    """Return the sentence for a model that the engine refuses on a single rank."""
    return (
        f"the model cannot be traced on meta tensors, so nothing can be suggested for it: {sentence(error)}. It must be a "
        "causal language model whose forward takes token ids and labels and returns a loss; write parallel=dict(...) for "
        "others"
    )


def undivided(batch_size: int, seq_len: int, ranks: int) -> str:
    """Return the sentence for a batch that no spec divides."""
    near = max(1, batch_size // ranks) * ranks
    return (
        f"no spec divides a batch of {batch_size} sequences of {seq_len} tokens over {ranks} ranks: take a "
        f"batch of {near} sequences, or {max(d for d in divisors(ranks) if d <= batch_size)} ranks"
    )


def too_large(machine: Machine) -> str:
    """Return the sentence for a family of which no candidate fits."""
    return f"no setting of it fits in {format_bytes(round(machine.memory))}"


def unfitting(
    machine: Machine, ranks: int, planned: Sequence[Option], refused: Sequence[Rejected], least: float
) -> str:
    """Return the sentence for a search in which no candidate can be used.

    Args:
        machine: to train on.
        ranks: world size.
        planned: options, none of which fits.
        refused: families that lost without a plan.
        least: bytes of a rank by the smallest outlook; 0 without one.
    """
    where = f"nothing fits in {format_bytes(round(machine.memory))} a device on {ranks} rank{'s' * (ranks > 1)} of {machine.name}"
    if not planned:
        refusals = [one.why for one in refused]
        if refusals and too_large(machine) not in refusals:
            return f"no spec for {ranks} ranks can be used. {refusals[0]}"
        held = f": a rank would hold {format_bytes(round(least))} at least" if least else ""
        return f"{where}{held}. Take more ranks, a smaller batch, shorter sequences or larger devices"
    smallest = min(planned, key=lambda one: one.bytes)
    return (
        f"{where}: with parallel={smallest.candidate.spec.to_dict()} a rank holds {format_bytes(smallest.bytes)}. Take more ranks, "
        "a smaller batch, shorter sequences or larger devices"
    )


def sentence(error: Exception) -> str:
    """Return the first line of an error, without its full stop."""
    return str(error).partition("\n")[0].removesuffix(".")
