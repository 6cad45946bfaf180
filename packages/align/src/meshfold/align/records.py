"""Records of TRL's formats as token ids: which tokens a model is given, and which of them it is trained on.

    {"prompt": ..., "completion": ...}              SFT                   -> Completion
    {"messages": [...]}                             SFT of a dialogue     -> Completion, trained on what the assistant says
    {"prompt": ..., "chosen": ..., "rejected": ...} preferences           -> Preference   (also without a prompt of its own)
    {"prompt": ..., "completion": ..., "label": ..} good or bad           -> Completion with ``good``
    {"prompt": ..., anything else}                  prompts, for rollouts -> Prompt

Each text is a string, or messages ``{"role": ..., "content": ...}`` that the tokenizer's chat template puts together. A file has a
JSON object a line.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from meshfold.checkpoint.files import read_json_lines
from meshfold.mesh import SpecError

Record = Mapping[str, Any]
Found = TypeVar("Found")


class TextTokenizer(Protocol):
    """Protocol of what makes ids of text, such as the tokenizers of ``meshfold train``.

    Attributes:
        end: the id that ends a document.
    """

    end: int

    def encode(self, text: str) -> Any:
        """Return the ids of a text, without special ones."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special ones left out."""


class ChatTokenizer:
    """A tokenizer of transformers, with its chat template if it has one.

    Attributes:
        end: the id that ends a document.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Args:
            tokenizer: of transformers.

        Raises:
            SpecError: for one without a token that ends a text.
        """
        if tokenizer.eos_token_id is None:
            raise SpecError("the tokenizer has no eos_token, which ends a completion: set tokenizer.eos_token")
        self.end: int = int(tokenizer.eos_token_id)
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without special ones."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special ones left out."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def chat(self, messages: Sequence[Mapping[str, Any]], *, generate: bool) -> list[int]:
        """Return the ids of a dialogue; with ``generate`` up to where the assistant would speak.

        Raises:
            SpecError: if the tokenizer has no chat template.
        """
        if not getattr(self._tokenizer, "chat_template", None):
            raise SpecError(
                "records of messages, and a tokenizer without a chat template: set tokenizer.chat_template, or give text"
            )
        text = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=generate
        )
        return self.encode(text)


@dataclass(frozen=True, kw_only=True)
class Completion:
    """Tokens, and which of them count.

    Attributes:
        ids: the prompt's and the completion's.
        counts: True for those to be trained on.
        good: of an unpaired preference; None otherwise.
    """

    ids: tuple[int, ...]
    counts: tuple[bool, ...]
    good: bool | None = None

    @property
    def prompt(self) -> tuple[int, ...]:
        """The tokens before the first that counts."""
        first = self.counts.index(True) if any(self.counts) else len(self.ids)
        return self.ids[:first]


@dataclass(frozen=True, kw_only=True)
class Preference:
    """Two completions of one prompt.

    Attributes:
        chosen, rejected: each with the prompt.
        margin: by how much the chosen is better; 0 where the record says nothing.
    """

    chosen: Completion
    rejected: Completion
    margin: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt to be completed.

    Attributes:
        ids: its tokens.
        given: as the record has it, text or messages: reward functions get it.
        columns: the other entries of the record: reward functions get them.
    """

    ids: tuple[int, ...]
    given: Any
    columns: Mapping[str, Any] = field(default_factory=dict)


def read_records(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the records of a file of JSON lines.

    Raises:
        SpecError: if it cannot be read, a line is no JSON object, or there is none.
    """
    found = [record for _, record in read_json_lines(Path(path))]
    if not found:
        raise SpecError(f"{str(path)!r} has no records: give a file with a JSON object on each line")
    return found


def tokenized(
    records: Iterable[Record], tokenizer: TextTokenizer, make: Callable[[Record, TextTokenizer], Found]
) -> list[Found]:
    """Return what ``make``, such as :func:`preference_of`, makes of every record; errors say which record it was."""
    found = []
    for number, record in enumerate(records, 1):
        try:
            found.append(make(record, tokenizer))
        except SpecError as error:
            raise SpecError(f"record {number}: {error}") from error
    return found


def check_examples(name: str, examples: object, kind: type, reader: str) -> None:
    """Check that a trainer got what it learns from: the first example is looked at.

    Args:
        name: of the argument, for errors.
        examples: what was given for it.
        kind: of each.
        reader: name of the function that makes them of records.

    Raises:
        SpecError: for no sequence, or one of something else.
    """
    how = f"{name}=tokenized(read_records(file), tokenizer, {reader})"
    if not hasattr(examples, "__getitem__") or not hasattr(examples, "__len__") or isinstance(examples, (str, dict)):
        raise SpecError(f"{name}: a {type(examples).__name__} is no list of {kind.__name__}: write {how}")
    if len(examples) and not isinstance(examples[0], kind):
        raise SpecError(f"{name}: a {type(examples[0]).__name__} is no {kind.__name__}: write {how}")


def completion_of(record: Record, tokenizer: TextTokenizer) -> Completion:
    """Return a record with ``prompt`` and ``completion`` (and ``label``), with ``messages``, or with ``text``.

    Raises:
        SpecError: for any other record, or messages that the chat template does not put one behind the other.
    """
    good = record.get("label")
    if good is not None and not isinstance(good, bool):
        raise SpecError(f"label {good!r}: true for a good completion, or false")
    if "messages" in record:
        return _of_messages(record["messages"], tokenizer)
    if "completion" in record:
        _check_spelling(record, "prompt")
        prompt, whole = _prompt_and_whole(record.get("prompt", ""), record["completion"], tokenizer)
        return _behind(prompt, whole, good)
    if isinstance(record.get("text"), str):
        ids = (*map(int, tokenizer.encode(record["text"])), tokenizer.end)
        return Completion(ids=ids, counts=(True,) * len(ids))
    raise SpecError(f"has {_keys(record)}: give 'prompt' and 'completion', 'messages', or 'text'")


