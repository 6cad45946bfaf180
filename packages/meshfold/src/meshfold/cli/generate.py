"""Continue text with a Hugging Face causal language model from a local folder, under any spec.

  meshfold generate ~/models/llama --prompt "The capital of France is"
  meshfold generate ~/models/llama --prompts questions.txt --out answers.jsonl --temperature 0.7 --top-p 0.9 --n 4
  meshfold generate ~/models/llama --prompts questions.jsonl --parallel tensor=2 --precision bf16
  meshfold generate ~/models/llama                                   # prompts from the terminal, a line each

FILE has a prompt a line, or is JSON lines with a key "prompt" each. A run of meshfold train becomes such a folder by
meshfold convert OUT/checkpoint FOLDER. Prompts run together; the speed is printed at the end.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshfold.cli.arguments import Failure, add_parallel, natural, positive, rate, read_parallel

if TYPE_CHECKING:
    from meshfold.data.tokenizers import Tokenizer
    from meshfold.inference import Request


SETTINGS = {
    **{name: f"--{name}" for name in ("cache", "n", "seed", "stop", "temperature", "tokens")},
    **{
        name: f"--{name.replace('_', '-')}"
        for name in ("max_new_tokens", "min_p", "repetition_penalty", "top_k", "top_p")
    },
    "host_tokens": "--host-tokens",
    "most_rows": "--rows",
}
"""Settings of generation, which errors name, by the options that give them."""
_MOST = 128
"""tokens of a text if nothing else is asked for"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``meshfold generate``."""
    parser.usage = "meshfold generate FOLDER [options]"
    parser.add_argument("folder", metavar="FOLDER", help="a local folder of a Hugging Face causal LM with its weights")
    source = parser.add_argument_group("prompts")
    source.add_argument("--prompt", action="append", metavar="TEXT", help="a prompt; several times for several")
    source.add_argument("--prompts", type=Path, metavar="FILE", help="a prompt a line, or JSON lines with a key prompt")
    source.add_argument("--tokenizer", metavar="FOLDER", help="another tokenizer, or byte (default: the model's)")
    source.add_argument("--out", type=Path, metavar="FILE", help="write texts as JSON lines instead of printing them")
    drawing = parser.add_argument_group("sampling")
    drawing.add_argument("--n", type=positive, default=1, metavar="N", help="texts for each prompt (1)")
    drawing.add_argument(
        "--max-new-tokens",
        type=positive,
        metavar="N",
        help="most tokens of a text (128, or what the model has room for)",
    )
    drawing.add_argument("--temperature", type=rate, default=1.0, metavar="T", help="0 takes the likeliest token (1)")
    drawing.add_argument("--top-k", type=positive, metavar="K", help="draw from the K likeliest words")
    drawing.add_argument(
        "--top-p", type=rate, default=1.0, metavar="P", help="draw from the likeliest words of this probability (1)"
    )
    drawing.add_argument(
        "--min-p", type=rate, default=0.0, help="leave out words less likely than this times the likeliest"
    )
    drawing.add_argument("--repetition-penalty", type=rate, default=1.0, metavar="X", help="above 1: repeat less (1)")
    drawing.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end a text before TEXT")
    drawing.add_argument("--seed", type=natural, default=0, metavar="N", help="of what is drawn (0)")
    how = parser.add_argument_group("how it runs")
    add_parallel(how)
    how.add_argument(
        "--precision", choices=("fp32", "fp64", "bf16", "fp16"), default="fp32", help="of the weights (fp32)"
    )
    how.add_argument("--device", choices=("cpu", "cuda"), help="(default: the GPU if there is one)")
    how.add_argument("--tokens", type=positive, metavar="N", help="room for keys and values of N tokens")
    how.add_argument(
        "--cache", choices=("fp8", "int8"), help="keep keys and values in eight bits: half the memory of bf16"
    )
    how.add_argument(
        "--host-tokens", type=natural, default=0, metavar="N", help="room on the host for N tokens of evicted texts (0)"
    )
    how.add_argument("--rows", type=positive, default=32, metavar="N", help="texts that are written at once (32)")
    how.add_argument("--quantize", choices=("int8", "fp8", "int4"), help="pack the weights of linear layers")
    how.add_argument(
        "--group", type=positive, default=128, metavar="N", help="weights that share a scale in int4 (128)"
    )
    how.add_argument("--memory", action="store_true", help="first say what a rank's memory will hold, in bytes")
    how.add_argument("--compile", action="store_true", help="compile blocks: slow at first, then faster on a GPU")


