"""Blocks that recompute their activations in backward, each with a switch to keep them instead.

A block's forward is wrapped, under its own name and with all its hooks outside: modules, names and state dicts are as
before. A recomputed forward repeats the random numbers and collectives of the first one: the same elements are dropped,
and running statistics of norms and other buffers are changed once. A compiled block recomputes in its backward graph where it
can: see :mod:`meshfold.engine.model.compile_blocks`.

Source: Chen et al. 2016, arXiv 1604.06174, through torch's non-reentrant checkpoints.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.checkpoint import checkpoint

from meshfold.engine.model.compile_blocks import CompiledBlocks, NotOneGraph
from meshfold.engine.model.repeated_blocks import find_blocks
from meshfold.engine.model.restored_buffers import RestoredBuffers
from meshfold.mesh import ParallelSpec, SpecError, did_you_mean
from meshfold.mesh.model_io import ATTENTION_OF, DryRun, KeptAttention
from meshfold.mesh.tracking import uncompiled
from meshfold.tensor_parallel.convert import recompute_contexts

if TYPE_CHECKING:
    from meshfold.engine.model.pipelined_model import PipelinedModel
    from meshfold.engine.sequence.split import SplitImage, SplitSequence
    from meshfold.zero_gemini.profiler import LayerWatch


EVERY_BLOCK = ("blocks", "but-attention")
"""Ways to recompute every block: all of it, or all but the results of attention."""
WAYS = (*EVERY_BLOCK, "auto")
_COMPILED = "_compiled_call_impl"
_CACHES = ("past_key_values", "past_key_value", "layer_past")

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


def check_recompute(recompute: object, spec: ParallelSpec) -> str | None:
    """Check the engine's argument ``recompute`` against the spec and return it.

    Raises:
        SpecError: for any other word, and for ``"auto"`` without a plan that could choose.
    """
    if recompute is None:
        return None
    if recompute not in WAYS:
        hint = did_you_mean(recompute, WAYS) if isinstance(recompute, str) else ""
        raise SpecError(
            f"recompute={recompute!r}: write None (up to the model), 'blocks' (every block recomputes its activations), "
            f"'but-attention' (all but the results of attention) or 'auto' (a plan chooses the blocks).{hint}"
        )
    if spec.axial is not None and spec.axial.memory is not None:
        raise SpecError(
            f"recompute={recompute!r} and axial=dict(memory=...): the plan of axial chooses what is recomputed: leave recompute out"
        )
    if recompute == "auto" and (spec.zero is None or spec.zero.placement != "auto"):
        has = "no entry zero" if spec.zero is None else f"zero=dict(placement={spec.zero.placement!r})"
        raise SpecError(
            f"recompute='auto' lets the plan of zero=dict(placement='auto') choose, but this spec has {has}: write that entry, or "
            "recompute='blocks'"
        )
    return str(recompute)


def recompute_blocks(
    way: str | None,
    model: nn.Module,
    sequence: SplitSequence | SplitImage | None,
    pipelined: PipelinedModel | None,
    compiled: CompiledBlocks | None = None,
) -> RecomputedBlocks | None:
    """Return the blocks of an engine's model, from now on recomputed; None if none should be.

    Args:
        way: from :func:`check`.
        model: this rank's part, as it is trained.
        sequence: its handle for split sequences.
        pipelined: the model in stages, if it is.
        compiled: its compiled blocks, if they may recompute in their graphs.

    Raises:
        SpecError: if it has no list of blocks.
    """
    if way is None:
        return None
    more = None if sequence is None else sequence.repeated
    found = RecomputedBlocks(model, more, None if pipelined is None else pipelined.blocks(), compiled)
    if way == "but-attention":
        found.keep_attention(found.names)
    return found


def recomputes_by_itself(model: nn.Module) -> bool:
    """Return True if a Hugging Face model already recomputes: ``model.gradient_checkpointing_enable()``."""
    return any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules())


class Recomputed:
    """Replacement of a block's forward, set on the block itself, where it hides the class's.

    Attributes:
        name: of the block.
        kept: whether its activations are kept; may change between a backward and the next forward.
        keeps_attention: whether the results of attention are, and all else recomputed; may change as well.
        draws: it may draw random numbers, which a repetition must draw again.
        watch: notified of every forward and of every repetition.
        in_graph: the compiled forward that recomputes in its backward graph; None if there is none, or it was not one graph.
    """

    def __init__(
        self,
        name: str,
        block: nn.Module,
        contexts: Contexts,
        more: Callable[[], AbstractContextManager[Any]] | None = None,
        in_graph: Callable[..., Any] | None = None,
    ) -> None:
        """Args:
        name: of the block.
        block: the module; called through this from now on.
        contexts: contexts around a forward, and around its repetition.
        more: called in a forward, makes another context inside those of its repetition.
        in_graph: the forward, compiled to recompute in its graph.
        """
        self.name, self.kept, self.keeps_attention, self.draws = name, False, False, True
        self.watch: LayerWatch | None = None
        self.in_graph = in_graph
        self._block, self._contexts, self._more = block, contexts, more
        # block.compile() makes a callable that runs instead of forward.
        self._place = "forward" if getattr(block, _COMPILED, None) is None else _COMPILED
        self.forward: Callable[..., Any] = getattr(block, self._place)
        self.__wrapped__ = self.forward  # as functools.wraps does
        setattr(block, self._place, self)

    def close(self) -> None:
        """Restore the block's own forward, unless it has been wrapped again."""
        if getattr(self._block, self._place) is not self:
            return
        if getattr(self.forward, "__self__", None) is self._block:
            delattr(self._block, self._place)
        else:
            setattr(self._block, self._place, self.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        kwargs = _without_cache(kwargs)
        if self.kept:
            return self.forward(*args, **kwargs)
        if self.in_graph is not None and self._may_recompute_in_graph():
            try:
                return self.in_graph(*args, **kwargs)
            except NotOneGraph:  # nothing of it has run
                self.in_graph = None
        watch, run_before = self.watch, False

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal run_before
            around: AbstractContextManager[Any] = nullcontext()
            if watch is not None:
                around = watch.again(self.name, self._block, (args, kwargs)) if run_before else watch.forward(self.name)
            run_before = True
            with around:
                return self.forward(*args, **kwargs)

        return checkpoint(
            run, *args, use_reentrant=False, context_fn=self._around, preserve_rng_state=self.draws, **kwargs
        )

    def _may_recompute_in_graph(self) -> bool:
        # Modes that see operators have no rule for those that such a graph saves random numbers with.
        seen = is_in_torch_dispatch_mode(include_infra_modes=False)
        watched = self.watch is not None or DryRun.active is not None
        return not (self.keeps_attention or watched or seen or _runs_eagerly())

    def _around(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        first, *again = self._contexts()
        if self._more is not None:
            again.append(self._more())
        attention = None
        if self.keeps_attention:
            attention = KeptAttention()
            first = _inside(first, attention.keeping())
        buffers = RestoredBuffers(self._block)
        return buffers.noted(first), _Repetition(again, buffers, attention)


class _Repetition:
    """Context manager around a recomputed forward; may be entered again for another backward."""

    def __init__(
        self,
        contexts: Sequence[AbstractContextManager[Any]],
        buffers: RestoredBuffers,
        attention: KeptAttention | None,
    ) -> None:
        self._contexts, self._buffers, self._attention = contexts, buffers, attention
        self._stand_in = DryRun.active
        self._eager = _runs_eagerly()  # a graph would save other tensors than the eager forward did
        self._open: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self._buffers.as_before())
            if self._stand_in is not None:
                stack.enter_context(self._stand_in.inside())
            if self._eager:
                stack.enter_context(uncompiled())
            for context in self._contexts:
                stack.enter_context(context)
            if self._attention is not None:
                stack.enter_context(self._attention.returning())
            self._open.append(stack.pop_all())

    def __exit__(self, *error: Any) -> None:
        self._open.pop().close()


class RecomputedBlocks:
    """The repeated blocks of a model, from now on recomputed."""

    def __init__(
        self,
        model: nn.Module,
        more: Callable[[], AbstractContextManager[Any]] | None = None,
        blocks: Mapping[str, nn.Module] | None = None,
        compiled: CompiledBlocks | None = None,
    ) -> None:
        """Args:
        model: this rank's part, as it is trained.
        more: called in a forward, makes a context for its repetition.
        blocks: those of the model, by name, if known.
        compiled: its compiled blocks, if they may recompute in their graphs.

        Raises:
            SpecError: if it has no list of blocks.
        """
        if blocks is None:
            blocks = find_blocks(model)
        if not blocks:
            raise SpecError(
                f"recompute: {type(model).__name__} has no repeated blocks, which are modules of several layers: put them into an "
                "nn.ModuleList, or let the model recompute by itself and leave recompute out"
            )
        # Dynamo skips the wrapper but continues inside it, where compiled blocks may be.
        torch.compiler.disable(Recomputed.__call__, recursive=False)
        self._wrapped: dict[str, Recomputed] = {}
        contexts = recompute_contexts(model)
        for name, block in blocks.items():
            in_graph = None if compiled is None else compiled.recomputing(block)
            self._wrapped[name] = Recomputed(name, block, contexts, more, in_graph)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the blocks, in order of registration."""
        return tuple(self._wrapped)

    @property
    def kept(self) -> tuple[str, ...]:
        """Names of the blocks that keep their activations."""
        return tuple(name for name, wrapped in self._wrapped.items() if wrapped.kept)

    @property
    def in_graphs(self) -> tuple[str, ...]:
        """Names of the compiled blocks that recompute in their backward graphs, as far as is known."""
        return tuple(
            name
            for name, wrapped in self._wrapped.items()
            if wrapped.in_graph is not None and not (wrapped.kept or wrapped.keeps_attention)
        )

    @property
    def with_attention(self) -> tuple[str, ...]:
        """Names of the blocks that keep the results of attention when they recompute."""
        return tuple(name for name, wrapped in self._wrapped.items() if wrapped.keeps_attention)

    def keep(self, names: Collection[str]) -> None:
        """Make these blocks keep their activations and all others recompute them; call it between a backward and a forward.

        Args:
            names: of blocks; with ``ATTENTION_OF`` before it, one that keeps the results of attention when it recomputes.
        """
        for name, wrapped in self._wrapped.items():
            wrapped.kept, wrapped.keeps_attention = name in names, ATTENTION_OF + name in names

    @contextmanager
    def without_random_numbers(self) -> Iterator[None]:
        """Context manager of a forward and its backward in which no block draws random numbers.

        Their generator's state is not saved then: a graph that is captured cannot contain that.
        """
        for wrapped in self._wrapped.values():
            wrapped.draws = False
        try:
            yield
        finally:
            for wrapped in self._wrapped.values():
                wrapped.draws = True

    @contextmanager
    def watched(self, watch: LayerWatch) -> Iterator[None]:
        """Report forwards and repetitions to a watcher."""
        for wrapped in self._wrapped.values():
            wrapped.watch = watch
        try:
            yield
        finally:
            for wrapped in self._wrapped.values():
                wrapped.watch = None

    def keep_attention(self, names: Collection[str]) -> None:
        """Make these blocks keep the results of attention when they recompute, and no others; call it as :meth:`keep`."""
        for name, wrapped in self._wrapped.items():
            wrapped.keeps_attention = name in names

    def close(self) -> None:
        """Restore the blocks' own forward."""
        for wrapped in self._wrapped.values():
            wrapped.close()
        self._wrapped.clear()


@contextmanager
def _inside(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    """Enter two contexts as one."""
    with outer, inner:
        yield


def _runs_eagerly() -> bool:
    """Return True if compiled blocks run uncompiled now, as in tracked forwards."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and dynamo._stance.stance == "force_eager"


def _without_cache(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments without caches of keys and values, which the recomputation must not extend again."""
    if kwargs.get("use_cache"):
        kwargs = {**kwargs, "use_cache": False}
    if any(kwargs.get(name) is not None for name in _CACHES):
        kwargs = {name: None if name in _CACHES else value for name, value in kwargs.items()}
    return kwargs