def preference_of(record: Record, tokenizer: TextTokenizer) -> Preference:
    """Return a record with ``chosen`` and ``rejected``, and ``prompt`` if it is not at their beginning; and ``margin``.

    Raises:
        SpecError: for any other record, or one whose two completions are the same.
    """
    missing = [name for name in ("chosen", "rejected") if name not in record]
    if missing:
        raise SpecError(f"has {_keys(record)}: give 'prompt', 'chosen' and 'rejected'")
    _check_spelling(record, "prompt")
    prompt, chosen, rejected = record.get("prompt"), record["chosen"], record["rejected"]
    if prompt is None:
        prompt, chosen, rejected = _shared_prompt(chosen, rejected)
    both = [_behind(*_prompt_and_whole(prompt, one, tokenizer), None) for one in (chosen, rejected)]
    if both[0] == both[1]:
        raise SpecError("chosen and rejected are the same tokens: a preference tells two completions apart")
    return Preference(chosen=both[0], rejected=both[1], margin=float(record.get("margin", 0.0)))


def prompt_of(record: Record, tokenizer: TextTokenizer) -> Prompt:
    """Return a record with ``prompt``; its other entries are kept for reward functions.

    Raises:
        SpecError: for any other record, or an empty prompt.
    """
    if "prompt" not in record:
        raise SpecError(f"has {_keys(record)}: give 'prompt'")
    given = record["prompt"]
    ids = (
        _chat(given, tokenizer, generate=True) if _is_chat(given) else [int(i) for i in tokenizer.encode(_text(given))]
    )
    if not ids:
        raise SpecError("has an empty prompt: give a token at least")
    return Prompt(ids=tuple(ids), given=given, columns={k: v for k, v in record.items() if k != "prompt"})


def _of_messages(messages: Any, tokenizer: TextTokenizer) -> Completion:
    """Return a dialogue, of which the turns of the assistant count."""
    if not _is_chat(messages):
        raise SpecError(f"messages {messages!r}: a list of {{'role': ..., 'content': ...}}")
    ids: list[int] = []
    counts: list[bool] = []
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        asked = _chat(messages[:place], tokenizer, generate=True) if place else []
        told = _chat(messages[: place + 1], tokenizer, generate=False)
        if told[: len(asked)] != asked or asked[: len(ids)] != ids:
            raise SpecError(
                "the chat template changes what comes before a message, so that the assistant's words cannot be told apart: "
                "give 'prompt' and 'completion'"
            )
        ids, counts = told, [*counts, *[False] * (len(asked) - len(counts)), *[True] * (len(told) - len(asked))]
    if not ids:
        raise SpecError("messages without one of the role 'assistant': nothing is to be learned")
    return Completion(ids=tuple(ids), counts=tuple(counts))


def _prompt_and_whole(prompt: Any, completion: Any, tokenizer: TextTokenizer) -> tuple[list[int], list[int]]:
    """Return the ids of a prompt, and of the prompt with its completion."""
    if _is_chat(completion):
        before = prompt if _is_chat(prompt) else [{"role": "user", "content": _text(prompt)}] if prompt else []
        asked = _chat(before, tokenizer, generate=True) if before else []
        whole = _chat([*before, *completion], tokenizer, generate=False)
        if whole[: len(asked)] != asked:
            raise SpecError(
                "the chat template does not begin a dialogue with its prompt: give text instead of messages"
            )
        return asked, whole
    if _is_chat(prompt):
        asked = _chat(prompt, tokenizer, generate=True)
    else:
        asked = [int(i) for i in tokenizer.encode(_text(prompt))]
    return asked, [*asked, *(int(i) for i in tokenizer.encode(_text(completion))), tokenizer.end]


def _behind(prompt: Sequence[int], whole: Sequence[int], good: bool | None) -> Completion:
    counts = (False,) * len(prompt) + (True,) * (len(whole) - len(prompt))
    return Completion(ids=tuple(whole), counts=counts, good=good)


def _shared_prompt(chosen: Any, rejected: Any) -> tuple[Any, Any, Any]:
    """Return the beginning that two completions share, up to a whole message or a whole word, and the two rests."""
    if _is_chat(chosen) != _is_chat(rejected):
        raise SpecError("of chosen and rejected one is text and the other messages: give two of a kind")
    same = 0
    while same < min(len(chosen), len(rejected)) and chosen[same] == rejected[same]:
        same += 1
    if not _is_chat(chosen):
        _text(chosen), _text(rejected)
        same = chosen[:same].rfind(" ") + 1
    return chosen[:same], chosen[same:], rejected[same:]


def _chat(messages: Any, tokenizer: TextTokenizer, *, generate: bool) -> list[int]:
    chat = getattr(tokenizer, "chat", None)
    if chat is None:
        raise SpecError(
            "has messages, which need a tokenizer with a chat template: give ChatTokenizer(AutoTokenizer...), or text"
        )
    return list(chat(messages, generate=generate))


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(m, Mapping) and "role" in m and "content" in m for m in value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise SpecError(
            f"{value!r} is a {type(value).__name__}: give text, or messages {{'role': ..., 'content': ...}}"
        )
    return value


def _check_spelling(record: Record, key: str) -> None:
    """Raise a SpecError if a record lacks an optional key and has one that is spelled almost like it."""
    if key not in record:
        for name in record:
            if difflib.get_close_matches(name.casefold(), [key], cutoff=0.85):
                raise SpecError(f"has {name!r} and no {key!r}: write {key!r}")


def _keys(record: Record) -> str:
    return ", ".join(map(repr, record)) or "no entries"
