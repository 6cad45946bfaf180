"""Milliseconds a generated token of a Llama of 8B's shape on one GPU: ours beside transformers with a static cache, compiled.

`meshfold bench decode` generates a text of --new tokens for each of --batch sequences, greedily, and divides its time by --new.
With --ranks 2 our model is split over two GPUs by tensor parallelism. --batch 256 --prompt 512 is many requests at once, beside
transformers' continuous batching. The prompts alone are timed too, with one token after each: *prefill*. The other tokens take the
rest: *ms a token after it*.

It writes JSON as it goes, and prints the seconds of each phase. With --rounds 1 each contestant is made, measured and written
before the next. `--report FILE.json` makes the table. Column *error*: log-probs of the tokens generated in the first text,
less those of one forward of it in float32 by the same weights, the largest difference. Column *of a forward*: the same for one
forward in the model's dtype. In bfloat16 both are the rounding of activations, so they are about equal. The bound is the
bytes of the weights that a token reads, by the --bandwidth of the memory.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that this file runs on its own

import torch
from torch import Tensor, nn

from benchmarks.common import (
    Contestant,
    add_output,
    add_rounds,
    check_contestants,
    check_out,
    parse_with_tiny,
)
from benchmarks.decode_report import CONTINUOUS, FORMS, GPT_FAST, JUDGED, OURS, PEER, report
from benchmarks.exact_forward import in_float32, logprobs_of
from benchmarks.kernel_times import kernels_after, kernels_of, lines_of
from benchmarks.measuring import PhaseClock, measure
from benchmarks.planned_memory import PlannedMemory
from meshfold.kernels import tried_graphs

TINY = dict(
    vocabulary=256,
    hidden=64,
    heads=4,
    kv_heads=2,
    ffn=128,
    layers=2,
    prompt=8,
    new=6,
    batch=2,
    rounds=2,
    window_s=0.0,
    settle_s=0.0,
    dtype="float32",
    backend="aot_eager",
)
ON_THEIRS = "ours on transformers' Llama"
EAGER = "transformers dynamic"
PROFILED = 64
"""Tokens of a text that are profiled at most."""
FIRST = 8
"""New tokens of the texts that make transformers' continuous batching warm."""
PREFILL = 8192
"""Tokens of prompts that one forward of ours computes at most, where there are many."""


def main(argv: Sequence[str]) -> int:
    """Entry point of `meshfold bench decode`."""
    parser = argparse.ArgumentParser(prog="meshfold bench decode", description=__doc__.split("\n")[0])
    for name, value in JUDGED.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--ranks", type=int, default=1, help="GPUs that share our model by tensor parallelism")
    parser.add_argument("--batch", type=int, default=1, help="sequences")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=256, help="tokens that are generated after it")
    parser.add_argument("--ahead", type=int, default=8, help="tokens computed before the host reads any")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--sums", default="packets", help="of our generator: packets, flags or collectives")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--bandwidth", type=float, default=4.24, help="TB/s that the GPU's memory reaches (H200: 4.24)")
    parser.add_argument(
        "--most-s", type=float, default=60.0, help="seconds after which a text of continuous batching is stopped"
    )
    parser.add_argument("--only", metavar="NAME,NAME", help="some contestants; see --list")
    parser.add_argument("--list", action="store_true", help="names of the contestants")
    parser.add_argument("--profile", action="store_true", help="print the time of each kernel too")
    add_rounds(parser)
    add_output(parser, "decode")
    options = parse_with_tiny(parser, argv, TINY)
    if options.report is not None:
        report(options.report)
        return 0
    if options.list:
        print("\n".join(makers(options)))
        return 0
    check_contestants(parser, options.only.split(",") if options.only else (), makers(options))
    if options.ranks == 1:
        measure_here(options)
        report(options.out)
        return 0
    if "RANK" not in os.environ:
        check_out(options.out)
        from meshfold.mesh.processes import launch

        ended = launch([str(Path(__file__).resolve()), *argv], options.ranks)
        if not ended:
            report(options.out)
        return ended
    from meshfold.mesh.processes import process_group

    world = process_group.start()
    try:
        measure_here(options, world)
    finally:
        world.close()
    return 0


