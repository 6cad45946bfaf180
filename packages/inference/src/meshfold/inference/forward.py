"""Forward of a model over pages, for the steps of a scheduler.

All ranks that run the model make the same calls and get the same tokens, since logits come out whole on each.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.inference.batch import Batch, RowParts, lay_out
from meshfold.inference.cache import LayerShape, Pool
from meshfold.inference.decode import DecodeBatch, bucket
from meshfold.inference.requests import Request, Span, Step
from meshfold.inference.runner import Sampled, draw, seen_words
from meshfold.inference.sampling import Sampling
from meshfold.inference.short_steps import GraphMemory, ShortSteps, short_rows
from meshfold.kernels import PagedLayer, PagedRows
from meshfold.mesh import SpecError
from meshfold.mesh.collectives import all_gather_object
from meshfold.mesh.model_io import LiveBytes, eval_mode, tensors_in
from meshfold.mesh.tracking import uncompiled, without_tracking
from meshfold.models import ModelCalls, head_of, routed, unrouted_reason
from meshfold.tensor_parallel.convert import attention_part, padding_for_decoding, row_multiple
from meshfold.tensor_parallel.few_rows import (
    CompiledBlocks,
    FusedSums,
    OneShot,
    RowKernels,
    SplitWords,
    agreement,
    choose_row_programs,
    split_words,
)

SUMS = ("packets", "flags", "collectives")
"""How few rows are summed over the GPUs of a machine: data and flag in one word, if very few; flags behind the data; by NCCL."""
_CHECK = Sampling(max_new_tokens=1)
NORMS_IN_SUMS = 2
"""Most ranks whose sums compute the norms after them. Products of more ranks do: each is shorter, so a norm costs it less than
one program that sums a whole row."""


@contextmanager
def ready(model: nn.Module, *, eager: bool = True) -> Iterator[None]:
    """Context manager: a model in eval mode, uncompiled if ``eager``, whose rows have one token each."""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(eval_mode(model))
        stack.enter_context(padding_for_decoding(model))
        if eager:
            stack.enter_context(uncompiled())  # each new length would be compiled again
        yield


class PagedForward:
    """Forward of a model whose attention reads a pool of pages.

    Attributes:
        pool: keys and values of this rank.
        row_kernels: for a single running sequence on a GPU; None if they are not used.
        sums: over ranks, fused with the norms after them, for few running sequences on GPUs; None if they are not used.
        words: those of this rank, where ranks split them; None if each has the logits of all.
        short: steps with few tokens run as :mod:`meshfold.inference.short_steps` says: on a GPU with Triton, but not in a pipeline.
        without: why ``row_kernels``, ``sums``, or ``packets`` of sums are not used, by that name, on a GPU.
    """

    def __init__(
        self,
        model: Any,
        pages: int,
        size: int,
        device: torch.device,
        *,
        longest: int,
        most: int,
        compile: Any = None,
        cache: str | None = None,
        sums: str = "packets",
    ) -> None:
        """Args:
        model: a module whose attention can be routed, or a pipeline of its stages; all its ranks must make one.
        pages, size: of this rank's pool.
        device: of the model.
        longest: tokens of the longest sequence.
        most: tokens that are computed in a row before the host reads them.
        compile: backend of torch.compile for the blocks, when running sequences take one token each; None for none.
        cache: form of the keys and values, as for :class:`meshfold.inference.cache.Pool`.
        sums: one of :data:`SUMS`.

        Raises:
            SpecError: if its attention cannot be routed, or its logits by pages are not those that it computes by itself.
        """
        self._calls, self.device = ModelCalls(model, device), device
        self.model = self._calls.module
        self._rows: PagedRows | None = None
        self._chosen: Tensor | None = None
        self._number: dict[nn.Module, int] = {}
        self._parts = RowParts(*attention_part(self.model), row_multiple(self.model, 1))
        self._width, self._most, self._longest = min(-(-longest // size), pages), most, longest
        self._batches: dict[int, DecodeBatch] = {}
        self._words = 0
        self._shorts: dict[tuple[int, int], ShortSteps] = {}
        self._graph_memory = GraphMemory.on(device)
        self._paged: dict[nn.Module, PagedLayer] = {}
        shapes = self._shapes()
        self.pool = Pool(shapes, pages, size, device, cache)
        self.short = device.type == "cuda" and not self._calls.staged and self.pool.fused
        self._blocks = CompiledBlocks(self.model, self._number, compile) if compile else None
        self._paged = {layer: self.pool.layer(number) for layer, number in self._number.items()} if compile else {}
        alone = self._calls.staged or self._parts.parts > 1
        self.words: SplitWords | None = None if alone else split_words(head_of(self.model))
        self.row_kernels: RowKernels | None = None
        self.sums: FusedSums | None = None
        self.without: dict[str, str] = {}
        if device.type == "cuda":
            self._take_kernels(bool(compile), sums)
        self._check()

    @contextmanager
    def entered(
        self, *, compiled: bool = False, single: bool = False, rows: int = 0, words: SplitWords | None = None
    ) -> Iterator[None]:
        """Context manager: the model is ready, its attention is routed to the pool, and its blocks are compiled if requested.

        Args:
            compiled: run compiled blocks, if there are any.
            single: use the kernels of a single row.
            rows: of running sequences, whose sums are fused if they are few; 0 for others.
            words: logits are of these; None: of all.
        """
        with ExitStack() as stack:
            if compiled and self._blocks is not None:
                stack.enter_context(self._blocks.entered())
                stack.enter_context(ready(self.model, eager=False))
            else:
                stack.enter_context(ready(self.model))
            if single and self.row_kernels is not None:
                stack.enter_context(self.row_kernels.entered())
            if self.sums is not None and 0 < rows <= self.sums.rows:
                stack.enter_context(self.sums.entered())
            if words is not None:
                stack.enter_context(words.entered())
            stack.enter_context(routed(self.model, self._attend, self._paged if compiled else None))
            stack.enter_context(without_tracking())
            head = head_of(self.model)
            if head is not None and not self._parts.split:
                hook = head.register_forward_pre_hook(self._choose, prepend=True)
                stack.callback(hook.remove)
            yield

    def logits(self, ids: Tensor, positions: Tensor, rows: PagedRows, chosen: Tensor | None = None) -> Tensor:
        """Return logits ``t v``; inside of :meth:`entered`.

        Args:
            ids, positions: ``t``, of all rows.
            rows: what attention needs of this rank's.
            chosen: int64, the rows whose logits are needed; None for all.
        """
        self._rows, self._chosen = rows, chosen
        if self.sums is not None:
            self.sums.begin()
        for layer in self._paged.values():
            layer.rows = rows
        logits = self._calls.logits(ids.unsqueeze(1), positions.unsqueeze(1))
        logits = logits.reshape(-1, logits.shape[-1])
        return logits if chosen is None or logits.shape[0] != ids.shape[0] else logits[chosen]

    def run_ahead(self, step: Step, steps: int) -> Callable[[], list[Sampled]]:
        """Run a step of sequences with one token each, and those that follow it, for all of them.

        A GPU has not ended when this returns; calling the result waits, and returns what each step samples.
        """
        spans = step.decode
        each = self._parts.each(bucket(self._parts.longest(spans, tokens=False)))
        batch = self._batches.get(each)
        if batch is None:
            batch = DecodeBatch(
                each * self._parts.parts,
                self._longest,
                self._most,
                self.pool.size,
                self.pool.spare,
                self.device,
                mine=self._parts.mine(each * self._parts.parts),
                whole=self._blocks is not None,
                captures=self.device.type == "cuda" and not self._calls.staged,
                finds_places=self.pool.fused,
            )
            self._batches[each] = batch
        places = self._parts.places(spans, each)
        batch.load(spans, places, steps, seen_words(spans, self._words, self.device))
        if batch.captured:
            read = batch.run(steps, None)
        else:
            count = each * self._parts.parts
            words = self.words if batch.plain else None
            agree = agreement(self.row_kernels, self.sums, count, self.device)
            with self.entered(compiled=True, single=count == 1, rows=count, words=words):
                read = batch.run(steps, self.logits, words, agree)
        return lambda: [([t[row] for row in places], [p[row] for row in places]) for t, p in zip(*read(), strict=True)]

    def run(self, step: Step) -> Sampled:
        """Run a step."""
        samplers = [span for span in step.spans if span.samples]
        shape = short_rows(step.spans, self._parts.longest(step.spans, tokens=True)) if self.short else None
        if shape is not None:
            return draw(self._short_logits(step, *shape)[: len(samplers)], samplers)
        return draw(self._long_logits(step), samplers)

    def work(self, tokens: int, rows: int) -> int:
        """Return the most bytes that a forward takes beside weights and pages, by running the largest ones; all ranks call.

        Args:
            tokens: of a forward. Keys and values go to the spare page.
            rows: sequences that run at once, all as long as one can be: each has one token in it, or one of them a chunk.
        """
        parts, width = self._parts.parts, self._width
        rows, pages = max(rows // parts, 1), [self.pool.spare] * width
        requests = [Request(0, (1,) * self._longest, _CHECK, part=each, pages=pages) for each in range(parts)]
        left = max(tokens // parts - rows + 1, 1)
        chunks = (*[self._longest] * (left // self._longest), left % self._longest)
        decode, *prefill = [tuple(Span(r, r.length - n, n) for r in requests) for n in (1, *chunks) if n]
        with LiveBytes(round_bytes=512 if self.device.type == "cuda" else 1) as live:
            for step in (Step(decode * rows, ()), Step(decode * (rows - 1), sum(prefill, ()))):
                draw(self._long_logits(step), step.spans)
            peak: int = live.take()[0]
        return peak

    @property
    def buffers(self) -> Iterator[Tensor]:
        """Tensors of the batches that have run, and what the pool counts in."""
        yield self.pool.arrived
        for batch in (*self._batches.values(), *self._shorts.values()):
            yield from tensors_in([vars(getattr(batch, part, batch)) for part in ("", "_settings", "_tables")])

    def _long_logits(self, step: Step) -> Tensor:
        """Return logits of the spans that sample, by a forward without a graph."""
        with self.entered():
            batch = lay_out(step, self._parts, self.pool.size, self.pool.spare, self.device)
            return self.logits(batch.ids, batch.positions, batch.rows, batch.last)

    def _short_logits(self, step: Step, rows: int, samples: int) -> Tensor:
        """Return logits of a short step, first those of the spans that sample."""
        batch = self._shorts.get((rows, samples))
        each = self._parts.each(rows)
        if batch is None:
            where = (self._width, self.pool.size, self.pool.spare, self.device)
            batch = ShortSteps(each, samples, *where, parts=self._parts, memory=self._graph_memory)
            self._shorts[rows, samples] = batch
        batch.load(step)
        if batch.captured:
            return batch.run(None)
        with self.entered(rows=each * self._parts.parts):
            return batch.run(self.logits)

    def _take_kernels(self, compiled: bool, sums: str) -> None:
        """Take the kernels for few rows on a GPU; note why if there are none."""
        reason = "blocks are compiled" if compiled else "the model is a pipeline" if self._calls.staged else ""
        reason = reason or ("" if find_spec("triton") is not None else "Triton is not installed")
        if reason:
            self.without = dict(row_kernels=reason, sums=reason)
            return
        self._take_sums(sums)
        group = None if self.sums is None else self.sums.group
        split_norms = group is None or group.size > NORMS_IN_SUMS
        self.row_kernels = RowKernels(self.model, head_of(self.model), split_norms=split_norms)
        choose_row_programs(self.row_kernels, self.pool.layers[0].dtype, group, self.device)

    def _take_sums(self, sums: str) -> None:
        """Take the kernels that sum few rows over ranks, in one of the ways of :data:`SUMS`."""
        if sums == "collectives":
            self.without["sums"] = "sums='collectives'"
            return
        try:
            self.sums = FusedSums(self.model)
            fused = (self.sums.group, self.sums.columns, self.sums.dtype, self.device)
            one_shot = OneShot(*fused, packets=sums == "packets")
            self.sums.use(one_shot)
            self.without |= {"packets": one_shot.without} if one_shot.without else {}
        except SpecError as error:  # another mode, one rank, ranks on several machines, other norms
            self.sums, self.without["sums"] = None, str(error)

    # -- attention --------------------------------------------------------------------------------------------------

    def _attend(self, layer: nn.Module, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        if self._calls.looks:
            return _unattended(q, v)
        if self._rows is None or q.shape[0] != self._rows.page.shape[0]:
            raise SpecError(f"attention has {q.shape[0]} rows on this rank, not those of the batch")
        return self.pool.attend(self._number[layer], q, k, v, self._rows, **options)

    def _choose(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Make the head compute logits of only the chosen rows."""
        if self._chosen is None or not args:
            return None
        return args[0].index_select(0, self._chosen), *args[1:]

    def _shapes(self) -> list[LayerShape]:
        """Run this rank's layers once to see its attention layers in their order, and their keys."""
        shapes: list[LayerShape] = []
        count = self._parts.each(1)

        def attend(layer: nn.Module, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
            if self._calls.looks:
                return _unattended(q, v)
            if q.shape[0] != count:
                raise SpecError(f"attention has {q.shape[0]} rows on this rank, and {count} were expected")
            if layer in self._number:
                raise SpecError(f"{type(layer).__name__} attends twice in one forward")
            self._number[layer] = len(shapes)
            shapes.append(LayerShape(k.shape[1], k.shape[2], v.dtype))
            return _unattended(q, v)

        with self._calls.agreed():
            reason = unrouted_reason(self.model)
            if reason:
                raise SpecError(reason)
        with self._calls.agreed(), ready(self.model), routed(self.model, attend), without_tracking():
            zeros = torch.zeros(count * self._parts.parts, 1, dtype=torch.int64, device=self.device)
            self._calls.rehearse(zeros, zeros)
            if not shapes:
                raise SpecError(f"{type(self.model).__name__} calls no attention that can be routed to pages")
        return shapes

    def _check(self) -> None:
        """Compare logits by pages with the model's own, on a few tokens: another mixer of tokens would show."""
        size, tokens = self.pool.size, 4
        words = getattr(getattr(self.model, "config", None), "vocab_size", 8)
        prompt = tuple(word % words for word in range(1, tokens + 1))
        requests = [Request(0, prompt, _CHECK, part=part) for part in range(self._parts.parts)]
        for request in requests:
            request.pages = list(range(-(-tokens // size)))
        if len(requests[0].pages) > self.pool.pages:
            return

        def spans(start: int, count: int) -> tuple[Span, ...]:
            return tuple(Span(request, start, count) for request in requests)

        found = []
        with self.entered():
            for step in (Step((), spans(0, 2)), Step((), spans(2, 1)), Step(spans(3, 1), ())):
                batch = lay_out(step, self._parts, size, self.pool.spare, self.device)
                logits = self.logits(batch.ids, batch.positions, batch.rows)
                self._words = logits.shape[-1]
                found.append(logits.view(self._parts.parts, -1, self._words)[:, : step.spans[0].count])
        if self.row_kernels is not None and not self._parts.split:
            self._try_row_kernels(batch, found[-1][0])
        if self.sums is not None:
            self._try_sums(batch, found[-1][0])
        if self.words is not None:
            self._try_words(self.words, batch, found[-1][0])
        with ready(self.model), without_tracking():
            ids = torch.tensor([prompt], device=self.device).expand(self._parts.each(1) * self._parts.parts, -1)
            expected = self._calls.logits(ids)[:1].float()
        self.pool.clear()
        logits = torch.cat(found, 1)
        error = _distance(logits, expected.expand_as(logits))
        exact = self.pool.layers[0].scale is None and self.pool.layers[0].dtype in (torch.float32, torch.float64)
        if not error < (1e-2 if exact else 0.3):
            raise SpecError(
                f"{type(self.model).__name__}: logits by pages differ from the model's own by {error:.1%}: "
                "something besides causal attention mixes its tokens"
            )

    def _try_row_kernels(self, batch: Batch, wanted: Tensor) -> None:
        """Compute a row by its kernels; drop them if the result differs, or if Triton cannot compile them."""
        reason = self._differs("kernels for a single row", batch, wanted, single=True)
        if reason:
            self.row_kernels, self.without["row_kernels"] = None, reason

    def _try_sums(self, batch: Batch, wanted: Tensor) -> None:
        """Compute rows with fused sums; drop them on all ranks if the result differs on any, or if Triton cannot compile them."""
        assert self.sums is not None
        reason = self._differs(
            "fused sums over ranks", batch, wanted, single=batch.ids.shape[0] == 1, rows=batch.ids.shape[0]
        )
        reasons = all_gather_object(reason, self.sums.group, self.device)
        if any(reasons):
            self.sums, self.without["sums"] = None, next(filter(None, reasons))

    def _try_words(self, words: SplitWords, batch: Batch, wanted: Tensor) -> None:
        """Let ranks split the words; gather logits on all ranks if the head's output is not what the model returns."""
        mine = wanted[:, words.first : words.first + words.count]
        reason = self._differs("choice by each rank among its words", batch, mine, words=words)
        if any(all_gather_object(reason, words.group, self.device)):
            self.words = None

    def _differs(self, what: str, batch: Batch, wanted: Tensor, **entered: Any) -> str:
        """Return why rows are not computed in a way of :meth:`entered`; empty if they have the logits that they have without it."""
        try:
            with self.entered(**entered):
                logits = self.logits(batch.ids, batch.positions, batch.rows)
                error = _distance(logits[:, : wanted.shape[-1]], wanted)
        except Exception as problem:  # of Triton's compiler
            reason = (str(problem) or type(problem).__name__).strip().split("\n")[0]
            warnings.warn(f"no {what}, which is slower: {reason}", stacklevel=2)
            return reason
        fits = error < (1e-3 if wanted.dtype in (torch.float32, torch.float64) else 0.15)
        return "" if fits else f"logits differ by {error:.1%}: norms and layers are not what their names say"


def _unattended(q: Tensor, v: Tensor) -> Tensor:
    """Return something in the shape of attention's output."""
    return v.repeat_interleave(q.shape[1] // v.shape[1], 1)


def _distance(a: Tensor, b: Tensor) -> float:
    """Return the norm of a difference divided by the norm of b."""
    return float((a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-30))
