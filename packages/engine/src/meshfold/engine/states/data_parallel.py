"""Gradients over the data axes: summed in buckets while backward still runs.

A gradient waits from when autograd has accumulated it until its bucket has all of them. One call then moves them into a flat
buffer, so that the host spends little on each parameter. In the last backward of an accumulation such a bucket is all-reduced
at once, over the axes that its parameters' metadata names, overlapping with the rest of backward (as in Li et al., "PyTorch
Distributed: Experiences on Accelerating Data Parallel Training", arXiv 2006.15704, section 3.2). If it was not the last after
all, the sum waits, and the sum of later gradients is added.

Buckets are filled in reverse order of the parameters and launched in that order on every rank, whatever order
gradients come in. A parameter without a gradient adds zeros, so that ranks which used different parameters make the same
collective calls. A parameter that no rank used keeps the gradient None, as in a single process. For this each bucket ends
in one number per parameter: the ranks that used it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from weakref import ref

import torch
from torch import Tensor, nn

from meshfold.engine.errors import TrainingError
from meshfold.engine.precision import Masters
from meshfold.mesh import Group, Mesh, Pending, all_reduce, metadata
from meshfold.mesh.parameters import GradientProxy
from meshfold.mesh.recording import weight_gradients

BUCKET_BYTES = 25 * 2**20
_ALIGN = 16  # elements: align gradients for vector instructions


@dataclass(frozen=True, kw_only=True)
class BucketGradients:
    """The gradients of a bucket on this rank.

    Attributes:
        flat: one after the other, and a number of uses each.
        filled: indices of the parameters with a gradient in it.
    """

    flat: Tensor
    filled: frozenset[int]


class Bucket:
    """Bucket of parameters with gradients that are reduced together."""

    def __init__(self, parameters: Sequence[nn.Parameter], targets: Sequence[Tensor], group: Group) -> None:
        """Args:
        parameters: in bucket order; of one dtype and device.
        targets: the tensors that get their reduced gradients (the masters), in the same order.
        group: over which they are summed.
        """
        self.parameters, self.targets, self.group = list(parameters), list(targets), group
        self._starts: list[int] = []
        self._total = 0
        self._shapes = [tuple(target.shape) for target in targets]
        self._strides = [target.contiguous().stride() for target in targets]
        for target in targets:
            self._starts.append(self._total)
            self._total += -(-target.numel() // _ALIGN) * _ALIGN
        # All gradients, followed by a use count for each; None while empty or in flight.
        self._flat: Tensor | None = None
        self._parts: list[Tensor] = []  # of that buffer, also in flight; empty until they are needed
        self._waiting: dict[int, Tensor] = {}  # gradients of this backward that are not in the buffer yet, by index
        self._filled: set[int] = set()  # indices of parameters whose gradient is in the buffer
        self._arrived: set[int] = set()  # indices whose gradient of this backward has arrived
        self._used: set[int] = set()  # indices with a gradient on this rank since the reset
        self._pending: Pending | None = None
        self._summed: Tensor | None = None  # the result of earlier sums

    @property
    def held_bytes(self) -> int:
        """Bytes of its gradients, from the first that arrives until its targets release them."""
        there = self._flat is not None or self._pending is not None or any(t.grad is not None for t in self.targets)
        each = self._total * self.targets[0].element_size()
        waiting = sum(gradient.nbytes for gradient in self._waiting.values())
        return each * there + each * (self._summed is not None) + waiting

    @property
    def is_full(self) -> bool:
        """Return True if all gradients of this backward have arrived."""
        return len(self._arrived) == len(self.targets)

    def begin(self) -> None:
        """Prepare for a backward. If the one before seemed to be the last, its sum is kept."""
        self._arrived = set()
        if self._pending is not None:
            summed, self._pending, self._parts = self._pending.wait(), None, []
            self._summed = summed if self._summed is None else self._summed.add_(summed)

    def add(self, place: int, gradient: Tensor, *, whole: bool = True) -> bool:
        """Add a gradient, summing over micro-steps; return True if all gradients of this backward have arrived.

        Args:
            place: index of its parameter.
            gradient: whole, or a part of a sum.
            whole: no more of it arrives in this backward.

        Raises:
            TrainingError: if the bucket is already being reduced.
        """
        if self._pending is not None:
            raise TrainingError(
                f"a parameter of shape {tuple(gradient.shape)} got a second gradient in one backward, after the first "
                "was sent: use torch.utils.checkpoint.checkpoint with use_reentrant=False"
            )
        if place in self._waiting:
            self.write()
        self._waiting[place] = gradient
        if whole:
            self._arrived.add(place)
        full = len(self._arrived) == len(self.targets)
        if full or not whole:
            self.write()
        return full

    def write(self) -> None:
        """Write the gradients that wait into the buffer, or add them to those of earlier micro-steps."""
        if not self._waiting:
            return
        flat = self._make_flat() if self._flat is None else self._flat
        if not self._parts:
            self._parts = self._parts_of(flat)
        found, filled = self._waiting.items(), self._filled
        new = [(self._parts[place], gradient) for place, gradient in found if place not in filled]
        more = [(self._parts[place], gradient) for place, gradient in found if place in filled]
        if new:
            torch._foreach_copy_([part for part, _ in new], [gradient for _, gradient in new])
        if more:
            torch._foreach_add_([part for part, _ in more], [gradient for _, gradient in more])
        filled.update(self._waiting)
        self._used.update(self._waiting)
        self._waiting = {}

    def complete(self, place: int) -> None:
        """Record that a parameter's gradient is complete in this backward."""
        self._arrived.add(place)

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Context manager: the bucket is empty inside, and afterwards as before; not while it is being reduced."""
        self.write()
        before = self._flat, self._filled, self._arrived, self._used, self._summed
        self.reset()
        try:
            yield
        finally:
            self.reset()
            self._flat, self._filled, self._arrived, self._used, self._summed = before

    def take(self) -> BucketGradients | None:
        """Hand over the gradients that have arrived; None if none have."""
        self.write()
        flat, filled = self._flat, frozenset(self._filled)
        self.reset()
        return None if flat is None else BucketGradients(flat=flat, filled=filled)

    def put(self, gradients: BucketGradients | None, *, keep: bool) -> None:
        """Add gradients that were taken, as if they had just arrived.

        Args:
            gradients: of this bucket.
            keep: copy them, since they change before the bucket is delivered.
        """
        if gradients is None:
            return
        self.write()
        flat, filled = gradients.flat, set(gradients.filled)
        if self._flat is None:
            self._flat, self._parts = flat.clone() if keep else flat, []
        elif filled == self._filled:
            self._flat[: self._total].add_(flat[: self._total])
        else:
            for place, mine, theirs in zip(
                range(len(self.targets)), self._parts_of(self._flat), self._parts_of(flat), strict=True
            ):
                if place in filled:
                    mine.add_(theirs) if place in self._filled else mine.copy_(theirs)
        self._filled |= filled
        self._arrived |= filled
        self._used |= filled

    def launch(self) -> None:
        """Start the sum over the group."""
        self.write()
        flat = self._make_flat() if self._flat is None else self._flat
        missing = [place for place in range(len(self.targets)) if place not in self._filled]
        if missing:
            parts = self._parts or self._parts_of(flat)
            torch._foreach_zero_([parts[place] for place in missing])
        if self.group.size > 1:
            self._parts = []  # the sum may be another tensor, and the parts would keep this one
            uses = flat[self._total :].fill_(1)
            if missing:
                uses[missing] = 0
        self._filled = set()
        with weight_gradients():
            self._flat, self._pending = None, all_reduce(flat, self.group, async_op=True)

    def deliver(self, factor: float) -> None:
        """Set every target's summed gradient times the factor, and drop it here."""
        if self._pending is None:
            raise TrainingError("a gradient bucket was to be delivered before it was launched")
        flat = self._pending.wait()
        if self._summed is not None:
            flat.add_(self._summed)
        if factor != 1.0:
            flat[: self._total].mul_(factor)
        anyone = self._used
        if len(anyone) < len(self.targets) and self.group.size > 1:
            # This rank missed some: read which ones others had, which synchronises.
            anyone = set(flat[self._total :].nonzero().flatten().tolist())
        parts = self._parts or self._parts_of(flat)
        for place, (target, part) in enumerate(zip(self.targets, parts, strict=True)):
            target.grad = part if place in anyone else None
        self.reset()

    def reset(self) -> None:
        """Reset to empty."""
        self._flat = self._pending = self._summed = None
        self._parts, self._waiting = [], {}
        self._filled, self._arrived, self._used = set(), set(), set()

    def _make_flat(self) -> Tensor:
        like = self.targets[0]
        self._parts = []
        self._flat = torch.empty(self._total + len(self.targets), dtype=like.dtype, device=like.device)
        return self._flat

    def _parts_of(self, flat: Tensor) -> list[Tensor]:
        """Return the gradients in a buffer, each in the shape of its parameter."""
        return [
            flat.as_strided(shape, strides, start)
            for shape, strides, start in zip(self._shapes, self._strides, self._starts, strict=True)
        ]


