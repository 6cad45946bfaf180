"""Running some blocks of a model by the model's own forward.

A stage runs the whole model's code. What lies before its first block is run for what it makes of the batch alone
(masks, positions, rotary tables), and what depends on weights is a tensor of NaN in the right shape: modules with
parameters are not run, blocks of other stages hand their input through. At the stage's first block these tensors
become, in place, those that the stage before has sent, so that all code that still refers to them finds the right
values; at the first block of the next stage, what that is called with is taken and the forward is left by an exception.
So a stage needs nothing but the code that the model has.

Which of a block's arguments travel is found without values, once for each shape of input: those that require a gradient
when every module before the blocks is replaced by a tensor that does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from meshfold.mesh import LayoutError
from meshfold.pipeline.placeholders import Absent, Like, sign, without_randomness

Call = Callable[..., Any]
_GATE = "_meshfold_gate"


@dataclass(frozen=True)
class Slot:
    """An argument of a block that travels: its place among the leaves of (args, kwargs), its shape and dtype."""

    place: int
    shape: tuple[int, ...]
    dtype: torch.dtype


Slots = tuple[Slot, ...]


@dataclass
class Plan:
    """What travels into each block, for one shape of input.

    Attributes:
        slots: by block.
        passage: makes of a block's input what a block that does nothing returns.
    """

    slots: dict[int, Slots] = field(default_factory=dict)
    passage: Callable[[Tensor], Any] | None = None


@dataclass
class _Run:
    """One forward.

    Attributes:
        plan: what travels; filled in where ``looking``.
        first: the first block that runs.
        stop: the block at which the forward is left; the number of blocks for none.
        received: what came from the stage before, in the order of the slots.
        looking: run without values, to find out what travels.
        inside: the first block was reached.
        grad: whether gradients are wanted.
        inputs: what was received, as the model's code has it.
        called: modules before the blocks that were called.
    """

    plan: Plan
    first: int = 0
    stop: int = 0
    received: Sequence[Tensor] = ()
    looking: bool = False
    inside: bool = False
    grad: bool = False
    inputs: list[Tensor] = field(default_factory=list)
    called: list[nn.Module] = field(default_factory=list)


class Handover(Exception):
    """Leaves a forward with what the next stage needs. An Exception: hooks that are always called run for no other."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__("a stage ends here")
        self.tensors = list(tensors)


