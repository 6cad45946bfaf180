"""Likely profiles of layouts that are not traced yet: a single rank's, shared evenly, with the least messages of the modes.

A layout that replicates or pads something computes, keeps and sends more: its candidates are slower than those of this profile.
Only layouts that could win with this profile are traced.
"""

from __future__ import annotations

from dataclasses import replace

from meshfold.mesh import LayoutError, Mesh, ParallelSpec
from meshfold.mesh.model_io import Operator
from meshfold.planner.clock import Work
from meshfold.planner.estimates import Memory
from meshfold.planner.suggestions.layouts import Family
from meshfold.planner.suggestions.profile import Message, Part, Profile
from meshfold.tensor_parallel import find_mode, matmul_cost

_Sent = dict[Message, tuple[float, int]]


class Likely:
    """Likely profiles of one model."""

    def __init__(self, serial: Profile, seq_len: int, width: int) -> None:
        """Args:
        serial: the profile of a single rank.
        seq_len: tokens of a sequence.
        width: bytes of an element of activations.
        """
        self._serial, self._seq_len, self._width = serial, seq_len, width
        self._found: dict[str, Profile] = {}

    def of(self, family: Family) -> Profile:
        """Return the likely profile of a family's layout."""
        spec = family.layout
        key = str(spec.to_dict())
        if key not in self._found:
            self._found[key] = self._shared(spec)
        return self._found[key]

    def _shared(self, spec: ParallelSpec) -> Profile:
        tensor = 1 if spec.tensor is None else spec.tensor.size
        tokens = 1 if spec.sequence is None or spec.sequence.mode == "megatron" else spec.sequence.size
        experts = 1 if spec.expert is None else spec.expert.size
        plain = spec.tensor is not None and spec.tensor.mode == "1d" and spec.sequence is None
        whole = plain and spec.tensor is not None and spec.tensor.attention is None  # every rank has the whole stream

        def of_part(part: Part, *, block: bool) -> Part:
            steps = {}
            for rows, step in part.steps.items():
                stream = step.stream / tokens / (1 if whole else tensor)
                steps[rows] = replace(
                    step,
                    forward=_share(step.forward, tensor * tokens),
                    backward=_share(step.backward, tensor * tokens),
                    messages=self._messages(spec, rows, step.stream) if block else {},
                    saved=step.saved / (tensor * tokens),
                    stream=stream,
                    inside=step.inside / (tensor * tokens),
                    outside=step.outside / (tensor * tokens),
                )
            split = tensor * (experts if block else 1)
            return Part(
                steps=steps,
                summed=replace(part.summed, backward=_share(part.summed.backward, split), messages={}),
                memory=Memory(
                    **{
                        name: getattr(part.memory, name) // split
                        for name in ("parameters", "masters", "gradients", "optimizer")
                    },
                    activations=0,
                ),
                elements=part.elements // split,
                updated=part.updated,
            )

        serial = self._serial
        return Profile(
            spec=spec,
            shape=serial.shape,
            block=of_part(serial.block, block=True),
            rest=of_part(serial.rest, block=False),
        )

    def _messages(self, spec: ParallelSpec, rows: int, stream: float) -> _Sent:
        """Return a block's least messages for some rows, given the bytes of their stream on a single rank."""
        return {**self._of_tensor(spec, rows, stream), **self._of_sequence(spec, stream)}

    def _of_tensor(self, spec: ParallelSpec, rows: int, stream: float) -> _Sent:
        tensor = spec.tensor
        if tensor is None or tensor.size == 1:
            return {}
        tokens = 1 if spec.sequence is None or spec.sequence.mode == "megatron" else spec.sequence.size
        if tensor.mode == "1d":
            # Two sums of the stream each way; with attention by tokens those of its MLP.
            sums = 2 if tensor.attention is None else 1
            sent = 2 * (tensor.size - 1) / tensor.size * sums * stream / tokens
            return {(phase, "all_reduce", ("tensor",), False): (sent, sums) for phase in ("forward", "backward")}
        count = rows * self._seq_len
        hidden = max(1, round(stream / count / self._width))
        sizes = dict(m=-(-count // tokens // tensor.size) * tensor.size, k=hidden, n=hidden)
        plans, mesh = find_mode(tensor.mode_name).plans, Mesh(tensor.axes, rank=0)
        found: _Sent = {}
        try:
            costs = [matmul_cost(plans[role], sizes, mesh, itemsize=self._width) for role in ("column", "row")]
        except LayoutError:  # the engine reports it later
            return {}
        for cost in costs:
            for entry in cost.entries:
                key = (entry.phase, entry.kind, entry.axes, False)
                size, calls = found.get(key, (0.0, 0))
                found[key] = size + 2 * float(entry.bytes), calls + 2
        return found

    def _of_sequence(self, spec: ParallelSpec, stream: float) -> _Sent:
        """Return a block's messages over sequence axes: of queries and outputs, or of keys and values in a ring."""
        sequence = spec.sequence
        if sequence is None or sequence.mode == "megatron":
            return {}
        local = stream / sequence.size / (1 if spec.tensor is None else spec.tensor.size)
        inner = sequence.size if sequence.mode == "ulysses" else sequence.ulysses or 1
        ring = sequence.size // inner
        found: _Sent = {}
        for phase in ("forward", "backward"):
            if inner > 1:
                axis = "seq" if ring == 1 else "ulysses"
                found[phase, "all_to_all", (axis,), False] = 2 * (inner - 1) / inner * local, 2
            if ring > 1:
                axis = "seq" if inner == 1 else "ring"
                times = 2 if phase == "forward" else 4
                sent = times * (ring - 1) * self._serial.shape.key_values * local
                found[phase, "shift", (axis,), False] = sent, ring - 1
        return found


def _share(work: Work, ranks: int) -> Work:
    """Return an even share of the work, in as many operators."""
    if ranks == 1:
        return work
    found: dict[Operator, int] = {}
    for operator, count in work.operators.items():
        part = replace(operator, flop=operator.flop // ranks, bytes=operator.bytes // ranks)
        found[part] = found.get(part, 0) + count
    return Work(operators=found)