class GradientReducer:
    """Collects the gradients of a model's parameters, over micro-steps and over the data axes."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        masters: Masters,
        mesh: Mesh,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """Args:
        parameters: those that are trained, each once, in the same order on every rank.
        masters: where the summed gradients go.
        mesh: gives the group of each parameter's ``sum_axes``.
        bucket_bytes: a bucket is closed once it holds this many.
        """
        self.buckets = _fill(parameters, masters, mesh, bucket_bytes)
        self._listening = self._last = self._owed = self._several = False
        self._next = 0
        self._places: dict[Tensor, tuple[Bucket, int]] = {
            parameter: (bucket, place) for bucket in self.buckets for place, parameter in enumerate(bucket.parameters)
        }
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._hook(bucket, place))
            for bucket in self.buckets
            for place, parameter in enumerate(bucket.parameters)
        ]

    @property
    def held_bytes(self) -> int:
        """Bytes of all gradients that have arrived and are not released."""
        return sum(bucket.held_bytes for bucket in self.buckets)

    def reset(self) -> None:
        """Drop all collected gradients."""
        for bucket in self.buckets:
            bucket.reset()
        self._owed = False

    @contextmanager
    def backward(self, *, last: bool, several: bool = False) -> Iterator[None]:
        """Context manager around each backward. Gradients that arrive at other times belong to another loss and are dropped.

        Args:
            last: of an accumulation; send buckets as they become full.
            several: a parameter may get several gradients, until :meth:`complete` says that it has them all.
        """
        for bucket in self.buckets:
            bucket.begin()
        self._listening, self._last, self._several, self._next = True, last, several, 0
        try:
            yield
        finally:
            self._listening = False
        for bucket in self.buckets:
            bucket.write()
        self._owed = not last
        if last:
            self._launch_rest()

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Context manager around a backward; its gradients are for :meth:`take`, neither reduced nor added to others.

        No bucket may be in flight.
        """
        before = self._listening, self._last, self._several
        self._listening, self._last, self._several = True, False, False
        with ExitStack() as stack:
            for bucket in self.buckets:
                stack.enter_context(bucket.set_aside())
            try:
                yield
            finally:
                self._listening, self._last, self._several = before

    def take(self) -> list[BucketGradients | None]:
        """Return the gradients of every bucket inside :meth:`set_aside`."""
        return [bucket.take() for bucket in self.buckets]

    def put(self, gradients: Sequence[BucketGradients | None], *, keep: bool) -> None:
        """Add gradients that were taken, inside :meth:`backward`, as if they had just arrived; ``keep`` as for a bucket."""
        for bucket, each in zip(self.buckets, gradients, strict=True):
            bucket.put(each, keep=keep)

    def complete(self, parameters: Iterable[Tensor]) -> None:
        """Record inside a backward of several that these parameters have all their gradients."""
        for parameter in parameters:
            if parameter in self._places:
                bucket, place = self._places[parameter]
                bucket.complete(place)
        if self._last and self._listening:
            self._launch_ready()

    def finish(self, factor: float = 1.0) -> None:
        """Finish after the last backward: set the targets' gradients, summed and times the factor."""
        if self._owed:
            for bucket in self.buckets:
                bucket.begin()
            self._next, self._owed = 0, False
            self._launch_rest()
        for bucket in self.buckets:
            bucket.deliver(factor)

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()

    def _hook(self, bucket: Bucket, place: int) -> Callable[[Tensor], None]:
        # Weak: a reducer dropped without close() must not take gradients, and the garbage collector does not see through hooks.
        reducer, held = ref(self), ref(bucket)

        def arrive(parameter: Tensor) -> None:
            me, bucket, gradient = reducer(), held(), parameter.grad
            # A proxy: another owner's backward, while ours is in .grad.
            if me is None or bucket is None or gradient is None or isinstance(gradient, GradientProxy):
                return
            full = me._listening and bucket.add(place, gradient, whole=not me._several)
            del gradient
            parameter.grad = None
            if full and me._last:
                me._launch_ready()

        return arrive

    def _launch_rest(self) -> None:
        for bucket in self.buckets[self._next :]:
            bucket.launch()

    def _launch_ready(self) -> None:
        """Launch, in order, the buckets that are full."""
        while self._next < len(self.buckets) and self.buckets[self._next].is_full:
            self.buckets[self._next].launch()
            self._next += 1


