"""transformers' continuous batching, with CUDA graphs and batches that are prepared ahead where there is a GPU."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch


class StoppedError(Exception):
    """A text took longer than its limit. The message says how far it came."""


class ContinuousBatching:
    """Generates greedily for all prompts at once, each call a text of every prompt; what the first call made is kept.

    >>> texts = ContinuousBatching(model, prompts, new=256)  # doctest: +SKIP
    >>> texts(8, limit_s=60.0); texts(256, limit_s=60.0)     # doctest: +SKIP
    """

    def __init__(self, model: Any, prompts: Sequence[list[int]], new: int) -> None:
        """Args:
        model: of transformers.
        prompts: token ids.
        new: tokens of the longest text: caches are made for it.
        """
        from transformers import ContinuousBatchingConfig, GenerationConfig
        from transformers.generation.continuous_batching.utils import WorkloadHints

        on_gpu = torch.cuda.is_available()
        self._model, self._prompts = model, list(prompts)
        self._settings: dict[str, Any] = dict(
            generation_config=GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=ContinuousBatchingConfig(
                use_cuda_graph=on_gpu, use_async_batching=on_gpu, allow_block_sharing=False
            ),
            workload_hints=WorkloadHints(
                max_prompt_length=max(map(len, prompts)), max_generated_length=new, num_requests=len(prompts)
            ),
            persistent_manager=True,
            timeout=60,
        )

    def __call__(self, new: int, limit_s: float) -> float:
        """Generate ``new`` tokens for every prompt; return the seconds, without those of graphs captured beforehand.

        Raises:
            StoppedError: after ``limit_s`` seconds.
            RuntimeError: if a text has an error or another length, or generation ends by itself.
        """
        ended = 0
        with torch.no_grad(), self._model.continuous_batching_context_manager(**self._settings) as manager:
            begun = time.perf_counter()
            manager.add_requests(inputs=self._prompts, max_new_tokens=new)
            while ended < len(self._prompts):
                found = manager.get_result(timeout=0.2)
                if found is not None and found.is_finished():
                    if found.error is not None or len(found.generated_tokens) != new:
                        raise RuntimeError(f"a text of {len(found.generated_tokens)} tokens: {found.error}")
                    ended += 1
                elif found is None and not manager.is_running():
                    raise RuntimeError(f"generation ended after {ended} of {len(self._prompts)} texts")
                if ended < len(self._prompts) and time.perf_counter() - begun > limit_s:
                    manager.stop(block=True, timeout=30, hard_stop=True)
                    raise StoppedError(
                        f"stopped after {limit_s:g} s, when {ended} of {len(self._prompts)} texts of {new} tokens had ended"
                    )
            return time.perf_counter() - begun