class _Gated:
    """What the class of a gated module is given beside its own: asks before it is called."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        gates, index = self.__dict__[_GATE]
        call = super().__call__  # type: ignore[misc]
        if gates.run is None:
            return call(*args, **kwargs)
        if index is None:
            return gates.outside(self, call, args, kwargs)
        return gates.block(index, call, args, kwargs)


_classes: dict[type, type] = {}


class Gates:
    """The gates of one model: at every block, and at every module beside them that has parameters.

    Attributes:
        blocks: the model's, those of other ranks :class:`Absent`.
        called: the gated modules that ran before the blocks when they were last looked at.
        entering: what then travelled into the block at which it stopped.
    """

    def __init__(self) -> None:
        self.run: _Run | None = None
        self.blocks: list[nn.Module] = []
        self.called: list[nn.Module] = []
        self.entering: list[Tensor] = []
        self._shapes: dict[object, tuple[TreeSpec, list[Any]]] = {}

    def put_at(self, module: nn.Module, index: int | None) -> None:
        """Gate a module: block ``index``, or one beside the blocks (None). Its names and parameters stay."""
        kind = type(module)
        if not isinstance(module, _Gated):
            if kind not in _classes:
                _classes[kind] = type(kind.__name__, (_Gated, kind), {"__module__": kind.__module__})
            module.__class__ = _classes[kind]
        module.__dict__[_GATE] = (self, index)

    # -- forwards ---------------------------------------------------------------------------------------------------

    def forward(
        self, call: Callable[[], Any], plan: Plan, first: int, stop: int, received: Sequence[Tensor]
    ) -> tuple[Any, list[Tensor]]:
        """Run blocks ``first`` to ``stop`` (excluded).

        Returns:
            A list of tensors for the next stage, or the model's output; and the tensors with what was received, whose
            ``.grad`` backward will fill.
        """
        run = _Run(plan=plan, first=first, stop=stop, received=received, grad=torch.is_grad_enabled())
        run.inside = first == 0
        with self._running(run), torch.set_grad_enabled(run.grad and run.inside):
            try:
                return call(), run.inputs
            except Handover as end:
                return end.tensors, run.inputs

    def look(self, call: Callable[[], Any], weights: Sequence[Tensor], *, only_first: bool = False) -> Plan:
        """Find out what travels into each block.

        Args:
            call: calls the model on a batch.
            weights: parameters, or what stands for them, that lie in no gated module and no block.
            only_first: stop at the first block, with nothing but its slots.
        """
        run = _Run(plan=Plan(), stop=0 if only_first else len(self.blocks) - 1, looking=True)
        frozen = [weight for weight in weights if not weight.requires_grad]
        with self._running(run), torch.enable_grad():
            for weight in frozen:
                weight.requires_grad_(True)
            try:
                call()
            except Handover as end:
                self.entering = end.tensors
            finally:
                for weight in frozen:
                    weight.requires_grad_(False)
        if 0 not in run.plan.slots:
            raise LayoutError("the model's forward did not call its blocks, so it cannot be cut into stages")
        self.called = run.called
        return run.plan

    @contextmanager
    def _running(self, run: _Run) -> Iterator[None]:
        if self.run is not None:
            raise LayoutError("a forward of this model is running already")
        self.run = run
        try:
            yield
        finally:
            self.run = None

    # -- at the gates -----------------------------------------------------------------------------------------------

    def block(self, index: int, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A block is called."""
        run = self.run
        assert run is not None  # the gate has looked
        if run.looking:
            return self._look_at(run, index, args, kwargs)
        if index < run.first:
            return self._pass(run.plan, _leaf(run.plan.slots[0][0].place, args, kwargs))
        if index == run.stop:
            leaves, _ = tree_flatten((args, kwargs))
            raise Handover([leaves[slot.place] for slot in run.plan.slots[index]])
        if not run.inside:
            run.inside = True
            torch.set_grad_enabled(run.grad)
            leaves, _ = tree_flatten((args, kwargs))
            for slot, tensor in zip(run.plan.slots[index], run.received, strict=True):
                leaf = leaves[slot.place]
                leaf.data = tensor.detach()
                run.inputs.append(leaf.requires_grad_(run.grad))
        return call(*args, **kwargs)

    def outside(self, module: nn.Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A module beside the blocks is called."""
        run = self.run
        assert run is not None
        if run.inside:
            return call(*args, **kwargs)
        run.called.append(module)
        leaves, _ = tree_flatten((args, kwargs))
        key = (id(module), *(sign(leaf) for leaf in leaves))
        if key not in self._shapes:
            with torch.no_grad(), without_randomness(leaves):
                found = call(*args, **kwargs)
            outputs, spec = tree_flatten(found)
            if any(isinstance(leaf, Tensor) and not leaf.is_floating_point() for leaf in outputs):
                return found  # it makes something of the batch as well, which has to be made each time
            self._shapes[key] = spec, [Like(leaf) if isinstance(leaf, Tensor) else leaf for leaf in outputs]
        spec, outputs = self._shapes[key]
        return tree_unflatten(
            [leaf.make(run.looking) if isinstance(leaf, Like) else leaf for leaf in outputs], spec
        )

    def _look_at(self, run: _Run, index: int, args: Any, kwargs: Any) -> Any:
        leaves, _ = tree_flatten((args, kwargs))
        travels: dict[int, Tensor] = {}
        for place, leaf in enumerate(leaves):
            asks = isinstance(leaf, Tensor) and leaf.requires_grad and not isinstance(leaf, nn.Parameter)
            if asks and not any(leaf is other for other in travels.values()):
                travels[place] = leaf
        run.plan.slots[index] = tuple(Slot(p, tuple(t.shape), t.dtype) for p, t in travels.items())
        if not travels and index == 0:
            raise LayoutError(
                "no layer runs before block 0, which is called with the model's input as it is, and what travels between "
                "stages is what layers make: leave the first layer out of the list of blocks (an embedding, or a first "
                "nn.Linear, called before it)"
            )
        if not travels:
            raise LayoutError(
                f"nothing that block {index} is called with depends on what runs before it: its blocks are no chain, and "
                f"cannot be cut into stages"
            )
        if index == run.stop:
            raise Handover(list(travels.values()))
        hidden = next(iter(travels.values()))
        if run.plan.passage is None:
            run.plan.passage = self._learn_passage(hidden, args, kwargs)
        return self._pass(run.plan, hidden)

    def _learn_passage(self, hidden: Tensor, args: Any, kwargs: Any) -> Callable[[Tensor], Any]:
        """Call a block that is here, to see in which form it returns what it was given."""
        block = next(block for block in self.blocks if not isinstance(block, Absent))
        run, self.run = self.run, None
        try:
            with torch.no_grad(), without_randomness([hidden]):
                output = block(*args, **kwargs)
        finally:
            self.run = run
        leaves, spec = tree_flatten(output)
        same = next(
            (i for i, t in enumerate(leaves) if isinstance(t, Tensor) and t.shape == hidden.shape), None
        )
        if same is None:
            shapes = [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)]
            raise LayoutError(
                f"a {type(block).__name__} turns {tuple(hidden.shape)} into {shapes}: a model is cut into stages between "
                f"blocks that keep the shape of what they are given"
            )
        others = [Like(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]

        def passage(given: Tensor) -> Any:
            made = [leaf.make(given.requires_grad) if isinstance(leaf, Like) else leaf for leaf in others]
            # An object of its own, as a block's output is: what comes later tells tensors apart by identity.
            made[same] = given.view_as(given) if given.requires_grad else given.detach()
            return tree_unflatten(made, spec)

        return passage

    def _pass(self, plan: Plan, hidden: Tensor) -> Any:
        assert plan.passage is not None  # learnt at the first block
        return plan.passage(hidden)


def _leaf(place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The leaf at a place; mostly the first argument, for which nothing need be flattened."""
    if place == 0 and args and isinstance(args[0], Tensor):
        return args[0]
    leaves, _ = tree_flatten((args, kwargs))
    found: Tensor = leaves[place]
    return found
