"""The command ``meshfold``: one file a command, imported when it is called for.

A command's module has ``configure(parser)`` and ``run(arguments) -> int``, and imports torch in ``run`` at the
earliest, so that help is there at once. Whatever fails in a way that a person can mend ends in one sentence on
standard error and a code that is not 0.
"""

from __future__ import annotations

import argparse
import codecs
import importlib
import io
import os
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TextIO

from meshfold.cli.arguments import Failure, nearest, sentence_of
from meshfold.engine import precision_name

COMMANDS = {
    "demo": "train a small GPT on 8 local processes and see what happens",
    "train": "train a GPT, a Llama-like model or a Hugging Face causal LM on text or token ids",
    "align": "SFT, reward model, DPO, KTO, GRPO or PPO on records of prompts, completions or preferences",
    "run": "start a script on local ranks; the first failing rank's traceback is what you see",
    "plan": "bytes a rank holds and moves for a spec and a model, without a GPU",
    "suggest": "the specs with which a model trains fastest on a machine, without a GPU",
    "calibrate": "measure this machine, for plan, suggest and train --machine FILE",
    "generate": "continue text with a model from a folder, under any spec",
    "fold": "predict structures of proteins with ESMFold or ESMFold 2, one protein on many GPUs",
    "convert": "between checkpoints and Hugging Face folders, in both directions",
    "reproduce": "run a paper's experiment: table, plot, verdict",
    "bench": "measure side by side with peers",
    "doctor": "what is installed, and what works on this machine",
}


_ELSEWHERE = {
    "--learning-rate": "--lr",
    "--epochs": "--steps",
    "--max-steps": "--steps",
    "--gradient-accumulation-steps": "--accumulate",
    "--grad-accum": "--accumulate",
    "--output-dir": "--out",
    "--output": "--out",
    "--dtype": "--precision",
    "--max-length": "--seq-len",
    "--length": "--max-new-tokens",
    "--max-tokens": "--max-new-tokens",
    "--sequence-length": "--seq-len",
    "--nproc-per-node": "--ranks",
    "--nproc": "--ranks",
    "--num-processes": "--ranks",
    "--world-size": "--ranks",
    "--np": "--ranks",
    "-np": "--ranks",
    "-n": "--ranks",
    "--dataset": "--data",
    "--model-name": "--model",
    "--model-name-or-path": "--model",
    "gpu": "cuda",
    "rm": "reward",
    "reward-model": "reward",
    "reward_model": "reward",
    **{name: f"dpo --loss {name}" for name in ("simpo", "orpo", "ipo", "hinge")},
    **{name: f"grpo --loss {name}" for name in ("rloo", "dapo", "dr_grpo")},
}
"""Names that other programs have for options and choices"""

_ENTRIES = {
    "--tensor": "tensor",
    "--tp": "tensor",
    "--tensor-parallel-size": "tensor",
    "--pipeline": "pipeline",
    "--pp": "pipeline",
    "--pipeline-parallel-size": "pipeline",
    "--dp": "data",
    "--zero": "zero.stage",
    "--zero-stage": "zero.stage",
}
"""Options that stand for an entry of the spec"""

_COMMANDS_ELSEWHERE = {
    "export": "convert CHECKPOINT FOLDER",
    "version": "--version",
    "launch": "run --ranks 2 SCRIPT.py",
    "torchrun": "run --ranks 2 SCRIPT.py",
    "infer": "generate FOLDER",
    "predict": "generate FOLDER",
    "estimate": "plan --model NAME",
    "memory": "plan --model NAME",
    "info": "doctor",
    "env": "doctor",
    "serve": "convert CHECKPOINT FOLDER, and serve the folder with transformers or vLLM",
    "finetune": "train --hf FOLDER",
    "chat": "generate FOLDER",
    **{name: f"align {name}" for name in ("sft", "reward", "dpo", "kto", "grpo", "ppo")},
}
"""Names that other programs have for commands"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``meshfold ARGV...``; returns the exit code."""
    for stream in (sys.stdout, sys.stderr):
        write_what_it_can(stream)
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if name in ("-V", "--version"):
        from meshfold.cli.doctor import version

        print(f"meshfold {version('meshfold') or 'from source'}")
        return 0
    if name not in COMMANDS:
        return _fail(
            "meshfold",
            Failure(f"there is no command {name!r}.{_instead(name)} Commands: {', '.join(COMMANDS)}"),
        )
    try:
        return _run(name, arguments[1:])
    except KeyboardInterrupt:  # also during a command's slow imports
        return _fail(f"meshfold {name}", Failure("interrupted", code=130))


def write_what_it_can(stream: TextIO) -> None:
    """Let a stream replace characters that its encoding lacks, such as the µ of a table in ASCII, instead of raising an error."""
    if isinstance(stream, io.TextIOWrapper) and codecs.lookup(stream.encoding).name != "utf-8":
        stream.reconfigure(errors="replace")