def measure_here(options: argparse.Namespace, world: Any = None) -> None:
    """Measure in this process; on several ranks each calls it, and the first one writes.

    Args:
        options: parsed arguments.
        world: the group of ranks; None for one.
    """
    check_out(options.out)
    torch._dynamo.config.recompile_limit = 64  # contestants share the code of their blocks
    prints = world is None or world.rank == 0

    def say(text: str) -> None:
        print(text, flush=True) if prints else None

    options.weight_bytes, options.forward_error, options.memory = weight_bytes(options), {}, {}
    found: list[Contestant] = []
    measure(
        "decode",
        contestants(options, found, say),
        options,
        settings=(
            *JUDGED,
            "ranks",
            "batch",
            "prompt",
            "new",
            "ahead",
            "page_size",
            "sums",
            "dtype",
            "backend",
            "bandwidth",
            "weight_bytes",
            "forward_error",
            "memory",
        ),
        world=world,
        say=say,
    )
    if options.profile:
        profile(found, options, say)


def makers(options: argparse.Namespace) -> dict[str, Callable[[], Contestant]]:
    """Return what makes each contestant, by name; models are made when they are first needed."""
    made: dict[str, Any] = {}

    def model(kind: str) -> Any:
        if kind not in made:
            made[kind] = own_model(options) if kind == "own" else their_model(options)
        return made[kind]

    found: dict[str, Callable[[], Contestant]] = {
        OURS: lambda: ours(OURS, model("own"), options),
        f"{OURS} compiled": lambda: ours(f"{OURS} compiled", model("own"), options, compile=options.backend),
        **{f"{OURS} {form} compiled": partial(packed, form, options) for form in FORMS},
        f"{OURS} plain": lambda: ours(f"{OURS} plain", model("own"), options, plain=True),
        **{f"{OURS} {form}": partial(packed, form, options, compiled=False) for form in FORMS},
        ON_THEIRS: lambda: ours(ON_THEIRS, model("theirs"), options),
        f"{ON_THEIRS} compiled": lambda: ours(
            f"{ON_THEIRS} compiled", model("theirs"), options, compile=options.backend
        ),
        GPT_FAST: lambda: by_hand(GPT_FAST, options),
        PEER: lambda: theirs(PEER, model("theirs"), options, cache_implementation="static"),
        EAGER: lambda: theirs(EAGER, model("theirs"), options),
        CONTINUOUS: lambda: continuous(CONTINUOUS, model("theirs"), options),
    }
    if options.ranks == 1:
        return found
    split = (OURS, f"{OURS} compiled", *(f"{OURS} {form}" for form in FORMS))
    return {name: make for name, make in found.items() if name in split}


def contestants(
    options: argparse.Namespace, made: list[Contestant], say: Callable[[str], None]
) -> Iterator[Contestant]:
    """Yield those that are asked for, each after its first text; one that cannot run has the reason as its note.

    Args:
        options: parsed arguments.
        made: gets each of them.
        say: gets a line about each, with the seconds that it took to make.
    """
    wanted = options.only.split(",") if options.only else None
    for name, make in makers(options).items():
        if wanted is None or name in wanted:
            clock = PhaseClock(say)
            try:
                each = make()
                if each.step is not None and not each.warm:
                    each.step()
                    each.warm = True
            except Exception as error:  # whatever a peer raises, or ours on a machine that lacks something
                each = Contestant(name, note=reason_of(error))
            clock.ended(f"{name}: {'made, with its first text' if each.step or each.known_ms else each.note}")
            made.append(each)
            yield each


def reason_of(error: BaseException) -> str:
    """Return what an error says, on one line, with the line of generated code that it is about."""
    said = [line.strip() for line in str(error).splitlines() if line.strip()] or ["?"]
    text = f"{type(error).__name__}: {' … '.join([said[0], *said[1:][-4:]])[:900]}"
    file, line = re.search(r"/\S+\.py\b", str(error)), re.search(r"\bline (\d+)\)", str(error))
    if file is None or line is None or not Path(file[0]).is_file():
        return text
    lines, at = Path(file[0]).read_text(errors="replace").splitlines(), int(line[1])
    near = [f"{number}: {lines[number - 1]}" for number in range(max(at - 2, 1), min(at + 1, len(lines)) + 1)]
    return f"{text} … its lines {' / '.join(near)[:900]}"


