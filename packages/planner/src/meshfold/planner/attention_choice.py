"""Choice of attention by heads or by tokens, for mode 1d with ``overlap="auto"``: the one with the faster step.

By heads, the products of attention's linear layers wait for gathers and scatters of the stream. By tokens, layers wait for fewer
bytes, and the gradients of whole weights are summed during backward. Critical bytes add to the time of a step; hideable ones do
only where they take longer than everything else (:attr:`meshfold.planner.Times.overlapped`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from meshfold.mesh import LaunchError, MeshfoldError, ParallelSpec
from meshfold.mesh.processes import running_world
from meshfold.mesh.spec import format_bytes
from meshfold.planner.estimates import Estimate, step_times
from meshfold.planner.fitting import explain_misfit
from meshfold.planner.known_machines import unlimited_machine
from meshfold.planner.machines import Machine
from meshfold.planner.planner import estimate

_MEGATRON = "megatron"


@dataclass(frozen=True, kw_only=True)
class AttentionChoice:
    """The choice for one spec.

    Attributes:
        by_tokens: whether attention should be computed by tokens.
        why: the reason, in words, with the bytes and seconds of both.
        tensor: the entry of the spec by tokens, where that is faster; None elsewhere.
        found: the estimate by tokens; None if the spec does not allow it.
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
        machine: the devices and links.
        precision: of the estimate.
        again: estimates the same model under another spec.
    """
    spec, tensor = found.spec, found.spec.tensor
    if tensor is None or not _open(spec):
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


def choose_spec(
    build: Callable[[], nn.Module],
    parallel: Mapping[str, object] | ParallelSpec,
    world_size: int,
    *,
    batch_size: int,
    seq_len: int,
    precision: str = "fp32",
    machine: Machine | None = None,
    **settings: Any,
) -> ParallelSpec:
    """Return a spec for an engine of your own in which ``overlap="auto"`` has chosen how attention is computed.

    The choice is that of ``meshfold plan`` and ``meshfold train``. It depends on shapes and the machine's data sheet alone, so it
    is the same on every rank. ``Engine.report`` lists it with the reason. A spec that leaves nothing to choose stays unchanged;
    write ``attention="heads"`` or ``attention="tokens"`` to choose yourself.

    Args:
        build: makes the model as for one device, which is never allocated.
        parallel: as for the engine.
        world_size: ranks of the job.
        batch_size: sequences of a global batch.
        seq_len: tokens of a sequence.
        precision: as for the engine.
        machine: the devices and links. None: H200s with the memory of this process's GPU, unlimited without one.
        settings: other arguments of :func:`meshfold.planner.estimate`.

    Raises:
        SpecError: for anything that the engine refuses.
        LaunchError: after the first engine: the process group is running.
    """
    spec = (parallel if isinstance(parallel, ParallelSpec) else ParallelSpec.parse(parallel)).with_world_size(
        world_size
    )
    tensor = spec.tensor
    if tensor is None or not _open(spec):
        return spec
    if running_world() is not None:
        raise LaunchError(
            "choose_spec simulates the ranks, and a process group is already running in this process: call it before the first "
            "Engine, with the world size as a number"
        )
    if machine is None:
        machine = unlimited_machine()
        if torch.cuda.is_available():
            machine = replace(machine, memory=torch.cuda.get_device_properties(0).total_memory)
    on = machine

    def estimated(spec: ParallelSpec) -> Estimate:
        return estimate(
            build, spec, batch_size=batch_size, seq_len=seq_len, precision=precision, machine=on, **settings
        )

    chosen = choose_attention(estimated(spec), machine, precision, estimated)
    if chosen is None:
        return spec
    attention = "tokens" if chosen.by_tokens else "heads"
    return replace(spec, tensor=replace(tensor, attention=attention, chosen=chosen.why))


def _open(spec: ParallelSpec) -> bool:
    """Return True if the spec leaves open how attention is computed."""
    tensor = spec.tensor
    if tensor is None or tensor.size == 1 or tensor.overlap != "auto" or tensor.mode != "1d" or tensor.attention:
        return False
    return spec.sequence is None or spec.sequence.mode == _MEGATRON
