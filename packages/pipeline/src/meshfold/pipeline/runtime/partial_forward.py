"""Running some blocks of a model by the model's own forward.

A stage runs the whole model's code. Code before its first block runs to compute values that depend only on the batch (masks,
positions, rotary tables). Values that depend on weights are tensors of NaN in the right shape: modules with parameters do not run,
and blocks of other stages return their input. At the stage's first block these tensors are overwritten in place by the ones that
the previous stage sent, so all code that refers to them finds the right values. At the first block of the next stage its arguments
are taken, and an exception ends the forward. So a stage needs only the model's own code.

A trial on meta tensors, one for each shape of input, finds which arguments of a block are sent: those that require a gradient if
every module before the blocks is replaced by a tensor that does.

Blocks are called in order. One may be called several times in a row, or not at all; at least one block of each stage is
called.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from meshfold.mesh import LayoutError
from meshfold.mesh.random import after_calls_elsewhere
from meshfold.mesh.tracking import part_of_model, set_tracked_layout, tracker, untracked, without_tracking
from meshfold.pipeline.errors import ChainError
from meshfold.pipeline.runtime.block_outputs import OutputForm, OutputForms
from meshfold.pipeline.runtime.placeholders import AbsentBlock, TensorPlaceholder, check_own_parameters, sign
from meshfold.pipeline.runtime.side_effects import unscaled_tables, without_randomness, without_reentrant_checkpoints
from meshfold.pipeline.runtime.stage_border import Crossing, Layouts, check_handed_on, inject, layouts_of
from meshfold.pipeline.runtime.transfer_plan import Slot, Slots, TransferPlan

Call = Callable[..., Any]
Around = Callable[[nn.Module], AbstractContextManager[None]]
_GATE = "_meshfold_gate"


@dataclass
class _Run:
    """One forward.

    Attributes:
        plan: the tensors that travel; filled in while ``looking``.
        first: the first block that runs.
        stop: the block before which the forward ends; the number of blocks to run to the end.
        received: tensors from the previous stage, in the order of the slots.
        looking: run without values, to find out which tensors travel.
        inside: the first block has been reached.
        grad: whether gradients are needed.
        inputs: the received tensors as leaves of the autograd graph.
        at: the block called last; -1 before the first.
        calls: modules outside the blocks that were called, with ``at``.
        keep: if set, record the arguments of modules, and run each block inside the context that this returns.
        entering: the recorded arguments, by the block called before.
        crossings: the points at which blocks were called, by block.
        began: layouts of the received tensors at the first block that ran, by index.
        elsewhere: number of calls of each block that earlier stages make, by the block's first place in the list.
    """

    plan: TransferPlan
    first: int = 0
    stop: int = 0
    received: Sequence[Tensor] = ()
    looking: bool = False
    inside: bool = False
    grad: bool = False
    inputs: list[Tensor] = field(default_factory=list)
    at: int = -1
    calls: list[tuple[nn.Module, int]] = field(default_factory=list)
    keep: Around | None = None
    entering: dict[int, list[Tensor]] = field(default_factory=dict)
    crossings: dict[int, Crossing] = field(default_factory=dict)
    began: Layouts | None = None
    elsewhere: Counter[int] = field(default_factory=Counter)


@dataclass(frozen=True, kw_only=True)
class ObservedForward:
    """Record of a forward without values.

    Attributes:
        plan: what travels into each block.
        calls: modules outside the blocks, each with the last block called before it; -1 for none.
        entering: what blocks and gated modules were called with, by the block called before, where that was kept.
        crossings: the points at which blocks were called, by block, where that was kept.
    """

    plan: TransferPlan
    calls: list[tuple[nn.Module, int]]
    entering: dict[int, list[Tensor]]
    crossings: dict[int, Crossing]


class StageEnd(Exception):
    """Ends a forward with the next stage's inputs. It is an Exception, since hooks with always_call run for no other kind."""

    ends_forward = True

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__("a stage ends here")
        self.tensors = list(tensors)


