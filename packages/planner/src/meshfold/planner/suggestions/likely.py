"""Likely profiles of layouts that are not traced yet: a single rank's, shared evenly, with the least messages of the modes.

A layout that replicates or pads something computes, keeps and sends more: its candidates are slower than those of this profile.
Only layouts that could win with this profile are traced.
"""

from __future__ import annotations

import math
from dataclasses import replace

from meshfold.experts import chosen_exchange
from meshfold.mesh import LayoutError, Mesh, ParallelSpec
from meshfold.mesh.model_io import Operator
from meshfold.planner.clock import Work
from meshfold.planner.estimates import Memory
from meshfold.planner.suggestions.layouts import Family
from meshfold.planner.suggestions.profile import Message, Part, Profile, Step
from meshfold.tensor_parallel import find_mode, matmul_cost

_PHASES = ("forward", "backward")
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
        tokens = _token_ranks(spec)
        plain = spec.tensor is not None and spec.tensor.mode == "1d" and spec.sequence is None
        whole = plain and spec.tensor is not None and spec.tensor.attention is None  # every rank has the whole stream

        def of_part(part: Part, *, block: bool) -> Part:
            steps = {}
            for rows, step in part.steps.items():
                stream = step.stream / tokens / (1 if whole else tensor)
                share = self._computed(spec, rows, step) if block else 1 / (tensor * tokens)
                steps[rows] = replace(
                    step,
                    forward=_share(step.forward, share),
                    backward=_share(step.backward, share),
                    messages=self._messages(spec, rows, step.stream) if block else {},
                    saved=step.saved / (tensor * tokens),
                    stream=stream,
                    inside=step.inside / (tensor * tokens),
                    outside=step.outside / (tensor * tokens),
                )
            held = self._held(spec) if block else 1 / tensor
            return Part(
                steps=steps,
                summed=replace(part.summed, backward=_share(part.summed.backward, held), messages={}),
                memory=Memory(
                    **{
                        name: int(held * getattr(part.memory, name))
                        for name in ("parameters", "masters", "gradients", "optimizer")
                    },
                    activations=0,
                ),
                elements=int(held * part.elements),
                updated=part.updated,
            )

        serial = self._serial
        return Profile(
            spec=spec,
            shape=serial.shape,
            block=of_part(serial.block, block=True),
            rest=of_part(serial.rest, block=False),
        )

    def _held(self, spec: ParallelSpec) -> float:
        """Return the share of a block's parameters that a rank holds: tensor ranks share all but experts, their own ranks those."""
        shape, tensor = self._serial.shape, 1 if spec.tensor is None else spec.tensor.size
        experts = shape.expert_elements / self._serial.block.elements
        return (1 - experts) / tensor + experts / (1 if spec.expert is None else spec.expert.ranks)

    def _computed(self, spec: ParallelSpec, rows: int, step: Step) -> float:
        """Return the share of a block's operators that a rank runs: experts are run for every token of ranks that have the same."""
        tensor, tokens = 1 if spec.tensor is None else spec.tensor.size, _token_ranks(spec)
        if tensor == 1 or spec.expert is not None or tokens > 1 or not step.forward.flop:
            return 1 / (tensor * tokens)
        shape = self._serial.shape
        each = shape.expert_elements / max(1, shape.experts)
        experts = min(1.0, 2 * rows * self._seq_len * shape.top_k * each / step.forward.flop)
        return (1 - experts) / tensor + experts

    def _messages(self, spec: ParallelSpec, rows: int, stream: float) -> _Sent:
        """Return a block's least messages for some rows, given the bytes of their stream on a single rank."""
        found: _Sent = {}
        for sent in (
            self._of_tensor(spec, rows, stream),
            self._of_sequence(spec, stream),
            self._of_experts(spec, stream),
        ):
            for key, (size, calls) in sent.items():
                before = found.get(key, (0.0, 0))
                found[key] = before[0] + size, before[1] + calls
        return found

    def _of_tensor(self, spec: ParallelSpec, rows: int, stream: float) -> _Sent:
        tensor = spec.tensor
        if tensor is None or tensor.size == 1:
            return {}
        tokens = _token_ranks(spec)
        split = self._serial.shape.split_parts
        if tensor.mode == "1d":
            # A sum of the stream each way for its attention, unless that is by tokens, and one for its MLP.
            sums = split if tensor.attention is None else split - 1
            sent = 2 * (tensor.size - 1) / tensor.size * sums * stream / tokens
            return {(phase, "all_reduce", ("tensor",), False): (sent, sums) for phase in _PHASES if sums}
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
                found[key] = size + split * float(entry.bytes), calls + split
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
        for phase in _PHASES:
            if inner > 1:
                axis = "seq" if ring == 1 else "ulysses"
                found[phase, "all_to_all", (axis,), False] = 2 * (inner - 1) / inner * local, 2
            if ring > 1:
                axis = "seq" if inner == 1 else "ring"
                times = 2 if phase == "forward" else 4
                sent = times * (ring - 1) * self._serial.shape.key_values * local
                found[phase, "shift", (axis,), False] = sent, ring - 1
        return found

    def _of_experts(self, spec: ParallelSpec, stream: float) -> _Sent:
        """Return a block's messages of tokens to experts and back, if every expert gets as many.

        Each tensor rank sends its share of the tokens.
        """
        if spec.expert is None or spec.expert.size == 1:
            return {}
        shape, blocks, axes = self._serial.shape, spec.expert.size, spec.expert_axes
        local = stream / (math.prod(spec.axes.values()) / spec.axes["data"])  # a layout has no stages
        if chosen_exchange(spec.expert.exchange, blocks=blocks, top_k=shape.top_k) == "all_gather":
            sent = (blocks - 1) * local
            return {(phase, kind, axes, False): (sent, 1) for phase in _PHASES for kind in ("all_gather", "all_to_all")}
        sent = 2 * (blocks - 1) * (1 - (1 - 1 / blocks) ** shape.top_k) * local
        return {(phase, "exchange_rows", axes, False): (sent, 2) for phase in _PHASES}


def _token_ranks(spec: ParallelSpec) -> int:
    """Return how many ranks share a sequence's tokens outside of tensor modes."""
    return 1 if spec.sequence is None or spec.sequence.mode == "megatron" else spec.sequence.size


def _share(work: Work, share: float) -> Work:
    """Return a share of the work, in as many operators."""
    if share == 1:
        return work
    found: dict[Operator, int] = {}
    for operator, count in work.operators.items():
        part = replace(operator, flop=int(operator.flop * share), bytes=int(operator.bytes * share))
        found[part] = found.get(part, 0) + count
    return Work(operators=found)