def run(arguments: argparse.Namespace) -> int:
    """Run ``meshfold generate``, in the process that starts the ranks, or as one of them."""
    from meshfold.huggingface import require_config
    from meshfold.mesh import ParallelSpec
    from meshfold.mesh.processes import Environment, launch
    from meshfold.mesh.processes import start as join

    here = Environment.detect()
    alone = here.source == "single"
    spec = ParallelSpec.parse(read_parallel(arguments.parallel), None if alone else here.world_size)
    spec = spec.with_world_size(spec.world_size)
    spec.require_installed()
    require_config(arguments.folder, f"FOLDER {arguments.folder!r}")  # first, so that no rank starts without it
    _check_out(arguments.out)
    given = read_prompts(arguments)
    if given is None and spec.world_size > 1:
        raise Failure(f"{spec.world_size} ranks cannot read one terminal: give prompts with --prompt or --prompts FILE")
    if alone and spec.world_size > 1:
        return launch(["-m", "meshfold.cli", "generate", *arguments.argv], spec.world_size)
    if alone:
        return _generate(arguments, spec, given)
    with join(device=arguments.device):
        return _generate(arguments, spec, given)


def _check_out(out: Path | None) -> None:
    """Check that the texts can be written, before they are made."""
    if out is not None and out.is_dir():
        raise Failure(f"--out {out} is a folder: name a file in it, such as {out / 'texts.jsonl'}")
    if out is not None and not out.absolute().parent.is_dir():
        raise Failure(f"--out {out}: there is no folder {out.parent}; make it first")


def read_prompts(arguments: argparse.Namespace) -> list[str] | None:
    """Return the prompts of the arguments; None if they come from the terminal or a pipe.

    Raises:
        Failure: for a file without prompts, and for a line of JSON without one.
    """
    found: list[str] = list(arguments.prompt or [])
    if arguments.prompts is None:
        return found or None
    as_json = arguments.prompts.suffix in (".jsonl", ".json")
    try:
        text = arguments.prompts.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not text in UTF-8"
        raise Failure(
            f"--prompts {arguments.prompts} cannot be read: {why}; give a file with a prompt a line"
        ) from None
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        if not as_json:
            found.append(line)
            continue
        try:
            found.append(json.loads(line)["prompt"])
        except (json.JSONDecodeError, KeyError, TypeError):
            raise Failure(f'{arguments.prompts}, line {number}: write {{"prompt": "..."}} in each line') from None
    if not found:
        raise Failure(f"{arguments.prompts}: no prompt in it")
    return found


def _generate(arguments: argparse.Namespace, spec: Any, given: list[str] | None) -> int:
    from meshfold.data.tokenizers import load_tokenizer, tokenizer_of_model
    from meshfold.engine import Engine
    from meshfold.huggingface import open_model, silence_transformers
    from meshfold.inference import Generator, Quantized, quantize
    from meshfold.mesh.spec import format_bytes

    if arguments.quantize and spec.zero is not None:
        raise Failure(
            "--quantize packs weights where they are, and zero has them in chunks: leave zero out of --parallel"
        )
    silence_transformers()
    model = open_model(arguments.folder)
    if not model.has_weights:
        raise Failure(f"{arguments.folder} has no weights: text from fresh ones says nothing")
    tokenizer, note = (
        (load_tokenizer(arguments.tokenizer), "") if arguments.tokenizer else tokenizer_of_model(arguments.folder)
    )
    with Engine(model.source, parallel=spec, precision=arguments.precision, device=arguments.device) as engine:
        first, notes = engine.mesh.rank == 0, [note]
        packed, how = Quantized.of(engine.model), "packed as they are stored"
        if arguments.quantize:
            packed, how = quantize(engine.model, arguments.quantize, group=arguments.group), f"in {arguments.quantize}"
        if packed.layers:
            notes.append(
                f"{len(packed.layers)} layers {how}: {format_bytes(packed.bytes)} a rank instead of "
                f"{format_bytes(packed.bytes_before)}"
            )
        generator = Generator(
            engine.generator,
            tokens=arguments.tokens,
            most_rows=arguments.rows,
            decode=tokenizer.decode,
            compile=arguments.compile,
            cache=arguments.cache,
            host_tokens=arguments.host_tokens,
            device=engine.device,
        )
        notes.append(generator.reason and f"without pages, slower: {generator.reason}")
        if arguments.memory:
            notes.append(f"memory: {generator.memory()}")
        for line in notes:
            if line and first:
                print(line, file=sys.stderr)
        if given is None:
            _converse(arguments, tokenizer, generator)
        else:
            _all(arguments, tokenizer, generator, given, write=first)
    return 0


