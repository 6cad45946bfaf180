"""LMDeploy's PyTorch engine: paged keys and values, CUDA graphs of a token, Triton kernels."""

from __future__ import annotations

import asyncio
import importlib
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.peers.absent import AbsentError

VERSION = "0.18.0"


class LMDeployEngine:
    """Generates greedily for all prompts at once, each call a text of every prompt; what the first call made is kept.

    >>> texts = LMDeployEngine(model, prompts, new=256)  # doctest: +SKIP
    >>> texts(8, limit_s=60.0); texts(256, limit_s=60.0)  # doctest: +SKIP
    """

    def __init__(self, model: Any, prompts: Sequence[list[int]], new: int) -> None:
        """Write the model to a temporary folder and load it from there.

        Args:
            model: of transformers.
            prompts: token ids.
            new: tokens of the longest text.

        Raises:
            AbsentError: if LMDeploy or what it imports is not installed.
            RuntimeError: if LMDeploy finds that it cannot run here; its log says why.
        """
        try:
            package, engine = (importlib.import_module(name) for name in ("lmdeploy", "lmdeploy.pytorch.engine"))
        except ImportError as error:
            raise AbsentError(f"lmdeploy cannot be imported ({error}): pip install lmdeploy=={VERSION}") from error
        self._prompts, self._sampling = list(prompts), package.GenerationConfig
        config = package.PytorchEngineConfig(
            dtype=str(model.dtype).removeprefix("torch."),
            session_len=max(map(len, prompts)) + new + 1,
            max_batch_size=len(prompts),
        )
        self._loop = asyncio.new_event_loop()  # the engine lives in one, from its first text to its last
        with tempfile.TemporaryDirectory(prefix="lmdeploy-") as folder:
            model.save_pretrained(folder)
            some_tokenizer().save_pretrained(folder)
            try:
                self._engine = engine.Engine.from_pretrained(folder, engine_config=config)
            except SystemExit as error:  # its way to end a check
                raise RuntimeError("LMDeploy's check of this machine failed; its log above says why") from error

    def __call__(self, new: int, limit_s: float) -> float:
        """Generate ``new`` tokens for every prompt; return the seconds.

        Raises:
            TimeoutError: after ``limit_s`` seconds.
            RuntimeError: if a text has another length.
        """
        sampling = self._sampling(max_new_tokens=new, min_new_tokens=new, ignore_eos=True, do_sample=False)

        async def length(number: int, ids: list[int]) -> int:
            instance, tokens = self._engine.create_instance(), 0
            async for found in instance.async_stream_infer(number, ids, gen_config=sampling):
                tokens += len(found.token_ids)  # each has the tokens since the one before it
            await instance.async_end(number)
            return tokens

        async def lengths() -> list[int]:
            self._engine.start()
            texts = (length(number, ids) for number, ids in enumerate(self._prompts))
            return await asyncio.wait_for(asyncio.gather(*texts), limit_s)

        begun = time.perf_counter()
        found = self._loop.run_until_complete(lengths())
        seconds = time.perf_counter() - begun
        if set(found) != {new}:
            raise RuntimeError(f"LMDeploy's texts have {sorted(set(found))} tokens, not {new}")
        return seconds


def some_tokenizer() -> Any:
    """Return a tokenizer of one word: the engine wants one in the folder, and is given token ids."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"?": 0}, unk_token="?")), unk_token="?", eos_token="?"
    )
