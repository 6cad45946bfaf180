"""Generation for users: one object that takes requests at any time, runs them together, and hands out tokens as they come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import nn

from meshfold.inference.forward import SUMS, PagedForward
from meshfold.inference.host_pages import HostPages
from meshfold.inference.memory import Memory
from meshfold.inference.pages import Pages
from meshfold.inference.requests import Request, Step, ids_of
from meshfold.inference.runner import Runner, Sampled, WholeForward
from meshfold.inference.sampling import Sampling, request_seed
from meshfold.inference.schedule import Part, Scheduler
from meshfold.kernels import CACHE_FORMS
from meshfold.mesh import MeshfoldError, SpecError, collector_paused, did_you_mean
from meshfold.mesh.model_io import storage_bytes
from meshfold.mesh.spec import argument_checks as settings
from meshfold.tensor_parallel.convert import attention_part

_MANY = 8
"""Sequences of which few end by a stop token in the next tokens: a group of tokens may be dropped of one, not of all."""
MOST_TOKENS = 4096
"""tokens of a sequence for which there is room by default"""


class Rollouts(NamedTuple):
    """Generated tokens of many requests: ``n`` for each prompt, one prompt after the other.

    Attributes:
        tokens: of each request, without the prompt.
        logprobs: of these tokens, by the model at the request's temperature (1 where it is 0), nothing truncated.
        version: of the weights: how often :meth:`Generator.new_weights` was called before.
    """

    tokens: list[list[int]]
    logprobs: list[list[float]]
    version: int


@dataclass(frozen=True)
class Piece:
    """New tokens of a request.

    Attributes:
        request: whose; ``request.finish`` says why it has ended.
        tokens: new ones.
        logprobs: of them.
    """

    request: Request
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class _Group:
    """Tokens of running sequences that are being computed: ``steps`` of each from ``step`` on; ``read`` waits for them."""

    step: Step
    steps: int
    read: Callable[[], list[Sampled]]


class Generator:
    """Runs requests over one model, on all ranks that have a part of it; they make the same calls and get the same tokens.

    Attributes:
        paged: keys and values are kept in pages; otherwise every token costs a forward of its whole sequence.
        reason: why they are not; empty if they are.
        scheduler: queue and pages.
        host: pages of this rank on the host; None if there are none.
        version: of the weights.
    """

    def __init__(
        self,
        model: Any,
        *,
        tokens: int | None = None,
        page_size: int = 16,
        most_rows: int = 32,
        chunk: int = 512,
        ahead: int | None = None,
        compile: bool | str | Callable[..., Any] = False,
        share_prefixes: bool = True,
        cache: str | None = None,
        host_tokens: int = 0,
        sums: str = "packets",
        decode: Callable[[list[int]], str] | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Args:
        model: a causal language model: one of ours or of transformers', or ``engine.generator``.
        tokens: room in the pool for so many tokens; in 2d, 2.5d and 3d, whose ranks share the rows of a batch, of all ranks.
            By default ``most_rows`` sequences of the longest length, 4,096 at most.
        page_size: tokens of a page.
        most_rows: sequences that run at once.
        chunk: tokens of prompts and sequences that one forward computes at most.
        ahead: tokens of running sequences that are computed before the host reads any; tokens after a sequence's end are dropped.
            By default 8 on a GPU, else 1.
        compile: compile blocks for running sequences, by Inductor or another backend: the first token of each number of rows takes
            long, later ones are faster on a GPU.
        cache: "fp8" or "int8": keys and values in eight bits, with a scale for each token and head; None: in the model's dtype.
        host_tokens: room on the host, in pinned memory, for keys and values of so many tokens of evicted sequences. Tokens without
            room there are computed again.
        sums: how few rows are summed over GPUs under tensor parallelism in 1d: "packets", with data and flag in one word, up to
            64 KiB and if a try at the start is right; "flags", with flags behind the data; "collectives", by NCCL.
        share_prefixes: requests in flight that begin with the same tokens share their pages.
        device: of the keys and values; by default the device of the model's first parameter. Give ``engine.device`` where
            parameters wait on the host.
        decode: turns token ids into text, as a tokenizer's method does; needed for stop strings and text.

        Raises:
            SpecError: for settings out of range or unknown, and for ``cache`` or ``host_tokens`` where there are no pages.
        """
        if cache is not None and cache not in CACHE_FORMS:
            raise SpecError(
                f"cache={cache!r}: write {' or '.join(map(repr, CACHE_FORMS))}.{did_you_mean(cache, CACHE_FORMS)}"
            )
        if sums not in SUMS:
            raise SpecError(f"sums={sums!r}: write {', '.join(map(repr, SUMS))}.{did_you_mean(sums, SUMS)}")
        if not isinstance(model, nn.Module) and not hasattr(model, "module"):
            raise SpecError(
                f"Generator({model!r}): give a model, or the generator of an Engine(pretrained(folder), ...)"
            )
        self._module: nn.Module = model if isinstance(model, nn.Module) else model.module
        parameter = next(self._module.parameters(), None)
        if device is None:
            device = getattr(model, "device", None) or (torch.device("cpu") if parameter is None else parameter.device)
        config: Any = getattr(self._module, "config", None)
        found = getattr(config, "max_positions", getattr(config, "max_position_embeddings", None))
        self.longest: int | None = found if isinstance(found, int) else None
        words = getattr(config, "vocab_size", None)
        self._vocabulary: int | None = words if isinstance(words, int) else None
        settings.count("most_rows", most_rows)
        settings.count("page_size", page_size)
        per_row = -(-min(self.longest or MOST_TOKENS, MOST_TOKENS) // page_size)
        pages = per_row * most_rows if tokens is None else settings.count("tokens", tokens) // page_size
        if not pages:
            raise SpecError(
                f"tokens={tokens}: less than a page of page_size={page_size}; write tokens={page_size} or more"
            )
        chunk = max(settings.count("chunk", chunk), most_rows)
        self._decode = decode
        self._ahead = settings.count("ahead", ahead) if ahead is not None else 8 if device.type == "cuda" else 1
        self._overlaps = device.type == "cuda"
        self._group: _Group | None = None
        self.version, self._requests = 0, 0
        part, parts = attention_part(self._module)
        each = -(-pages // parts)
        self.runner: Runner
        self.reason = ""
        try:
            self.runner = PagedForward(
                model,
                each,
                page_size,
                device,
                longest=min(self.longest or each * page_size, each * page_size),
                most=self._ahead,
                compile="inductor" if compile is True else compile,
                cache=cache,
                sums=sums,
            )
        except MeshfoldError as error:  # a spec, or a model, that the conversion refuses to run in this way
            self.reason = str(error)
        self.paged = not self.reason
        settings.count("host_tokens", host_tokens, least=0)
        if self.reason and (cache is not None or host_tokens):
            name, value = ("host_tokens", host_tokens) if cache is None else ("cache", cache)
            raise SpecError(
                f"{name}={value!r}: keys and values are not kept in pages here, since {self.reason}; leave {name} out"
            )
        if self.reason:
            self.runner = WholeForward(model, device)
            part, parts, each = 0, 1, pages
        hosts: list[HostPages | None] = [None] * parts
        if isinstance(self.runner, PagedForward) and host_tokens >= page_size:
            count = -(-(host_tokens // page_size) // parts)
            hosts = [HostPages(self.runner.pool, count, here=number == part) for number in range(parts)]
        self.host = hosts[part]
        self.scheduler = Scheduler(
            [Part(Pages(each, page_size), host) for host in hosts],
            most_rows=most_rows,
            chunk=chunk,
            share=share_prefixes and self.paged,
        )

    @property
    def bytes(self) -> int:
        """Bytes of this rank's keys and values; they are allocated once."""
        return self.runner.pool.bytes if isinstance(self.runner, PagedForward) else 0

    def memory(self) -> Memory:
        """Return what generation takes on this rank; a forward of ``chunk`` tokens is run for it, so all ranks call."""
        device, buffers, work = self.runner.device, 0, 0
        if isinstance(self.runner, PagedForward):
            buffers = storage_bytes(self.runner.buffers, device)
            work = self.runner.work(self.scheduler.chunk, self.scheduler.most_rows)
        weights = storage_bytes((*self._module.parameters(), *self._module.buffers()), device)
        return Memory(weights=weights, pages=self.bytes, buffers=buffers, work=work)

    @property
    def busy(self) -> bool:
        """True while some request has not ended."""
        return self.scheduler.busy

    def submit(self, prompt: Iterable[int], sampling: Sampling | None = None) -> Request:
        """Put a request into the queue. It runs in :meth:`step`, together with the others.

        Args:
            prompt: token ids, at least one.
            sampling: settings; the defaults of :class:`Sampling` by default.

        Raises:
            SpecError: for a prompt that is too long, for the model or for the pool, or with a token that the model does not know.
        """
        return self._submit(ids_of(prompt), Sampling() if sampling is None else sampling)

    def _submit(self, ids: tuple[int, ...], sampling: Sampling) -> Request:
        if self._vocabulary and max(ids) >= self._vocabulary:
            strange = next(word for word in ids if word >= self._vocabulary)
            words = f"the vocabulary of {self._vocabulary} words"
            raise SpecError(
                f"token id {strange} is not in {words}: write one of those. Is the tokenizer the model's own?"
            )
        if self.longest is not None and len(ids) + sampling.max_new_tokens - 1 > self.longest:
            room = f"max_new_tokens={self.longest + 1 - len(ids)} or " if len(ids) <= self.longest else ""
            raise SpecError(
                f"a prompt of {len(ids)} tokens with max_new_tokens={sampling.max_new_tokens}: the model has {self.longest} "
                f"positions; write {room}a shorter prompt"
            )
        if sampling.stop and self._decode is None:
            raise SpecError(f"stop={sampling.stop!r} needs text: give Generator(..., decode=tokenizer.decode)")
        request = Request(self._requests, ids, sampling)
        self.scheduler.submit(request)
        self._requests += 1
        return request

    def step(self) -> list[Piece]:
        """Run one forward; return the new tokens, of each request that got one."""
        try:
            return self._step()
        except BaseException:
            self._group = None
            self.scheduler.clear()  # half a step has been done
            raise

    def stream(self, prompt: Iterable[int], sampling: Sampling | None = None) -> Iterator[Piece]:
        """Yield the tokens of one request as they come; others in the queue run along.

        A consumer that stops early cancels the request.
        """
        request = self.submit(prompt, sampling)
        try:
            while not request.finish:
                yield from (piece for piece in self.step() if piece.request is request)
        finally:
            if not request.finish:
                self.cancel(request)

    def generate(self, prompts: Sequence[Iterable[int]], n: int = 1, sampling: Sampling | None = None) -> Rollouts:
        """Continue prompts and wait for all: ``n`` requests for each prompt, whose prompt is computed once.

        Each request has a seed of its own, a function of ``sampling.seed`` and its number in the result.
        """
        requests = self.complete(prompts, n, sampling)
        return Rollouts([r.tokens for r in requests], [r.logprobs for r in requests], self.version)

    def complete(self, prompts: Sequence[Iterable[int]], n: int = 1, sampling: Sampling | None = None) -> list[Request]:
        """Continue prompts as :meth:`generate` does; return the requests, with text and the reason of their end."""
        settings.count("n", n)
        sampling = Sampling() if sampling is None else sampling
        requests = []
        try:
            for i, prompt in enumerate(prompts):
                ids = ids_of(prompt)
                for j in range(n):
                    requests.append(self._submit(ids, _reseeded(sampling, i * n + j)))
        except SpecError:
            for request in requests:
                self.cancel(request)
            raise
        while not all(request.finish for request in requests):
            self.step()
        return requests

    def cancel(self, request: Request) -> None:
        """End a request and release its pages; no effect if it has ended."""
        if not request.finish:
            self.scheduler.finish(request, "cancelled")
        self._rest()

    def new_weights(self) -> None:
        """Count a new version of the weights. Call it after they have changed.

        Raises:
            SpecError: while requests run, whose keys are of the old ones.
        """
        if self.busy:
            raise SpecError(
                "new weights while requests run: their keys and values are of the old ones; wait or cancel them"
            )
        self.version += 1
        self.scheduler.forget()

    @collector_paused()
    def _step(self) -> list[Piece]:
        group, self._group = self._group, None
        if group is None:
            step = self.scheduler.plan()
            if not step.spans:
                return []
            if step.prefill or not isinstance(self.runner, PagedForward):
                return self._pieces(step, [self.runner.run(step)])
            group = self._launch(step, self.scheduler.ahead(step, self._ahead))
        if self._overlaps and self._may_overlap(group.step):  # before the host reads, so that the device has work
            following = self.scheduler.follow(group.step, group.steps, self._ahead)
            self._group = following and self._launch(*following)
        sampled, step = group.read(), group.step
        going = [not span.request.finish for span in step.decode]
        if not all(going):  # some ended before this was known
            step = Step(tuple(compress(step.decode, going)), ())
            sampled = [(list(compress(tokens, going)), list(compress(probs, going))) for tokens, probs in sampled]
        return self._pieces(step, sampled)

    def _launch(self, step: Step, steps: int) -> _Group:
        assert isinstance(self.runner, PagedForward)
        return _Group(step, steps, self.runner.run_ahead(step, steps))

    def _may_overlap(self, step: Step) -> bool:
        """Return True if tokens may be computed behind a step whose own are not known: few would be dropped, and none is needed."""
        few = len(step.decode) < _MANY
        return not any(
            (few and s.stop_tokens) or (self._decode and s.stop) or s.repetition_penalty != 1.0
            for s in (span.request.sampling for span in step.decode)
        )

    def _pieces(self, step: Step, sampled: list[Sampled]) -> list[Piece]:
        """Record what a step, and those that follow it, have sampled; return the new tokens."""
        samplers = [span.request for span in step.spans if span.samples]
        if not step.prefill and not (self._decode and any(request.sampling.stop for request in samplers)):
            counts = self.scheduler.commit_ahead(step, *map(list, zip(*sampled, strict=True)))
            self._texts(samplers)
            self._rest()
            each = zip(samplers, counts, strict=True)
            return [Piece(r, tuple(r.tokens[-count:]), tuple(r.logprobs[-count:])) for r, count in each]
        new: dict[Request, tuple[list[int], list[float]]] = {request: ([], []) for request in samplers}
        for tokens, logprobs in sampled:
            mine = [row for row, request in enumerate(samplers) if not request.finish]
            if not mine and samplers:
                break
            for row in mine:
                new[samplers[row]][0].append(tokens[row])
                new[samplers[row]][1].append(logprobs[row])
            self.scheduler.commit(step, [tokens[row] for row in mine], [logprobs[row] for row in mine])
            self._texts(samplers[row] for row in mine)
            step = self.scheduler.next_step(step)
        self._rest()
        return [Piece(request, tuple(tokens), tuple(logprobs)) for request, (tokens, logprobs) in new.items()]

    def _rest(self) -> None:
        """Forget what pages hold once nothing runs: the weights may change before the next request."""
        if not self.busy:
            if self._group is not None:
                self._group.read()  # it still writes to pages
                self._group = None
            self.scheduler.forget()

    def _texts(self, requests: Iterable[Request]) -> None:
        """End requests at stop strings, and give those that have ended their text."""
        for request in requests:
            stops = request.sampling.stop
            if self._decode is None or not (stops or request.finish):
                continue
            text = self._decode(list(request.tokens))
            ends = [at for stop in stops if (at := text.find(stop)) >= 0]
            if ends and not request.finish:
                self.scheduler.finish(request, "stop")
            elif ends:
                request.finish = "stop"
            request.text = text[: min(ends, default=len(text))]


def _reseeded(sampling: Sampling, number: int) -> Sampling:
    return Sampling(**{**vars(sampling), "seed": request_seed(sampling.seed, number)})
