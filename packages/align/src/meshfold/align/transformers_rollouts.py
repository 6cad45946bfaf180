"""Rollouts of transformers' own generation, for a policy of transformers whose weights each rank has whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch

from meshfold.engine import Engine
from meshfold.inference import Rollouts, Sampling
from meshfold.mesh import SpecError, key_of
from meshfold.mesh.collectives import all_gather_object

_PAGE, _TOKENS = 256, 2048


class TransformersRollouts:
    """Samples with ``generate_batch`` (continuous batching) or ``generate`` of transformers; data ranks share the prompts.

    The modules are those that are trained, so no weights are sent. Transformers' attention over pages differs from the
    trainer's, and its random numbers belong to a batch. So samples depend on the number of data ranks.

    Attributes:
        exact: False.
    """

    exact = False

    def __init__(
        self, engine: Engine, *, method: Literal["generate_batch", "generate"] = "generate_batch", rows: int = 64
    ) -> None:
        """Args:
            engine: of the policy.
            method: of the model.
            rows: completions that are computed at once.

        Raises:
            SpecError: for another method, or a policy that transformers cannot generate with.
        """
        if method not in ("generate_batch", "generate"):
            raise SpecError(f"method={method!r}: use 'generate_batch' or 'generate'")
        if rows < 1:
            raise SpecError(f"rows={rows!r}: completions at once, 1 or more")
        spec = engine.spec
        split = [name for name in ("tensor", "pipeline", "sequence", "expert") if getattr(spec, name) is not None]
        if spec.zero is not None and spec.zero.stage == 3:
            split.append("zero stage 3")
        if split:
            raise SpecError(
                f"transformers generates with whole weights, which ranks share under {', '.join(split)}: use EngineRollouts, or "
                "a server"
            )
        model = next((m for m in engine.model.modules() if hasattr(m, method)), None)
        if model is None:
            raise SpecError(
                f"{type(engine.model).__name__} has no {method}: give a causal language model of transformers"
            )
        self._engine, self._model, self._method, self._rows = engine, model, method, rows

    def generate(self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling) -> Rollouts:
        """Return ``n`` completions of each prompt; see :class:`meshfold.align.Rollout`.

        Raises:
            SpecError: for settings that transformers does not have.
        """
        penalized = sampling.repetition_penalty != 1.0 and self._method == "generate_batch"
        for name, given in (("stop", bool(sampling.stop)), ("repetition_penalty", penalized)):
            if given:
                raise SpecError(
                    f"{name}={getattr(sampling, name)!r}: {self._method} of transformers is called without it; leave it out"
                )
        world = self._engine.world
        here = range(
            len(prompts) * world.row_index // world.row_size, len(prompts) * (world.row_index + 1) // world.row_size
        )
        found: list[tuple[list[int], list[float]]] = []
        failure = ""
        if len(here):
            mine = [list(map(int, prompts[number])) for number in here]
            seed = key_of(f"rollout/{sampling.seed}/{here.start}") % (1 << 62)
            try:
                with self._generating(seed):
                    found = getattr(self, f"_{self._method}")(mine, n, sampling, seed)
            except Exception as error:  # the other ranks wait
                failure = f"{type(error).__name__}: {error}"
        rows: list[tuple[list[int], list[float]]] = []
        for part, failed in all_gather_object((found, failure), world.row_group, self._engine.device):
            if failed:
                raise SpecError(f"{self._method} of transformers failed: {failed}")
            rows.extend(part)
        return Rollouts([tokens for tokens, _ in rows], [logs for _, logs in rows], self._engine.steps)

    @contextmanager
    def _generating(self, seed: int) -> Iterator[None]:
        """Evaluate, with random numbers of a seed."""
        training, device = self._model.training, self._engine.device
        self._model.eval()
        try:
            with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
                torch.manual_seed(seed)
                yield
        finally:
            self._model.train(training)

    def _settings(self, n: int, sampling: Sampling, **more: Any) -> Any:
        from transformers import GenerationConfig

        draws: dict[str, Any] = dict(do_sample=False)
        if sampling.temperature > 0:
            draws = dict(
                do_sample=True, temperature=sampling.temperature, top_p=sampling.top_p, min_p=sampling.min_p or None
            )
            draws["top_k"] = 0 if sampling.top_k is None else sampling.top_k
        ends = list(sampling.stop_tokens) or None
        return GenerationConfig(
            max_new_tokens=sampling.max_new_tokens,
            eos_token_id=ends,
            pad_token_id=ends[0] if ends else 0,
            num_return_sequences=n,
            **{**draws, **more},
        )

    def _generate_batch(
        self, prompts: list[list[int]], n: int, sampling: Sampling, seed: int
    ) -> list[tuple[list[int], list[float]]]:
        from transformers import ContinuousBatchingConfig

        model: Any = self._model
        there = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}  # versions name them otherwise
        page = "page_size" if "page_size" in there else "block_size"
        longest = max(map(len, prompts)) + sampling.max_new_tokens
        wanted = {
            "return_logprobs": True,
            "seed": seed % (1 << 31),
            page: _PAGE,
            # Otherwise pages fill the memory that is free.
            "num_blocks": -(-longest // _PAGE) * min(len(prompts) * n, self._rows),
            "max_batch_tokens": max(_TOKENS, longest),
        }
        config = {name: value for name, value in wanted.items() if name in there}
        answers = model.generate_batch(
            [ids for ids in prompts for _ in range(n)],
            generation_config=self._settings(1, sampling),
            continuous_batching_config=ContinuousBatchingConfig(**config),
        )
        found = []
        for answer in answers.values():
            if answer.error is not None:
                raise RuntimeError(answer.error)
            tokens = [int(token) for token in answer.generated_tokens]
            found.append((tokens, [float(log) for log in answer.logprobs[: len(tokens)]]))
        if len(found) != len(prompts) * n:
            raise RuntimeError(f"{len(found)} of {len(prompts) * n} completions came back")
        return found

    def _generate(
        self, prompts: list[list[int]], n: int, sampling: Sampling, seed: int
    ) -> list[tuple[list[int], list[float]]]:
        model, device = self._model, self._engine.device
        found = []
        each = max(1, self._rows // n)
        config = self._settings(
            n,
            sampling,
            return_dict_in_generate=True,
            output_scores=True,
            repetition_penalty=sampling.repetition_penalty,
        )
        for first in range(0, len(prompts), each):
            some = prompts[first : first + each]
            width = max(map(len, some))
            ids = torch.tensor([[0] * (width - len(one)) + one for one in some], device=device)
            mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in some], device=device)
            made: Any = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)  # type: ignore[operator]
            new = made.sequences[:, width:]
            logs = torch.log_softmax(torch.stack(made.scores, 1).float(), -1).gather(-1, new[..., None])[..., 0]
            for tokens, numbers in zip(new.tolist(), logs.tolist(), strict=True):
                ends = [place for place, token in enumerate(tokens) if token in sampling.stop_tokens]
                stop = ends[0] + 1 if ends else len(tokens)
                found.append((tokens[:stop], numbers[:stop]))
        return found
