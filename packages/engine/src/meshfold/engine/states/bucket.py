"""A bucket of gradients: how they get from the parameters into one buffer, and from there to what the optimizer updates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from meshfold.engine.errors import TrainingError
from meshfold.mesh import Group, Pending, all_reduce
from meshfold.mesh.parameters import GradientProxy
from meshfold.mesh.recording import weight_gradients

_ALIGN = 16  # elements: align gradients for vector instructions
_TOGETHER_BYTES = 256 * 2**20  # of gradients that are written into buffers by one operator


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
        self.kind = (targets[0].dtype, targets[0].device, parameters[0].dtype)  # of what one operator can write
        self._starts: list[int] = []
        self._total = 0
        self._shapes = [tuple(target.shape) for target in targets]
        self._strides = [target.contiguous().stride() for target in targets]
        for target in targets:
            self._starts.append(self._total)
            self._total += -(-target.numel() // _ALIGN) * _ALIGN
        self.bytes = self._total * targets[0].element_size()
        # All gradients, followed by a use count for each; None while empty or in flight.
        self._flat: Tensor | None = None
        self._parts: list[Tensor] = []  # of that buffer, also in flight; empty until they are needed
        self._waiting: dict[int, Tensor] = {}  # gradients of this backward that are not in the buffer yet, by index
        self._filled: set[int] = set()  # indices of parameters whose gradient is in the buffer
        self._arrived: set[int] = set()  # indices whose gradient of this backward has arrived
        self._used: set[int] = set()  # indices with a gradient on this rank since the reset
        self._pending: Pending | None = None
        self._summed: Tensor | None = None  # the result of earlier sums
        self._delivered = False  # the targets have their gradients, until they release them

    @property
    def held_bytes(self) -> int:
        """Bytes of its gradients, from the first that it takes until its targets release them."""
        there = self._flat is not None or self._pending is not None
        there = there or (self._delivered and any(t.grad is not None for t in self.targets))
        each = self.bytes
        waiting = sum(gradient.nbytes for gradient in self._waiting.values())
        return each * there + each * (self._summed is not None) + waiting

    @property
    def left_bytes(self) -> int:
        """Bytes of gradients that autograd has left in ``.grad``."""
        return sum(gradient.nbytes for parameter in self.parameters if (gradient := _left(parameter)) is not None)

    @property
    def takes_early(self) -> bool:
        """Return True if gradients should be taken while backward runs: to be sent, or to be added to those of a micro-step before.

        Else they wait in ``.grad``, in the parameters' dtype, until backward has ended.
        """
        return self.group.size > 1 or self._flat is not None or self._summed is not None

    @property
    def is_full(self) -> bool:
        """Return True if it has taken all gradients of this backward."""
        return len(self._arrived) == len(self.targets)

    @property
    def is_launched(self) -> bool:
        """Return True from the start of the sum until it is delivered, or another backward begins."""
        return self._pending is not None

    def are_all_left(self) -> bool:
        """Return True if autograd has left a gradient in every ``.grad``."""
        return all(parameter.grad is not None for parameter in self.parameters)

    def drop_left(self) -> None:
        """Drop gradients that another backward has left in ``.grad``."""
        for parameter in self.parameters:
            if parameter.grad is not None and _left(parameter) is not None:
                parameter.grad = None

    def take_left(self) -> None:
        """Take the gradients that autograd has left in ``.grad``; :func:`write_together` writes them into the buffer.

        Raises:
            TrainingError: for a gradient of a bucket that is being reduced.
        """
        for place, parameter in enumerate(self.parameters):
            gradient = _left(parameter)
            if gradient is not None:
                parameter.grad = None
                self._check_open(gradient)
                self._waiting[place] = gradient
                self._arrived.add(place)

    def begin(self) -> None:
        """Prepare for a backward. If the one before seemed to be the last, its sum is kept."""
        self._arrived = set()
        if self._pending is not None:
            summed, self._pending, self._parts = self._pending.wait(), None, []
            self._summed = summed if self._summed is None else self._summed.add_(summed)

    def add(self, place: int, gradient: Tensor) -> None:
        """Add a part of a gradient to the sum in the buffer.

        Parts of vectors wait until one of them gets its next part, or the sum is needed: all are added by one operator then.

        Args:
            place: index of its parameter.
            gradient: the part.

        Raises:
            TrainingError: if the bucket is already being reduced.
        """
        self._check_open(gradient)
        if place in self._waiting:
            self.write()
        self._waiting[place] = gradient
        if gradient.dim() > 1:
            self.write()

    def add_product(self, place: int, left: Tensor, right: Tensor) -> bool:
        """Add a part of a gradient, ``left @ right``, in one multiplication; return False, with nothing changed, where it cannot.

        A product of float16 or bfloat16 is not rounded to their type before it is added in float32.
        """
        like = self.targets[place]
        wide = like.dtype == torch.float32 and left.is_cuda and left.dtype in (torch.float16, torch.bfloat16)
        usual = left.device == like.device and (wide or left.dtype == like.dtype)
        if self._pending is not None or not usual or len(self._shapes[place]) != 2:
            return False
        flat = self._make_flat() if self._flat is None else self._flat
        if not self._parts:
            self._parts = self._parts_of(flat)
        part, more = self._parts[place], place in self._filled
        if wide and more:
            torch.addmm(part, left, right, out_dtype=like.dtype, out=part)
        elif wide:
            torch.mm(left, right, out_dtype=like.dtype, out=part)
        elif more:
            part.addmm_(left, right)
        else:
            torch.mm(left, right, out=part)
        self._filled.add(place)
        self._used.add(place)
        return True

    def write(self) -> None:
        """Write the gradients that wait into the buffer, or add them to those of earlier micro-steps."""
        write_together([self])

    def moves(self) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
        """Return pairs (part of the buffer, gradient that waits): those to copy, and those to add; they wait no more."""
        if not self._waiting:
            return [], []
        flat = self._make_flat() if self._flat is None else self._flat
        if not self._parts:
            self._parts = self._parts_of(flat)
        found, filled, parts = self._waiting.items(), self._filled, self._parts
        new = [(parts[place], gradient) for place, gradient in found if place not in filled]
        more = [(parts[place], gradient) for place, gradient in found if place in filled]
        filled.update(self._waiting)
        self._used.update(self._waiting)
        self._waiting = {}
        return new, more

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
        everyone = range(len(self.targets))
        missing = (
            [] if len(self._filled) == len(everyone) else [place for place in everyone if place not in self._filled]
        )
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
        self._delivered = True

    def reset(self) -> None:
        """Reset to empty."""
        self._flat = self._pending = self._summed = None
        self._parts, self._waiting = [], {}
        self._filled, self._arrived, self._used = set(), set(), set()
        self._delivered = False

    def _check_open(self, gradient: Tensor) -> None:
        if self._pending is not None:
            raise TrainingError(
                f"a parameter of shape {tuple(gradient.shape)} got a second gradient in one backward, after the first "
                "was sent: use torch.utils.checkpoint.checkpoint with use_reentrant=False"
            )

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


def write_together(buckets: Iterable[Bucket]) -> None:
    """Write the gradients that wait in several buckets into their buffers, in few operators, and release them.

    About as many bytes go into one operator as may be there twice.
    """
    copies: list[tuple[Tensor, Tensor]] = []
    sums: list[tuple[Tensor, Tensor]] = []
    held, kind = 0, None
    for bucket in buckets:
        if held >= _TOGETHER_BYTES or bucket.kind != kind:
            _write(copies, sums)
            held, kind = 0, bucket.kind
        new, more = bucket.moves()
        copies += new
        sums += more
        held += bucket.bytes
    _write(copies, sums)


def _write(copies: list[tuple[Tensor, Tensor]], sums: list[tuple[Tensor, Tensor]]) -> None:
    if copies:
        torch._foreach_copy_([part for part, _ in copies], [gradient for _, gradient in copies])
    if sums:
        torch._foreach_add_([part for part, _ in sums], [gradient for _, gradient in sums])
    copies.clear()
    sums.clear()


def _left(parameter: Tensor) -> Tensor | None:
    """Return the gradient that autograd has left in ``.grad``; not a proxy, which shows those of another owner."""
    gradient = parameter.grad
    return None if gradient is None or type(gradient) is GradientProxy else gradient