def _fill(parameters: Sequence[nn.Parameter], masters: Masters, mesh: Mesh, bucket_bytes: int) -> list[Bucket]:
    """Return buckets in the order in which backward usually fills them, each with one group, dtype and device.

    Parameters shared with other stages of a pipeline come last, since their gradients wait for those stages.
    """
    filled: list[tuple[tuple[str, ...], list[nn.Parameter]]] = []
    open_buckets: dict[object, tuple[list[nn.Parameter], int]] = {}
    order = [*reversed(parameters)]
    for parameter in sorted(order, key=_is_shared):
        target = masters.of(parameter)
        meta = metadata(parameter)
        axes = meta.sum_axes if meta is not None else ()
        kind = (axes, target.dtype, target.device, _is_shared(parameter))
        if kind not in open_buckets:
            open_buckets[kind] = ([], 0)
            filled.append((axes, open_buckets[kind][0]))
        members, held = open_buckets.pop(kind)
        members.append(parameter)
        held += target.numel() * target.element_size()
        if held < bucket_bytes:
            open_buckets[kind] = (members, held)
    return [Bucket(members, [masters.of(p) for p in members], mesh.group(*axes)) for axes, members in filled]


def _is_shared(parameter: Tensor) -> bool:
    """Return True if several stages of a pipeline have a parameter."""
    meta = metadata(parameter)
    return meta is not None and any(len(places) > 1 for places in meta.only_at.values())