def sampling_of(arguments: argparse.Namespace, tokenizer: Tokenizer, room: int | None = None) -> Any:
    """Return the settings of the arguments; a text ends at the tokenizer's end too.

    Args:
        arguments: of the command.
        tokenizer: of the texts.
        room: tokens that the model has positions for after the longest prompt; None for any number.
    """
    from meshfold.inference import Sampling

    most = arguments.max_new_tokens
    if most is None:
        most = _MOST if room is None else max(min(_MOST, room), 1)
    return Sampling(
        max_new_tokens=most,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        repetition_penalty=arguments.repetition_penalty,
        stop_tokens=(tokenizer.end,),
        stop=tuple(arguments.stop),
        seed=arguments.seed,
    )


def _room(generator: Any, prompts: Sequence[Sequence[int]]) -> int | None:
    return None if generator.longest is None else generator.longest + 1 - max(map(len, prompts))


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return [int(token) for token in tokenizer.encode(text)] or [tokenizer.end]


def _all(
    arguments: argparse.Namespace, tokenizer: Tokenizer, generator: Any, given: Sequence[str], *, write: bool
) -> None:
    """Continue all prompts together; write the texts in the order of the prompts."""
    begin = time.perf_counter()
    prompts = [_ids(tokenizer, text) for text in given]
    sampling = sampling_of(arguments, tokenizer, _room(generator, prompts))
    requests: list[Request] = generator.complete(prompts, arguments.n, sampling)
    seconds = time.perf_counter() - begin
    if not write:
        return
    rows = [(given[i // arguments.n], request) for i, request in enumerate(requests)]
    if arguments.out is not None:
        arguments.out.write_text("".join(f"{json.dumps(line)}\n" for line in _lines(rows)), encoding="utf-8")
    else:
        for prompt, request in rows:
            print(f"{prompt}{request.text}\n")
    _speed(sum(len(request.tokens) for request in requests), len(requests), seconds)


def _lines(rows: Iterable[tuple[str, Request]]) -> Iterator[dict[str, Any]]:
    for prompt, request in rows:
        yield dict(prompt=prompt, text=request.text, finish=request.finish, tokens=len(request.tokens))


def _converse(arguments: argparse.Namespace, tokenizer: Tokenizer, generator: Any) -> None:
    """Continue one line after the other, showing text as it comes."""
    tokens, texts, seconds = 0, 0, 0.0
    ask = sys.stdin.isatty()
    if ask:
        print("a prompt a line; an empty line ends", file=sys.stderr)
    for line in sys.stdin:
        text = line.rstrip("\n")
        if not text:
            break
        begin, shown, ids = time.perf_counter(), 0, []
        print(text, end="", flush=True)
        prompt = _ids(tokenizer, text)
        sampling = sampling_of(arguments, tokenizer, _room(generator, [prompt]))
        for piece in generator.stream(prompt, sampling):
            ids += piece.tokens
            now = piece.request.text if piece.request.finish else tokenizer.decode(ids)
            if len(now) > shown and not now.endswith("\ufffd") and (piece.request.finish or not arguments.stop):
                print(now[shown:], end="", flush=True)
                shown = len(now)
        print("\n", flush=True)
        tokens, texts, seconds = tokens + len(ids), texts + 1, seconds + time.perf_counter() - begin
    _speed(tokens, texts, seconds)


def _speed(tokens: int, texts: int, seconds: float) -> None:
    speed = f", {tokens / seconds:,.1f} tokens/s" if seconds > 0 else ""
    print(f"{tokens:,} tokens of {texts} text{'' if texts == 1 else 's'} in {seconds:.2f} s{speed}", file=sys.stderr)
