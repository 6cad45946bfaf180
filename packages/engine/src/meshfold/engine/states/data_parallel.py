"""Gradients over the data axes: summed in buckets while backward still runs.

Autograd leaves a gradient in ``.grad`` until its bucket has all of them. One call then moves them into a flat buffer: a hook on
one parameter of a bucket is enough, and the host spends little on the others. Where no sum over ranks has to begin early, and
no gradient of an earlier micro-step is there, they wait until backward has ended, and no hook does anything.

In the last backward of an accumulation a full bucket is all-reduced at once, over the axes that its parameters' metadata
names, overlapping with the rest of backward (as in Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel
Training", arXiv 2006.15704, section 3.2). If it was not the last after all, the sum waits, and the sum of later gradients is
added.

Buckets are filled in reverse order of the parameters and launched in that order on every rank, whatever order
gradients come in. A parameter without a gradient adds zeros, so that ranks which used different parameters make the same
collective calls. A parameter that no rank used keeps the gradient None, as in a single process. For this each bucket ends
in one number per parameter: the ranks that used it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import ref

from torch import Tensor, nn

from meshfold.engine.precision import Masters
from meshfold.engine.states.bucket import Bucket, BucketGradients, write_together
from meshfold.mesh import Mesh, metadata
from meshfold.mesh.parameters import GradientHook, GradientProxy

BUCKET_BYTES = 25 * 2**20


class GradientReducer:
    """Collects the gradients of a model's parameters, over micro-steps and over the data axes."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        masters: Masters,
        mesh: Mesh,
        bucket_bytes: int = BUCKET_BYTES,
        *,
        several: bool = False,
    ) -> None:
        """Args:
        parameters: those that are trained, each once, in the same order on every rank.
        masters: where the summed gradients go.
        mesh: gives the group of each parameter's ``sum_axes``.
        bucket_bytes: a bucket is closed once it holds this many.
        several: a parameter may get several gradients in a backward, until :meth:`complete` says that it has them all.
        """
        self.buckets = _fill(parameters, masters, mesh, bucket_bytes)
        self._several = several
        self._listening = self._last = self._owed = False
        self._next = 0
        self._late: list[Bucket] = []  # whose hook has run, but other gradients of theirs were not there yet
        self._places: dict[Tensor, tuple[Bucket, int]] = {}
        self._handles: list[Any] = []
        if several:
            self._listen_to_each()

    @property
    def held_bytes(self) -> int:
        """Bytes of all gradients that have arrived and are not released."""
        left = sum(bucket.left_bytes for bucket in self.buckets) if self._listening and not self._several else 0
        return left + sum(bucket.held_bytes for bucket in self.buckets)

    def reset(self) -> None:
        """Drop all collected gradients."""
        for bucket in self.buckets:
            bucket.reset()
        self._owed = False

    @contextmanager
    def backward(self, *, last: bool) -> Iterator[None]:
        """Context manager around each backward. Gradients that arrive at other times belong to another loss and are dropped.

        Args:
            last: of an accumulation; send buckets as they become full.
        """
        for bucket in self.buckets:
            bucket.begin()
        self._last, self._next = last, 0
        with self._listen():
            yield
        self._take_left()
        self._owed = not last
        if last:
            self._launch_rest()

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Context manager around a backward; its gradients are for :meth:`take`, neither reduced nor added to others.

        No bucket may be in flight.
        """
        before, self._last = self._last, False
        with ExitStack() as stack:
            for bucket in self.buckets:
                stack.enter_context(bucket.set_aside())
            try:
                with self._listen():
                    yield
            finally:
                self._last = before

    def take(self) -> list[BucketGradients | None]:
        """Return the gradients of every bucket inside :meth:`set_aside`."""
        self._take_left()
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
            self._owed = False
            self._launch_rest()
        for bucket in self.buckets:
            bucket.deliver(factor)

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def _listen(self) -> Iterator[None]:
        """Context manager: gradients that arrive inside count; those of an aborted backward are dropped."""
        before, self._listening, self._late = self._listening, True, []
        if not self._several:
            for bucket in self.buckets:
                bucket.drop_left()
            if not self._handles and any(bucket.takes_early for bucket in self.buckets):
                self._listen_to_buckets()
        try:
            yield
        except BaseException:
            for bucket in self.buckets:
                bucket.drop_left()
            raise
        finally:
            self._listening, self._late = before, []

    def _listen_to_buckets(self) -> None:
        """Let one parameter of each bucket call: the first of the model, whose gradient usually comes last."""
        # Weak: a reducer dropped without close() must not take gradients, and the garbage collector does not see through hooks.
        reducer = ref(self)

        def hook(bucket: Bucket) -> Callable[[Tensor], None]:
            held = ref(bucket)

            def arrive(_: Tensor) -> None:
                me, bucket = reducer(), held()
                if me is not None and bucket is not None and me._listening and bucket.takes_early:
                    me._take_ready(bucket)

            return arrive

        self._handles = [_when_accumulated(b.parameters[-1], hook(b)) for b in self.buckets]

    def _listen_to_each(self) -> None:
        """Let every parameter call as soon as it has a gradient, which is a part of a sum."""
        for bucket in self.buckets:
            for place, parameter in enumerate(bucket.parameters):
                self._places[parameter] = bucket, place
                hook = _PartArrival(self, bucket, place)
                self._handles.append(_when_accumulated(parameter, hook))

    def _take_ready(self, bucket: Bucket) -> None:
        """Take the gradients of a bucket whose parameter has called, and of those before it, if all of them are there."""
        self._late.append(bucket)
        ready = [each for each in self._late if each.are_all_left()]
        if not ready:
            return
        self._late = [each for each in self._late if each not in ready]
        for each in ready:
            each.take_left()
        write_together(ready)
        if self._last:
            self._launch_ready()

    def _take_left(self) -> None:
        """Take all gradients that are left in ``.grad``."""
        if not self._several:
            for bucket in self.buckets:
                bucket.take_left()
        write_together(self.buckets)

    def _launch_rest(self) -> None:
        for bucket in self.buckets:
            if not bucket.is_launched:
                bucket.launch()

    def _launch_ready(self) -> None:
        """Launch, in order, the buckets that are full; those of one rank have nothing to send, and may still get gradients."""
        while self._next < len(self.buckets):
            bucket = self.buckets[self._next]
            if bucket.group.size > 1 or self._several:
                if not bucket.is_full:
                    return
                bucket.launch()
            self._next += 1


class _PartArrival(GradientHook):
    """Takes parts of a parameter's gradient into its bucket."""

    def __init__(self, reducer: GradientReducer, bucket: Bucket, place: int) -> None:
        # Weak: a reducer dropped without close() must not take gradients, and the garbage collector does not see through hooks.
        self._reducer, self._bucket, self._place = ref(reducer), ref(bucket), place

    def __call__(self, parameter: Tensor) -> None:
        me, bucket, gradient = self._reducer(), self._bucket(), parameter.grad
        # A proxy: another owner's backward, while ours is in .grad.
        if me is None or bucket is None or gradient is None or isinstance(gradient, GradientProxy):
            return
        if me._listening:
            bucket.add(self._place, gradient)
        del gradient
        parameter.grad = None

    def add_product(self, left: Tensor, right: Tensor) -> bool:
        me, bucket = self._reducer(), self._bucket()
        return me is not None and bucket is not None and me._listening and bucket.add_product(self._place, left, right)


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
        kind = (axes, parameter.dtype, target.dtype, target.device, _is_shared(parameter))
        if kind not in open_buckets:
            open_buckets[kind] = ([], 0)
            filled.append((axes, open_buckets[kind][0]))
        members, held = open_buckets.pop(kind)
        members.append(parameter)
        held += target.numel() * target.element_size()
        if held < bucket_bytes:
            open_buckets[kind] = (members, held)
    return [Bucket(members, [masters.of(p) for p in members], mesh.group(*axes)) for axes, members in filled]


def _when_accumulated(parameter: nn.Parameter, hook: Callable[[Tensor], None]) -> Any:
    """Register a hook for complete gradients, and return its handle; the parameter may be frozen for the moment."""
    trains = parameter.requires_grad
    parameter.requires_grad_(True)
    try:
        return parameter.register_post_accumulate_grad_hook(hook)
    finally:
        parameter.requires_grad_(trains)


def _is_shared(parameter: Tensor) -> bool:
    """Return True if several stages of a pipeline have a parameter."""
    meta = metadata(parameter)
    return meta is not None and any(len(places) > 1 for places in meta.only_at.values())