def profile(contestants: Sequence[Contestant], options: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Tell the time of each kernel of a token, and how often it runs, less the prefill; of each contestant, on the GPU or not.

    Of ours a text of ``PROFILED`` tokens at most is profiled: a profiler takes long for hundreds of thousands of kernels.

    Args:
        say: gets the lines; all ranks run.
    """
    say(
        "\n".join(tried_graphs())
        or "no other graphs of a token were tried: GPUs before Hopper, or no kernels of few rows"
    )
    for each in contestants:
        if each.step is None:
            continue
        clock, first = PhaseClock(say), kernels_of(each.parts["prefill"]) if "prefill" in each.parts else []
        step: Any = each.step
        new = min(options.new, PROFILED) if first else options.new
        found = kernels_after(kernels_of(partial(step, new) if first else step), first, max(new - bool(first), 1))
        spent = [sum(ms for *_, ms in kernels) for kernels in (found, first)]
        times = [f"{ms:.4f} ms" for ms in spent]
        say(f"{each.name}: {times[0]} and {sum(calls for _, calls, _ in found):.0f} kernels a token")
        if first:
            token = ms_after(each.parts["prefill"], step, options.new)
            between = token - spent[0]  # below 0 where kernels overlap
            say(f"{each.name}: {token:.4f} ms a token unprofiled, {between:.4f} ms of it between kernels")
        say("\n".join(lines_of(found, 40)))
        say(f"{each.name}: {times[1]} of kernels in the prefill")
        say("\n".join(lines_of(first, 20)))
        clock.ended(f"{each.name}: profile")


def ms_after(prefill: Callable[[], object], step: Callable[[], object], new: int) -> float:
    """Return the milliseconds of a token after the prefill, the fastest of three texts of ``new`` tokens."""

    def seconds(run: Callable[[], object]) -> float:
        begun = time.perf_counter()
        run()  # hands out its tokens, so the GPU has ended
        return time.perf_counter() - begun

    whole, first = (min(seconds(run) for _ in range(3)) for run in (step, prefill))
    return (whole - first) / max(new - 1, 1) * 1e3


def ours(name: str, model: Any, options: argparse.Namespace, plain: bool = False, **settings: Any) -> Contestant:
    """Return our generator over a model; ``plain``: without the kernels of a single row."""
    from meshfold.inference import Generator, Sampling

    room = options.batch * (-(-(options.prompt + options.new) // options.page_size) + 1) * options.page_size
    memory = PlannedMemory()
    generator = Generator(
        model,
        tokens=room,
        page_size=options.page_size,
        most_rows=options.batch,
        chunk=max(min(options.batch * options.prompt, PREFILL), options.batch),
        ahead=options.ahead,
        sums=options.sums,
        **settings,
    )
    if plain:
        generator.runner.row_kernels = None  # type: ignore[attr-defined]
    given = prompts(options).tolist()

    def step(new: int = options.new) -> Any:
        return generator.generate(given, sampling=Sampling(temperature=0.0, max_new_tokens=new))

    without = {} if plain or settings.get("compile") else getattr(generator.runner, "without", {})
    named = dict(
        row_kernels="the kernels of a single row", sums="fused sums over ranks", packets="packets of sums over ranks"
    )
    lacking = [
        f"without {named[key]}: {why}" for key, why in without.items() if key == "row_kernels" or options.ranks > 1
    ]
    note = generator.reason or "; ".join(lacking)
    options.memory[name] = memory.of(generator, step)
    error, options.__dict__.setdefault("forward_error", {})[name] = errors_of(model, given[0], step())
    return Contestant(name, step, note=note, error=error, parts=dict(prefill=partial(step, 1)), warm=True)


def packed(form: str, options: argparse.Namespace, *, compiled: bool = True) -> Contestant:
    """Return our generator over a model of its own with packed weights; its own forward, for the error, has the same ones."""
    from meshfold.inference import quantize

    model = own_model(options)
    quantize(model, form, group=min(128, options.hidden))
    name = f"{OURS} {form} compiled" if compiled else f"{OURS} {form}"
    return ours(name, model, options, compile=options.backend if compiled else False)


def theirs(name: str, model: Any, options: argparse.Namespace, **settings: Any) -> Contestant:
    """Return transformers' own generation."""
    ids = prompts(options).to(model.device)

    def step() -> Any:
        return model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=options.new,
            min_new_tokens=options.new,
            do_sample=False,
            pad_token_id=0,
            **settings,
        )

    return Contestant(name, step)