def _run(name: str, arguments: list[str]) -> int:
    """Run one command; report user errors in one sentence."""
    command = importlib.import_module(f"meshfold.cli.{name}")
    parser = Parser(prog=f"meshfold {name}", description=command.__doc__, formatter_class=Formatter)
    command.configure(parser)
    parsed = parser.parse_args(arguments, argparse.Namespace(argv=arguments, rank=None))
    try:
        return int(command.run(parsed))
    except BrokenPipeError:  # the reader has closed the pipe, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        failure = sentence_of(error)
        if failure is None:
            raise  # our bug: show the traceback
        failure = Failure(_as_typed(str(failure), getattr(command, "SETTINGS", {})), failure.code)
        takes_rules = "--rule" in parser._option_string_actions
        if takes_rules and "'replicate'" in str(failure) and "--rule " not in str(failure):
            failure = Failure(f"{failure}. Rules are typed so: --rule 'NAME OR PATTERN=ROLE'", failure.code)
        # One of many processes, and any may fail first, so each names its rank.
        return _fail(parser.prog if parsed.rank is None else f"{parser.prog}: rank {parsed.rank}", failure)


class Parser(argparse.ArgumentParser):
    """Parser whose errors are one sentence, without the usage."""

    _words: Sequence[str] = ()

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse words, and keep them for errors."""
        self._words = args or ()
        return super().parse_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Print the sentence and exit with 2."""
        hint = ""
        stranger = re.match(r"unrecognized arguments: (--?[a-z][^\s=]*)[ =]?(\S*)", message)
        if stranger:
            hint = _hint_for(stranger[1].replace("_", "-"), stranger[2], self._option_string_actions)
        words = re.match(r"unrecognized arguments: ((?!-).*)", message)
        if words and (command := _command(words[1])):
            hint = f" Write 'meshfold {command}'."
        elif words and (option := _option_for(words[1], self._option_string_actions)):
            hint = f" Write {option}."
        if "are required: " in message and self._words and (command := _command(self._words[0])):
            hint = f" Write 'meshfold {command}'."  # as for meshfold train sft
        choice = re.match(r"argument ([\w-]+): invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if choice:
            hint = nearest(choice[2], re.findall(r"[\w.-]+", choice[3]))
            name = precision_name(choice[2]) if choice[1] == "--precision" else _ELSEWHERE.get(choice[2], "")
            hint = f" It is called {name!r} here." if name else hint
            if not hint and not choice[1].startswith("-") and (command := _command(choice[2])):
                hint = f" Write 'meshfold {command}'."
        self.exit(2, f"{self.prog}: {message}.{hint} See {self.prog} --help\n")


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Help formatter that keeps the paragraphs of a description."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=100)


def _overview() -> str:
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items())
    return (
        f"usage: meshfold COMMAND ...\n\ncommands:\n{rows}\n\n'meshfold COMMAND --help' lists the options of a command."
    )


def _hint_for(option: str, value: str, known: Collection[str]) -> str:
    """Return advice on an option that does not exist: its name here, the entry of the spec, or the nearest name."""
    if _ELSEWHERE.get(option) in known:
        return f" It is called {_ELSEWHERE[option]!r} here."
    if option in _ENTRIES and "--parallel" in known:
        return f" Write --parallel {_ENTRIES[option]}={value or 2}."
    return nearest(option, known)


def _option_for(words: str, known: Iterable[str]) -> str:
    """Return the option that words without an option mean, ready to paste; empty if no option of ``known`` fits."""
    if "--parallel" in known and re.fullmatch(r"\w[\w.]*=\S+( \w[\w.]*=\S+)*", words):
        return f"--parallel {words}"
    if "--data" in known and os.path.exists(words):
        return f"--data {words}"
    if "--prompt" in known:
        return f'--prompt "{words}"'
    return f"--model {words}" if "--model" in known and " " not in words else ""


def _as_typed(text: str, options: Mapping[str, str]) -> str:
    """Return an error with settings as they are typed: ``--max-new-tokens 127`` for ``max_new_tokens=127``."""

    def typed(found: re.Match[str]) -> str:
        return f"{options[found[1]]} " if found[1] in options else found[0]

    return re.sub(r"(?<![\w.(-])(\w+)=", typed, text)


def _command(word: str) -> str | None:
    """Return the command that a word is, or stands for in other programs; None if there is none."""
    return word if word in COMMANDS else _COMMANDS_ELSEWHERE.get(word)


def _instead(name: str) -> str:
    """Return the command that a word may stand for, as a sentence."""
    known = _COMMANDS_ELSEWHERE.get(name)
    return f" Write 'meshfold {known}'." if known else nearest(name, COMMANDS)


def _fail(prog: str, failure: Failure) -> int:
    print(f"{prog}: {failure}", file=sys.stderr)
    return failure.code
