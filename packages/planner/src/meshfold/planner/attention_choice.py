"""Attention by heads or by tokens, for mode 1d with ``overlap="auto"``: whichever step takes less time at best.

By heads, the products of attention's linear layers wait for gathers and scatters of the stream. By tokens, layers wait for fewer
bytes, and the gradients of whole weights are summed during backward. Critical bytes add to the time of a step; hideable ones do
only where they take longer than everything else (:attr:`meshfold.planner.Times.overlapped`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshfold.mesh import MeshfoldError, ParallelSpec
from meshfold.mesh.spec import format_bytes
from meshfold.planner.estimates import Estimate, step_times
from meshfold.planner.machines import Machine
from meshfold.planner.planner import explain_misfit

_MEGATRON = "megatron"


@dataclass(frozen=True, kw_only=True)
class AttentionChoice:
    """The choice for one spec.

    Attributes:
        by_tokens: whether attention should be computed by tokens.
        why: the reason, in words, with the bytes and seconds of both.
        tensor: the entry of the spec by tokens, where that is faster; None elsewhere.
        found: the estimate by tokens; None where it cannot be.
    """

    by_tokens: bool
    why: str
    found: Estimate | None
    tensor: dict[str, object] | None = None

    def __str__(self) -> str:
        """Return the reason, and what to write in a spec of one's own."""
        if self.tensor is None:
            return self.why
        return f"{self.why}. Write tensor=dict({', '.join(f'{key}={value!r}' for key, value in self.tensor.items())})"


def choose_attention(
    found: Estimate, machine: Machine, precision: str, again: Callable[[ParallelSpec], Estimate]
) -> AttentionChoice | None:
    """Choose how attention is computed; None for a spec that leaves nothing to choose.

    Args:
        found: the estimate by heads.
        machine: whose links and devices count.
        precision: of the estimate.
        again: estimates the same model under another spec.
    """
    spec, tensor = found.spec, found.spec.tensor
    if tensor is None or tensor.size == 1 or tensor.overlap != "auto" or tensor.mode != "1d" or tensor.attention:
        return None
    if spec.sequence is not None and spec.sequence.mode != _MEGATRON:
        return None
    changed = {**tensor.to_dict(), "attention": "tokens"}
    try:
        other = again(ParallelSpec.parse({**spec.to_dict(), "tensor": changed}, found.world_size))
    except MeshfoldError as error:
        return AttentionChoice(by_tokens=False, why=f"attention by heads: by tokens is refused: {error}", found=None)
    now, then = (step_times(each, machine, precision).overlapped for each in (found, other))
    compared = (
        f"products wait for {format_bytes(other.critical)} a step in place of {format_bytes(found.critical)}, and gradients and "
        f"parameters that travel meanwhile are {format_bytes(other.hideable)} in place of {format_bytes(found.hideable)}: at least "
        f"{1e3 * then:.3g} ms in place of {1e3 * now:.3g} ms"
    )
    misfit = explain_misfit(other, machine)
    if misfit and not explain_misfit(found, machine):
        why = f"attention by heads, since by tokens it would not fit: {misfit}"
        return AttentionChoice(by_tokens=False, why=why, found=other)
    if then < now:
        return AttentionChoice(
            by_tokens=True, why=f"attention by tokens is faster: {compared}", found=other, tensor=changed
        )
    return AttentionChoice(by_tokens=False, why=f"attention by heads, not by tokens, where {compared}", found=other)
