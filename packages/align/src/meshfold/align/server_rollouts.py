"""Rollouts of a vLLM server, over HTTP: its ``/v1/completions`` with token ids in and out, its weights by way of a folder.

    VLLM_SERVER_DEV_MODE=1 vllm serve FOLDER --weight-transfer-config '{"backend": "disk"}' \\
        --logprobs-mode processed_logprobs [--enable-sleep-mode]

After a step of the policy, all ranks write its weights to a folder before they sample again. The server sees this folder under
the same path and reads the weights (``/start_weight_update``, ``/update_weights``, ``/finish_weight_update``). One rank talks
to the server; all get what it said. The server's kernels are not the trainer's, so its samples are weighed
(:func:`meshfold.align.importance_weights`).

Source: vLLM's documentation, "OpenAI-Compatible Server", "Shared-disk weight updates" and "Sleep Mode".
"""

from __future__ import annotations

import json
import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from meshfold.engine import Engine
from meshfold.inference import Rollouts, Sampling
from meshfold.mesh import SpecError, key_of
from meshfold.mesh.collectives import all_gather_object

_SEEDS = 1 << 31


class ServerRollouts:
    """Samples with a vLLM server.

    Attributes:
        exact: False.
        version: of the weights that the server has: optimizer steps of the policy.
    """

    exact = False

    def __init__(
        self,
        engine: Engine,
        url: str,
        *,
        weights: str | os.PathLike[str] | None = None,
        dtype: str | None = None,
        model: str | None = None,
        logprobs: Literal["processed", "raw"] = "processed",
        sleep: bool = False,
        requests: int = 64,
        timeout: float = 600.0,
        api_key: str | None = None,
    ) -> None:
        """Args:
            engine: of the policy.
            url: of the server, such as ``http://localhost:8000``.
            weights: folder for the policy's weights, of ranks and server alike; None: the server keeps its weights.
            dtype: of these weights, as of :meth:`meshfold.engine.Engine.save_hugging_face`.
            model: the server's name of it; None: the first that it names.
            logprobs: ``"processed"``: the server was started with ``--logprobs-mode processed_logprobs``. ``"raw"``: it was
                not, and its log-probabilities are those at temperature 1 of all words.
            sleep: let it give its GPU memory back between rollouts (``--enable-sleep-mode``).
            requests: most at a time.
            timeout: seconds of one request.
            api_key: of the server; None: the environment's ``VLLM_API_KEY``, if there is one.

        Raises:
            SpecError: for another form of a URL, or a server that does not answer.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise SpecError(f"url={url!r}: the address of a server, such as 'http://localhost:8000'")
        if logprobs not in ("processed", "raw"):
            raise SpecError(f"logprobs={logprobs!r}: use 'processed' or 'raw'")
        if requests < 1:
            raise SpecError(f"requests={requests!r}: 1 or more at a time")
        self._engine, self._url, self._timeout = engine, url.rstrip("/"), timeout
        self._weights = None if weights is None else Path(weights).absolute()
        self._dtype, self._raw, self._sleep, self._requests = dtype, logprobs == "raw", sleep, requests
        self._key = os.environ.get("VLLM_API_KEY") if api_key is None else api_key
        local = parts.hostname in ("localhost", "127.0.0.1", "::1")
        self._opener = urllib.request.build_opener(*[urllib.request.ProxyHandler({})] if local else [])
        self._sent: int | None = None
        self._asleep = False
        self.version = 0
        self._model: str = self._on_first_rank(lambda: self._open(model))

    def generate(self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling) -> Rollouts:
        """Return ``n`` completions of each prompt; see :class:`meshfold.align.Rollout`.

        Raises:
            SpecError: on all ranks, for settings that the server does not have, or an answer that cannot be used.
        """
        if sampling.stop:
            raise SpecError(f"stop={sampling.stop!r}: a server ends texts at tokens here; give stop_tokens")
        if self._raw and (sampling.temperature != 1.0 or sampling.truncates or sampling.repetition_penalty != 1.0):
            raise SpecError(
                "logprobs='raw' are those at temperature 1 of all words, not those that the server draws with: start it with "
                "--logprobs-mode processed_logprobs and leave logprobs out, or sample at temperature 1"
            )
        steps = self._engine.steps
        self._on_first_rank(self._wake)
        if self._weights is not None and self._sent != steps:
            folder = self._weights / f"step-{steps:08d}"
            self._on_first_rank(lambda: shutil.rmtree(folder, ignore_errors=True))
            self._engine.save_hugging_face(folder, dtype=self._dtype)
            self._on_first_rank(lambda: self._update(folder, steps))
            self._sent = self.version = steps
        found = self._on_first_rank(lambda: self._sample(prompts, n, sampling))
        return Rollouts([tokens for tokens, _ in found], [logs for _, logs in found], self.version)

    # -- on one rank ------------------------------------------------------------------------------------------------

    def _on_first_rank(self, work: Any) -> Any:
        """Return on all ranks what one of them gets, or raise what it raises."""
        world = self._engine.world
        mine: tuple[Any, str] | None = None
        if world.mesh.rank == 0:
            try:
                mine = work(), ""
            except (SpecError, OSError, ValueError, KeyError, TypeError) as error:
                mine = None, str(error) if isinstance(error, SpecError) else f"{type(error).__name__}: {error}"
        for told in all_gather_object(mine, world.everyone, self._engine.device):
            if told is not None:
                if told[1]:
                    raise SpecError(f"{self._url}: {told[1]}")
                return told[0]
        return None

    def _open(self, model: str | None) -> str:
        try:
            served = [str(one["id"]) for one in self._ask("/v1/models")["data"]]
        except urllib.error.URLError as error:
            raise SpecError(
                f"no server answers ({error.reason}): start one, as in vllm serve FOLDER --port PORT"
            ) from error
        if model is not None and model not in served:
            raise SpecError(f"serves {served}, not model={model!r}")
        if not served:
            raise SpecError("serves no model")
        if self._weights is not None:
            self._ask("/init_weight_transfer_engine", dict(init_info={}))
        return served[0] if model is None else model

    def _wake(self) -> None:
        if self._asleep:
            self._ask("/wake_up", {})
            self._asleep = False

    def _update(self, folder: Path, steps: int) -> None:
        """Let the server read weights, and remove those of before."""
        self._ask("/pause?mode=wait", {})
        try:
            self._ask("/start_weight_update", {})
            self._ask("/update_weights", dict(update_info=dict(path=str(folder))))
            self._ask("/finish_weight_update", dict(weight_version=str(steps)))
        finally:
            self._ask("/resume", {})
        for other in folder.parent.glob("step-*"):
            if other != folder:
                shutil.rmtree(other)

    def _sample(
        self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling
    ) -> list[tuple[list[int], list[float]]]:
        settings = dict(
            model=self._model,
            n=n,
            max_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=-1 if sampling.top_k is None else sampling.top_k,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            stop_token_ids=list(sampling.stop_tokens),
            logprobs=0,  # of the tokens that were drawn
            return_token_ids=True,
            stream=False,
        )

        def one(number: int) -> list[tuple[list[int], list[float]]]:
            seed = key_of(f"rollout/{sampling.seed}/{number}") % _SEEDS
            answer = self._ask("/v1/completions", dict(settings, prompt=list(prompts[number]), seed=seed))
            choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
            if len(choices) != n:
                raise SpecError(f"answered with {len(choices)} completions of a prompt, not {n}")
            return [_read(choice) for choice in choices]

        with ThreadPoolExecutor(self._requests) as threads:
            found = [row for rows in threads.map(one, range(len(prompts))) for row in rows]
        if self._sleep:
            self._ask("/sleep?level=1", {})
            self._asleep = True
        return found

    def _ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Return the JSON of a GET, or of a POST with a body; None for an answer without any."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(self._url + path, data=data, headers=headers)
        try:
            with self._opener.open(request, timeout=self._timeout) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            said = error.read(400).decode(errors="replace").strip()
            raise SpecError(
                f"{path.partition('?')[0]} failed with {error.code}: {said}{_advice(path, error.code)}"
            ) from error
        return json.loads(text) if text.strip() else None


def _read(choice: Mapping[str, Any]) -> tuple[list[int], list[float]]:
    """Return tokens and log-probabilities of a completion.

    Raises:
        SpecError: if one of them is missing.
    """
    tokens, told = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
    if not isinstance(tokens, list) or not isinstance(told, list) or len(tokens) != len(told):
        raise SpecError(
            "an answer without a log-probability for each of its token_ids: vLLM 0.10.2 or later gives both "
            "(return_token_ids, logprobs)"
        )
    return [int(token) for token in tokens], [float(log) for log in told]


def _advice(path: str, code: int) -> str:
    if code != 404 or path.startswith("/v1/"):
        return ""
    return (
        ". Start the server with VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode or "
        """--weight-transfer-config '{"backend": "disk"}', whichever is asked for"""
    )