def by_hand(name: str, options: argparse.Namespace) -> Contestant:
    """Return gpt-fast's way, written by hand."""
    from benchmarks.peers import gpt_fast

    sizes = [options.vocabulary, options.hidden, options.layers, options.heads, options.kv_heads, options.ffn]
    longest = options.prompt + options.new
    model: Any = made_here(lambda: gpt_fast.Decoder(*sizes, batch=options.batch, longest=longest), options)
    generate, ids = gpt_fast.generator(model, options.backend), prompts(options).to(model.output.weight.device)
    return Contestant(name, lambda: generate(ids, options.new).tolist())


def continuous(name: str, model: Any, options: argparse.Namespace) -> Contestant:
    """Return transformers' continuous batching, warm and timed once; one that is stopped has the limit as its time."""
    from benchmarks.peers.continuous_batching import ContinuousBatching, StoppedError

    texts = ContinuousBatching(model, prompts(options).tolist(), options.new)
    texts(min(FIRST, options.new), 4 * options.most_s)
    try:
        return Contestant(name, known_ms=texts(options.new, options.most_s) * 1e3, note="timed once")
    except StoppedError as error:
        return Contestant(name, known_ms=options.most_s * 1e3, note=str(error))


def prompts(options: argparse.Namespace) -> Tensor:
    """Return random prompts, ``batch prompt``."""
    random = torch.Generator().manual_seed(1)
    return torch.randint(1, options.vocabulary, (options.batch, options.prompt), generator=random)


def errors_of(model: Any, prompt: list[int], found: Any) -> tuple[float, float]:
    """Return the largest difference of log-probs of the first text from those in float32: of generation, and of one forward."""
    tokens = found.tokens[0]
    with in_float32(model):
        exact = logprobs_of(model, prompt, tokens)
    heard = torch.tensor(found.logprobs[0], device=exact.device)
    return tuple(float((each - exact).abs().max()) for each in (heard, logprobs_of(model, prompt, tokens)))  # type: ignore[return-value]


def own_model(options: argparse.Namespace) -> Any:
    """Return our Llama with random weights; on several ranks what generates with the part of it that is here."""
    from meshfold.models import LlamaConfig, build

    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden=options.hidden,
        layers=options.layers,
        heads=options.heads,
        kv_heads=options.kv_heads,
        ffn=options.ffn,
        max_positions=options.prompt + options.new + 1,
        tie=False,
    )
    if options.ranks == 1:
        return made_here(lambda: build(config), options)
    from meshfold.engine import Engine

    precision = "bf16" if options.dtype == "bfloat16" else "fp32"
    torch.manual_seed(0)
    engine = Engine(lambda: build(config), dict(tensor=options.ranks), precision=precision)
    model = engine.generator.eval()
    model.engine_of_ranks = [engine]  # lives as long as the model, and is no part of its state
    return model


def their_model(options: argparse.Namespace) -> Any:
    """Return transformers' Llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads,
        intermediate_size=options.ffn,
        max_position_embeddings=options.prompt + options.new + 1,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return made_here(lambda: LlamaForCausalLM(config), options)


def made_here(make: Callable[[], nn.Module], options: argparse.Namespace) -> nn.Module:
    """Return a model in eval mode, made on the GPU where there is one, in the wanted dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, options.dtype))
    torch.manual_seed(0)
    try:
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            return make().eval()
    finally:
        torch.set_default_dtype(before)


def weight_bytes(options: argparse.Namespace) -> int:
    """Return the bytes of the weights that every token reads: all but the embedding table."""
    head = options.hidden // options.heads
    block = options.hidden * (2 * options.heads + 2 * options.kv_heads) * head + 3 * options.hidden * options.ffn
    wide: int = getattr(torch, options.dtype).itemsize
    return int(options.layers * block + options.hidden * options.vocabulary) * wide


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
