"""A small server on loopback that answers as vLLM's does: completions of token ids, weights by a folder, sleep."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from torch import nn

Load = Callable[[Path], nn.Module]


class Server:
    """Requests that the server got, and its weights.

    Attributes:
        calls: paths in order.
        asked: bodies of the requests for completions.
        version: of the weights.
        broken: entries of a choice that are left out of answers.
        weights: folders that it has read.
    """

    def __init__(self, model: nn.Module, load: Load) -> None:
        self.model, self._load = model, load
        self.calls: list[str] = []
        self.asked: list[dict[str, Any]] = []
        self.version, self.asleep, self.paused = "0", False, False
        self.broken: tuple[str, ...] = ()
        self.weights: list[str] = []
        self.lock = threading.Lock()

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        self.calls.append(path)
        match path:
            case "/v1/models":
                return dict(data=[dict(id="policy")])
            case "/v1/completions":
                if self.asleep or self.paused:
                    raise ValueError("the engine sleeps")
                self.asked.append(body)
                return dict(choices=self._choices(body))
            case "/init_weight_transfer_engine" | "/start_weight_update":
                return dict(message="done")
            case "/update_weights":
                folder = body["update_info"]["path"]
                assert list(Path(folder).glob("*.safetensors"))
                self.model = self._load(Path(folder))
                self.weights.append(folder)
                return dict(message="done")
            case "/finish_weight_update":
                self.version = body["weight_version"]
                return dict(message="done")
            case "/pause?mode=wait" | "/resume":
                self.paused = path != "/resume"
                return dict(status="done")
            case "/sleep?level=1" | "/wake_up":
                self.asleep = path != "/wake_up"
                return None
        raise KeyError(path)

    def _choices(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        choices = []
        for index in range(body["n"]):
            generator = torch.Generator().manual_seed(body["seed"] + index)
            ids, tokens, logs = list(body["prompt"]), [], []
            for _ in range(body["max_tokens"]):
                with torch.no_grad():
                    row = torch.log_softmax(self.model(torch.tensor([ids])).logits[0, -1] / body["temperature"], -1)
                tokens.append(int(torch.multinomial(row.exp(), 1, generator=generator)))
                logs.append(float(row[tokens[-1]]))
                ids.append(tokens[-1])
                if tokens[-1] in body["stop_token_ids"]:
                    break
            choice = dict(index=index, text="", token_ids=tokens, logprobs=dict(token_logprobs=logs))
            choices.append({name: value for name, value in choice.items() if name not in self.broken})
        return choices[::-1]


@contextmanager
def serving(model: nn.Module, load: Load) -> Iterator[tuple[Server, str]]:
    """Serve a model; yield the server and its address."""
    server = Server(model, load)

    class Handler(BaseHTTPRequestHandler):
        def _reply(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length) or b"{}")
            try:
                with server.lock:
                    text = server.answer(self.path, body)
                code, said = 200, b"" if text is None else json.dumps(text).encode()
            except KeyError:
                code, said = 404, b'{"detail":"Not Found"}'
            except ValueError as error:
                code, said = 503, str(error).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        do_GET = do_POST = _reply  # noqa: N815  # names of the library

        def log_message(self, *given: Any) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, daemon=True)
        thread.start()
        try:
            yield server, f"http://127.0.0.1:{http.server_address[1]}"
        finally:
            http.shutdown()
            thread.join()
