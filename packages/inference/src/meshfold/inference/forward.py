"""Forwards of a model for the steps of a scheduler: over pages, or of whole sequences where a model's attention has none.

All ranks that run the model make the same calls and get the same tokens, since logits come out whole on each.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from meshfold.inference.cache import Chunk, LayerShape, PagedLayer, Pool, Rows
from meshfold.inference.compiled import CompiledBlocks
from meshfold.inference.decode import DecodeBatch, bucket
from meshfold.inference.routing import head_of, routed
from meshfold.inference.row_kernels import RowKernels
from meshfold.inference.sampling import Sampling, sample, sampling_rows
from meshfold.inference.schedule import Request, Span, Step
from meshfold.mesh import SpecError
from meshfold.mesh.model_io import eval_mode
from meshfold.mesh.tracking import without_tracking
from meshfold.tensor_parallel.convert import padding_for_decoding, row_multiple

Sampled = tuple[list[int], list[float]]
"""tokens and log-probs"""
_CHECK = Sampling(max_new_tokens=1)


class Runner(Protocol):
    """Runs steps."""

    def run(self, step: Step) -> Sampled:
        """Run a step; return what is sampled, of the spans that sample, in their order."""


@contextmanager
def ready(model: nn.Module, *, eager: bool = True) -> Iterator[None]:
    """Context manager: a model in eval mode, uncompiled if ``eager``, whose rows have one token each."""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(eval_mode(model))
        stack.enter_context(padding_for_decoding(model))
        if eager:
            stack.enter_context(_uncompiled())
        yield


def _uncompiled() -> Any:
    """Return a context in which compiled modules run uncompiled: each new length would be compiled again."""
    # Without dynamo nothing was compiled, and its import takes long.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


class PagedForward:
    """Forward of a model whose attention reads a pool of pages.

    Attributes:
        pool: keys and values of this rank.
        row_kernels: for a single running sequence on a GPU; None if they are not used.
    """

    def __init__(
        self,
        model: nn.Module,
        pages: int,
        size: int,
        device: torch.device,
        *,
        longest: int,
        most: int,
        compile: Any = None,
        cache: str | None = None,
    ) -> None:
        """Args:
        model: a module whose attention can be routed.
        pages, size: of the pool.
        device: of the model.
        longest: tokens of the longest sequence.
        most: tokens that are computed in a row before the host reads them.
        compile: backend of torch.compile for the blocks, when running sequences take one token each; None for none.
        cache: form of the keys and values, as for :class:`meshfold.inference.cache.Pool`.

        Raises:
            SpecError: if its logits by pages are not those that it computes by itself.
        """
        self.model, self.device = model, device
        self._rows: Rows | None = None
        self._chosen: Tensor | None = None
        self._number: dict[nn.Module, int] = {}
        self._multiple = row_multiple(model, 1)
        self._width, self._most = min(-(-longest // size), pages), most
        self._batches: dict[int, DecodeBatch] = {}
        self._words = 0
        self._paged: dict[nn.Module, PagedLayer] = {}
        shapes = self._shapes()
        self.pool = Pool(shapes, pages, size, device, cache)
        self._blocks = CompiledBlocks(model, self._number, compile) if compile else None
        self._paged = {layer: self.pool.layer(number) for layer, number in self._number.items()} if compile else {}
        self.row_kernels: RowKernels | None = None
        if device.type == "cuda" and not compile and find_spec("triton") is not None:
            self.row_kernels = RowKernels(model, head_of(model))
        self._check()

    @contextmanager
    def entered(self, *, compiled: bool = False, single: bool = False) -> Iterator[None]:
        """Context manager: the model is ready, its attention is routed to the pool, and its blocks are compiled if requested."""
        with ExitStack() as stack:
            if compiled and self._blocks is not None:
                stack.enter_context(self._blocks.entered())
                stack.enter_context(ready(self.model, eager=False))
            else:
                stack.enter_context(ready(self.model))
            if single and self.row_kernels is not None:
                stack.enter_context(self.row_kernels.entered())
            stack.enter_context(routed(self.model, self._attend, self._paged if compiled else None))
            stack.enter_context(without_tracking())
            head = head_of(self.model)
            if head is not None and self._multiple == 1:
                hook = head.register_forward_pre_hook(self._choose, prepend=True)
                stack.callback(hook.remove)
            yield

    def logits(self, ids: Tensor, rows: Rows, chosen: Tensor | None = None) -> Tensor:
        """Return logits ``t v``; inside of :meth:`entered`.

        Args:
            ids: ``t``, of the rows.
            rows: what attention needs.
            chosen: int64, the rows whose logits are needed; None for all.
        """
        count = ids.shape[0]
        self._rows, self._chosen = rows, chosen
        for layer in self._paged.values():
            layer.rows = rows
        options = {} if getattr(self.model, "caches_keys", False) else {"use_cache": False}
        output = self.model(ids.unsqueeze(1), position_ids=rows.positions.unsqueeze(1), **options)
        logits: Tensor = getattr(output, "logits", output)
        logits = logits.reshape(-1, logits.shape[-1])
        return logits if chosen is None or logits.shape[0] != count else logits[chosen]

    def batch(self, step: Step) -> tuple[Tensor, Rows, Tensor]:
        """Return the ids of a step's rows, attention's metadata, and the rows that sample, as tensors on the device."""
        size, spans = self.pool.size, step.spans
        count = sum(span.count for span in spans)
        filled = -(-count // self._multiple) * self._multiple
        ids: list[int] = []
        positions: list[int] = []
        pages, offsets, last = [], [], []
        for span in spans:
            places = range(span.start, span.stop)
            ids += span.request.slice(span.start, span.stop)
            positions += places
            pages += [span.request.pages[place // size] for place in places]
            offsets += [place % size for place in places]
            if span.samples:
                last.append(len(ids) - 1)
        more = filled - count
        numbers = torch.tensor(
            [ids + [0] * more, positions + [0] * more, pages + [self.pool.spare] * more, offsets + [0] * more]
        ).to(self.device)
        singles = len(step.decode)
        width = max((len(span.request.pages) for span in step.decode), default=1)
        listed = [span.request.pages + [self.pool.spare] * (width - len(span.request.pages)) for span in step.decode]
        tables = torch.tensor(listed, dtype=torch.int64).view(singles, width).to(self.device)
        chunks, row = [], singles
        for span in step.prefill:
            mine = span.request.pages[: -(-span.stop // size)]
            chunks.append(Chunk(row, span.count, span.start, torch.tensor(mine).to(self.device)))
            row += span.count
        if more:
            spare = torch.tensor([self.pool.spare]).to(self.device)
            chunks += [Chunk(row + i, 1, 0, spare) for i in range(more)]
        rows = Rows(numbers[2], numbers[3], numbers[1], tables, tuple(chunks))
        return numbers[0], rows, torch.tensor(last, dtype=torch.int64).to(self.device)

    def run_ahead(self, step: Step, steps: int) -> list[Sampled]:
        """Run a step of sequences with one token each, and those that follow it, for all of them; return what each samples."""
        spans = step.decode
        count = -(-bucket(len(spans)) // self._multiple) * self._multiple
        batch = self._batches.get(count)
        if batch is None:
            batch = DecodeBatch(
                count,
                self._width,
                self._most,
                self.pool.size,
                self.pool.spare,
                self.device,
                whole=self._blocks is not None,
            )
            self._batches[count] = batch
        found: list[Sampled] = []
        batch.load(spans, steps, seen_words(spans, self._words, self.device))
        if batch.captured:
            rolled = batch.run(steps, None)
        else:
            with self.entered(compiled=True, single=count == 1):
                rolled = batch.run(steps, self.logits)
        for tokens, logprobs in zip(*rolled, strict=True):
            found.append((tokens[: len(spans)], logprobs[: len(spans)]))
        return found

    def run(self, step: Step) -> Sampled:
        """Run a step."""
        with self.entered():
            ids, rows, last = self.batch(step)
            logits = self.logits(ids, rows, last)
        return draw(logits, [span for span in step.spans if span.samples])

    # -- attention --------------------------------------------------------------------------------------------------

    def _attend(
        self, layer: nn.Module, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, window: int | None
    ) -> Tensor:
        if self._rows is None or q.shape[0] != self._rows.page.shape[0]:
            raise SpecError(f"attention has {q.shape[0]} rows on this rank, not those of the batch")
        return self.pool.attend(self._number[layer], q, k, v, self._rows, scale=scale, window=window)

    def _choose(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Make the head compute logits of only the chosen rows."""
        if self._chosen is None or not args:
            return None
        return args[0].index_select(0, self._chosen), *args[1:]

    def _shapes(self) -> list[LayerShape]:
        """Call the model once to see its attention layers in their order, and their keys."""
        shapes: list[LayerShape] = []
        count = self._multiple

        def attend(
            layer: nn.Module, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, window: int | None
        ) -> Tensor:
            if q.shape[0] != count:
                raise SpecError("a tensor mode that splits the rows of a batch: paged attention needs all on each rank")
            if layer in self._number:
                raise SpecError(f"{type(layer).__name__} attends twice in one forward")
            self._number[layer] = len(shapes)
            shapes.append(LayerShape(k.shape[1], k.shape[2], v.dtype))
            return v.repeat_interleave(q.shape[1] // k.shape[1], 1)

        with ready(self.model), routed(self.model, attend), without_tracking():
            zeros = torch.zeros(count, dtype=torch.int64, device=self.device)
            self._words = self.logits(zeros, Rows(zeros, zeros, zeros, zeros.view(-1, 1))).shape[-1]
        if not shapes:
            raise SpecError(f"{type(self.model).__name__} calls no attention that can be routed to pages")
        return shapes

    def _check(self) -> None:
        """Compare logits by pages with the model's own, on a few tokens: another mixer of tokens would show."""
        size, tokens = self.pool.size, 4
        words = getattr(getattr(self.model, "config", None), "vocab_size", 8)
        request = Request(0, tuple(word % words for word in range(1, tokens + 1)), _CHECK)
        request.pages = list(range(-(-tokens // size)))
        if len(request.pages) > self.pool.pages:
            return
        steps = [Step((), (Span(request, 0, 2),)), Step((), (Span(request, 2, 1),)), Step((Span(request, 3, 1),), ())]
        found = []
        with self.entered():
            for step in steps:
                ids, rows, _ = self.batch(step)
                found.append(self.logits(ids, rows)[: step.spans[0].count])
        if self.row_kernels is not None and self._multiple == 1:
            self._try_row_kernels(ids, rows, found[-1])
        with ready(self.model), without_tracking():
            ids = torch.tensor([request.prompt], device=self.device).expand(self._multiple, -1)
            options = {} if getattr(self.model, "caches_keys", False) else {"use_cache": False}
            output = self.model(ids, **options)
            expected = getattr(output, "logits", output)[0].float()
        self.pool.clear()
        error = _distance(torch.cat(found), expected)
        exact = self.pool.layers[0].scale is None and self.pool.layers[0].dtype in (torch.float32, torch.float64)
        if not error < (1e-2 if exact else 0.3):
            raise SpecError(
                f"{type(self.model).__name__}: logits by pages differ from the model's own by {error:.1%}: "
                "something besides causal attention mixes its tokens"
            )

    def _try_row_kernels(self, ids: Tensor, rows: Rows, wanted: Tensor) -> None:
        """Compute a row by its kernels; drop them if the result differs, or if Triton cannot compile them."""
        try:
            with self.entered(single=True):
                error = _distance(self.logits(ids, rows), wanted)
        except Exception as problem:  # of Triton's compiler
            reason = (str(problem) or type(problem).__name__).strip().split("\n")[0]
            warnings.warn(f"no kernels for a single row, which is slower: {reason}", stacklevel=2)
            error = float("inf")
        if not error < (1e-3 if wanted.dtype == torch.float32 else 0.15):
            self.row_kernels = None  # or its norms and layers are not what their names say


def _distance(a: Tensor, b: Tensor) -> float:
    """Return the norm of a difference divided by the norm of b."""
    return float((a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-30))


@dataclass
class WholeForward:
    """Forward that computes all tokens of every sequence again, for any causal model under any spec.

    Attributes:
        model: a module, or a pipeline of its stages.
        device: of the ids.
    """

    model: Any
    device: torch.device
    module: nn.Module = field(init=False)

    def __post_init__(self) -> None:
        self.module = self.model if isinstance(self.model, nn.Module) else self.model.module

    def run(self, step: Step) -> Sampled:
        """Run a step: a batch of the sequences that sample, filled up on the right."""
        spans = [span for span in step.spans if span.samples]
        if not spans:
            return [], []
        longest = max(span.stop for span in spans)
        listed = [[*span.request.slice(0, span.stop), *[0] * (longest - span.stop)] for span in spans]
        with torch.no_grad(), eval_mode(self.module), _uncompiled():
            output = self.model(torch.tensor(listed, device=self.device))
        logits = getattr(output, "logits", output)
        last = torch.tensor([span.stop - 1 for span in spans], device=logits.device)
        return draw(logits[torch.arange(len(spans), device=logits.device), last], spans)


def draw(logits: Tensor, spans: Sequence[Span]) -> Sampled:
    """Sample the next token of every span from logits ``b v``."""
    if not spans:
        return [], []
    rows = sampling_rows([span.request.sampling for span in spans], logits.device)
    positions = torch.tensor([span.stop for span in spans], device=logits.device)
    tokens, logprobs = sample(logits, positions, rows, seen_words(spans, logits.shape[-1], logits.device))
    return tokens.tolist(), logprobs.tolist()


def seen_words(spans: Sequence[Span], words: int, device: torch.device) -> Tensor | None:
    """Return ``b v`` bool, the words that each sequence has; None if no request has a penalty on them."""
    if all(span.request.sampling.repetition_penalty == 1.0 for span in spans):
        return None
    seen = torch.zeros(len(spans), words, dtype=torch.bool, device=device)
    for row, span in enumerate(spans):
        seen[row, torch.tensor(span.request.slice(0, span.stop), device=device)] = True
    return seen
