"""Text to token ids and back: bytes, which need nothing, or a Hugging Face tokenizer from a local folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from meshfold.checkpoint.tensors import check_inside_folder
from meshfold.huggingface import NO_REMOTE_CODE
from meshfold.mesh import SpecError

Ids = npt.NDArray[np.uint32]

# Files of tokenizers: a folder with a tokenizer has at least one of them.
_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "tekken.json",
)
_PROBE = "The quick brown fox jumps over the lazy dog, and 12 of its friends look on."


class NoTokenizerError(SpecError):
    """A folder without a usable tokenizer; ``lacks`` says briefly what is missing."""

    def __init__(self, message: str, lacks: str) -> None:
        super().__init__(message)
        self.lacks = lacks


class Tokenizer(Protocol):
    """Protocol of a tokenizer for training.

    Attributes:
        name: unique: a cache of token ids belongs to a name.
        vocab_size: ids are below it.
        end: the id that ends a document.
    """

    name: str
    vocab_size: int
    end: int

    def encode(self, text: str) -> Ids:
        """Return the ids of a text, without specials."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, specials left out."""


class ByteTokenizer:
    """Tokenizer with a token per byte of UTF-8, and a special token that ends a document."""

    name = "byte"
    vocab_size = 257
    end = 256

    def encode(self, text: str) -> Ids:
        """Return the bytes of a text."""
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text; bytes that are not UTF-8 become a replacement character."""
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class HuggingFaceTokenizer:
    """A tokenizer that transformers loads from a local folder."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Raises:
        NoTokenizerError: if the folder has no tokenizer, or one that makes almost no tokens of text.
        SpecError: for a tokenizer that cannot be loaded, or without transformers.
        """
        path = Path(folder)
        if not path.is_dir():
            raise SpecError(f"tokenizer {str(folder)!r}: there is no such folder; give one with a tokenizer, or 'byte'")
        # Without files transformers returns a tokenizer of only special tokens, and raises nothing.
        if not any(any(path.glob(pattern)) for pattern in _FILES):
            raise NoTokenizerError(
                f"tokenizer {str(folder)!r}: the folder has no tokenizer files (tokenizer.json, vocab.json and "
                "merges.txt, tokenizer.model, ...); give another folder, or 'byte'",
                "no tokenizer files",
            )
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise SpecError(f"tokenizer {str(folder)!r} needs transformers: pip install meshfold[hf]") from None
        try:
            for pattern in _FILES:
                for file in path.glob(pattern):
                    check_inside_folder(file, path)
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(path), **NO_REMOTE_CODE)
        except Exception as error:  # transformers raises many kinds here
            reason = str(error).strip().split("\n")[0]
            raise SpecError(
                f"tokenizer {str(folder)!r}: transformers finds none there ({reason}); give another folder, or 'byte'"
            ) from error
        made, words = len(self.encode(_PROBE)), len(_PROBE.split())
        if made < words // 2:
            raise NoTokenizerError(
                f"tokenizer {str(folder)!r} makes {made} token{'' if made == 1 else 's'} of {words} words of text: its "
                f"vocabulary, of {len(self._tokenizer)}, is empty or nearly so, and the folder lacks the file that "
                "holds it (tokenizer.json, vocab.json and merges.txt, tokenizer.model, ...); give another, or 'byte'",
                "a tokenizer without a vocabulary",
            )
        end = self._tokenizer.eos_token_id
        if end is None:
            end = (
                self._tokenizer.sep_token_id
                if self._tokenizer.sep_token_id is not None
                else self._tokenizer.pad_token_id
            )
        if end is None:
            raise SpecError(
                f"tokenizer {str(folder)!r} has no end-of-text token (eos_token): add one to its configuration"
            )
        self.name = str(path.resolve())
        self.vocab_size = len(self._tokenizer)
        self.end: int = int(end)

    def encode(self, text: str) -> Ids:
        """Return the ids of a text."""
        return np.asarray(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))


def load_tokenizer(name: str) -> Tokenizer:
    """``"byte"``, or the tokenizer in a local folder.

    Raises:
        SpecError: if there is none.
    """
    return ByteTokenizer() if name == "byte" else HuggingFaceTokenizer(name)


def tokenizer_of_model(folder: str) -> tuple[Tokenizer, str]:
    """Return the tokenizer in a model's folder, or bytes if it has none, then with a note that says so.

    Raises:
        SpecError: if there is one that cannot be used.
    """
    try:
        return HuggingFaceTokenizer(folder), ""
    except NoTokenizerError as error:
        return (
            ByteTokenizer(),
            f"{folder} has {error.lacks}: tokens are bytes (--tokenizer FOLDER for others)",
        )