class _Gated:
    """Mixin for a gated module's class that routes its calls through the gate."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        found, index = self.__dict__[_GATE]
        gates, call = found(), super().__call__  # type: ignore[misc]
        if gates is None or gates.run is None:
            return call(*args, **kwargs)
        if index is None:
            return gates.outside(self, call, args, kwargs)
        return gates.block(index, call, args, kwargs)


_classes: dict[type, type] = {}


class PartialForward:
    """The gates of one model: at every block, and at every other module that has parameters.

    Attributes:
        blocks: the model's, those of other ranks :class:`AbsentBlock`.
        forms: their output forms while all were here.
    """

    def __init__(
        self, blocks: Sequence[nn.Module], outside: Sequence[nn.Module] = (), *, same: Sequence[int] = ()
    ) -> None:
        """Args:
        blocks: of the model, in order. Their names and parameters stay.
        outside: modules with parameters outside them.
        same: for each block its first position in the list.
        """
        self._same = same
        self.run: _Run | None = None
        self.blocks = list(blocks)
        self.forms = OutputForms()
        self._shapes: dict[object, tuple[TreeSpec, list[Any]]] = {}
        for index, block in enumerate(blocks):
            self._gate(block, index)
        for module in outside:
            self._gate(module, None)

    def replace_block(self, index: int, block: nn.Module) -> None:
        """Replace a block by another module."""
        self.blocks[index] = block
        self._gate(block, index)

    def _gate(self, module: nn.Module, index: int | None) -> None:
        kind = type(module)
        if not isinstance(module, _Gated):
            if kind not in _classes:
                _classes[kind] = type(kind.__name__, (_Gated, kind), {"__module__": kind.__module__})
            module.__class__ = _classes[kind]
        module.__dict__[_GATE] = (ref(self), index)  # the gates have the modules

    # -- forwards ---------------------------------------------------------------------------------------------------

    def forward(
        self, call: Callable[[], Any], plan: TransferPlan, first: int, stop: int, received: Sequence[Tensor]
    ) -> tuple[Any, list[Tensor]]:
        """Run blocks ``first`` to ``stop`` (excluded).

        Returns:
            A list of tensors for the next stage, or the model's output; and the tensors with what was received, whose
            ``.grad`` backward will fill.
        """
        run = _Run(plan=plan, first=first, stop=stop, received=received, grad=torch.is_grad_enabled())
        run.inside = first == 0
        with (
            self._running(run),
            part_of_model((first, stop)),
            torch.set_grad_enabled(run.grad and run.inside),
        ):
            try:
                return call(), run.inputs
            except StageEnd as end:
                return end.tensors, run.inputs

    def look(self, call: Callable[[], Any], weights: Sequence[Tensor]) -> TransferPlan:
        """Find the tensors sent to each block.

        Args:
            call: calls the model on a batch.
            weights: parameters, or their stand-ins, outside all gated modules and blocks.

        Raises:
            ChainError: for blocks that do not form a chain.
        """
        return self.watch(call, weights, stop=len(self.blocks) - 1)[0].plan

    def watch(
        self, call: Callable[[], Any], weights: Sequence[Tensor], *, stop: int, keep: Around | None = None
    ) -> tuple[ObservedForward, Any]:
        """Run :meth:`look` up to a block, or further; also return the observations behind the plan.

        Args:
            call: calls the model on a batch.
            weights: see :meth:`look`.
            stop: the block at which the forward ends; the number of blocks for none.
            keep: keep the arguments of modules, and run each block inside the context that this returns; None: do not.

        Returns:
            The observations, and the model's output, or the input of the block at which the forward was left.
        """
        run = _Run(plan=TransferPlan(), stop=stop, looking=True, keep=keep)
        seen = ObservedForward(plan=run.plan, calls=run.calls, entering=run.entering, crossings=run.crossings)
        frozen = [weight for weight in weights if not weight.requires_grad]
        with self._running(run), without_tracking(), torch.enable_grad():
            for weight in frozen:
                weight.requires_grad_(True)
            try:
                output = call()
            except StageEnd as end:
                output = end.tensors
            finally:
                for weight in frozen:
                    weight.requires_grad_(False)
        if not run.plan.slots:
            raise ChainError("the model's forward did not call its blocks, so it cannot be cut into stages")
        return seen, output

    def forget(self) -> None:
        """Forget the shapes seen so far: parameters may change their dtype."""
        self._shapes.clear()

    @contextmanager
    def _running(self, run: _Run) -> Iterator[None]:
        if self.run is not None:
            raise LayoutError("a forward of this model is running already")
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)  # nn.TransformerEncoder would make nested tensors
        self.run = run
        try:
            with without_reentrant_checkpoints():
                yield
        finally:
            self.run = None
            torch.backends.mha.set_fastpath_enabled(fast)

    # -- at the gates -----------------------------------------------------------------------------------------------

    def block(self, index: int, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle the call of a block."""
        run = self.run
        assert run is not None  # checked by the gate
        if index < run.at:
            raise ChainError(
                f"block {index} is called after block {run.at}: stages follow the list of blocks, so call the blocks in that "
                "order; a block that runs again later can be in the list a second time"
            )
        before, run.at = run.at, index
        if run.looking:
            return self._look_at(run, index, before, args, kwargs)
        slots = run.plan.slots.get(index)
        if slots is None:
            raise ChainError(
                f"block {index} is called now, but was not when the forward was observed: which blocks a model calls may depend "
                "on shapes and on its mode, but not on values or random numbers"
            )
        if index < run.first:
            run.elsewhere[self._first_place(index)] += 1
            first, *others = (
                _travels(slots, args, kwargs).values() if len(slots) > 1 else [_leaf(slots[0].place, args, kwargs)]
            )
            return run.plan.forms[index].fill(first, others)
        if index >= run.stop:
            travels = _travels(slots, args, kwargs)
            check_handed_on(index, run.began or {}, travels)
            raise StageEnd([*travels.values()])
        if not run.inside:
            run.inside = True
            torch.set_grad_enabled(run.grad)
            travels = _travels(slots, args, kwargs)
            known = layouts_of(travels)  # read from the placeholders before they are replaced
            for leaf, tensor in zip(travels.values(), run.received, strict=True):
                run.inputs.append(inject(leaf, tensor, run.grad))
            for place, how in known.items():
                set_tracked_layout(travels[place], how)
        if run.began is None:
            run.began = layouts_of(_travels(slots, args, kwargs))
        with after_calls_elsewhere(run.elsewhere[self._first_place(index)]):
            return call(*args, **kwargs)

    def _first_place(self, index: int) -> int:
        return self._same[index] if self._same else index

    def outside(self, module: nn.Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle the call of a module outside the blocks."""
        run = self.run
        assert run is not None
        if run.inside:
            return call(*args, **kwargs)
        run.calls.append((module, run.at))
        leaves, _ = tree_flatten((args, kwargs))
        if run.keep:
            run.entering.setdefault(run.at, []).extend(leaf for leaf in leaves if isinstance(leaf, Tensor))
        looking = tracker()  # layouts of its results are known only under a tracker
        looked_at = None if looking is None else looking.rows.follows
        key = (id(module), looked_at, *(sign(leaf) for leaf in leaves))
        if key not in self._shapes:
            with torch.no_grad(), without_randomness(leaves), unscaled_tables(module):
                found = call(*args, **kwargs)
            outputs, spec = tree_flatten(found)
            if any(isinstance(leaf, Tensor) and not leaf.is_floating_point() for leaf in outputs):
                return found  # integers may depend on the batch: compute them every time
            self._shapes[key] = (
                spec,
                [TensorPlaceholder(leaf) if isinstance(leaf, Tensor) else leaf for leaf in outputs],
            )
        spec, outputs = self._shapes[key]
        made = [leaf.make(run.looking) if isinstance(leaf, TensorPlaceholder) else leaf for leaf in outputs]
        return tree_unflatten(made, spec)

    def _look_at(self, run: _Run, index: int, before: int, args: Any, kwargs: Any) -> Any:
        check_own_parameters(self.blocks[index], index)
        leaves, _ = tree_flatten((args, kwargs))
        travels: dict[int, Tensor] = {}
        for place, leaf in enumerate(leaves):
            asks = isinstance(leaf, Tensor) and leaf.requires_grad and not isinstance(leaf, nn.Parameter)
            if asks and not any(leaf is other for other in travels.values()):
                travels[place] = leaf
        if index != before:  # only for its first call
            run.plan.slots[index] = tuple(Slot(p, tuple(t.shape), t.dtype) for p, t in travels.items())
        if run.keep:
            run.entering.setdefault(before, []).extend(travels.values())
            run.crossings.setdefault(index, Crossing.now([*travels.values()]))
        if not travels and before < 0:
            raise ChainError(
                f"no layer runs before block {index}, which gets the model's input unchanged, but stages exchange the outputs of "
                "layers: leave the first layer out of the list of blocks (an embedding, or a first "
                "nn.Linear, called before it)"
            )
        if not travels:
            raise ChainError(
                f"no input of block {index} depends on the blocks before it: the blocks are not a chain and "
                f"cannot be cut into stages"
            )
        if index >= run.stop:
            raise StageEnd(list(travels.values()))
        hidden = next(iter(travels.values()))
        if index not in run.plan.forms:
            run.plan.forms[index] = self._form_of(run, index, hidden, args, kwargs)
        if run.keep:  # cut the graph: later tensors depend on nothing before this block
            hidden = TensorPlaceholder(hidden).make(True)
        return run.plan.forms[index].fill(hidden)

    def _form_of(self, run: _Run, index: int, hidden: Tensor, args: Any, kwargs: Any) -> OutputForm:
        """Return the form of block ``index``'s output: its own if all blocks are here, otherwise a similar block's."""

        def learn(here: int) -> OutputForm:
            return self._returned(here, index, hidden, args, kwargs)

        if run.keep:
            with run.keep(self.blocks[index]):
                return self.forms.note(index, learn)
        here = [place for place, block in enumerate(self.blocks) if not isinstance(block, AbsentBlock)]
        return self.forms.like(index, run.plan.forms, here, learn)

    def _returned(self, here: int, index: int, hidden: Tensor, args: Any, kwargs: Any) -> OutputForm:
        """Call block ``here`` with the arguments of block ``index`` to learn the form of the output."""
        block = self.blocks[here]
        try:
            output = self._run_by_itself(block, args, kwargs)
        except Exception as error:
            if here == index:  # an error of the model itself
                raise
            raise ChainError(
                f"block {here}, a {type(block).__name__}, cannot be called as block {index} is ({type(error).__name__}: {error}). "
                "Blocks of a pipeline must take the same arguments and keep their input's shape, and a forward must not "
                "check a block's class, since blocks of other stages are stand-ins. Call all blocks in the same way"
            ) from error
        return OutputForm.of(output, hidden, type(block).__name__)

    def _run_by_itself(self, block: nn.Module, args: Any, kwargs: Any) -> Any:
        run, self.run = self.run, None
        try:
            leaves = tree_leaves((args, kwargs))
            with torch.no_grad(), without_randomness(leaves), unscaled_tables(block), untracked():
                return block(*args, **kwargs)
        finally:
            self.run = run


def _travels(slots: Slots, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, Tensor]:
    """Return a block's arguments that travel, by their index among the leaves."""
    leaves, _ = tree_flatten((args, kwargs))
    return {slot.place: leaves[slot.place] for slot in slots}


def _leaf(place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the leaf at an index; the first argument, the usual case, without flattening."""
    if place == 0 and args and isinstance(args[0], Tensor):
        return args[0]
    leaves, _ = tree_flatten((args, kwargs))
    found: Tensor = leaves[place]
    return found
