"""Corpora: a folder or a file as one row of token ids.

Text is tokenised once, into a cache that all ranks memory-map.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt

from meshfold.checkpoint.files import parse_json_object, write_atomically
from meshfold.data.records import Part, find_records, texts_of
from meshfold.data.tokenizers import Tokenizer
from meshfold.mesh import SpecError, did_you_mean
from meshfold.mesh.random import key_of
from meshfold.mesh.spec import format_bytes

TOKEN_FILES = (".bin", ".npy")
_PIECE = 1 << 20  # characters per call of the tokenizer
_LOOK = 8192  # bytes read from the start of a file to recognise text
Tokens = npt.NDArray[np.integer]


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Consecutive tokens: those to train on, then those to validate with.

    Attributes:
        tokens: all of them, usually memory-mapped from a file.
        train_tokens: number of tokens to train on.
        notes: remarks for the user on how it was made.
    """

    tokens: Tokens
    train_tokens: int
    notes: tuple[str, ...] = ()

    @property
    def validation_tokens(self) -> int:
        """The number of tokens to validate with."""
        return len(self.tokens) - self.train_tokens


def open_corpus(
    path: str | os.PathLike[str],
    tokenizer: Tokenizer | None,
    *,
    cache: str | os.PathLike[str],
    validation: float = 0.05,
    extensions: tuple[str, ...] = (),
    exclude: tuple[str, ...] = (),
    token_dtype: str = "uint16",
    max_bytes: int | None = None,
    text_column: str | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Corpus:
    """Return the tokens of a folder or a file.

    In a folder, every text file that is not hidden is a document. Whole documents are set aside for validation, chosen by a
    hash of their names. The end of a single file is set aside.

    Args:
        path: a folder of text, a file of text, records (:mod:`meshfold.data.records`), or a file of token ids: ``.bin``
            (raw) or ``.npy``.
        tokenizer: for text; a file of token ids needs none.
        cache: folder for the tokens of text.
        validation: share of the tokens, or of the bytes of a folder, to set aside.
        extensions: take only files that end so, such as ``(".py", ".md")``.
        exclude: names of folders to leave out.
        token_dtype: of a ``.bin`` file: uint16 or uint32.
        max_bytes: stop reading documents after about this many.
        text_column: of records (JSON lines, Parquet, Arrow, what datasets saved), the field that holds the text.
        say: called with progress messages.

    Raises:
        SpecError: if the path cannot be used.
    """
    source = Path(path)
    if not 0 <= validation < 1:
        raise SpecError(f"a validation share of {validation}: give a fraction from 0 to below 1")
    if not source.exists():
        beside = [str(entry) for entry in source.parent.glob("*")] if source.parent.is_dir() else []
        raise SpecError(
            f"there is no file or folder {str(path)!r} to train on (looked for {source.absolute()})."
            f"{did_you_mean(str(source), beside)} Give another path: --data PATH"
        )
    if source.is_file() and source.suffix in TOKEN_FILES:
        tokens, notes = _token_file(source, token_dtype)
        return Corpus(tokens=tokens, train_tokens=len(tokens) - int(validation * len(tokens)), notes=notes)
    if tokenizer is None:
        raise SpecError(
            f"{str(path)!r} is text and needs a tokenizer: give 'byte', or a folder with a Hugging Face tokenizer"
        )
    if records := find_records(source):
        return _records(records, tokenizer, Path(cache), validation, text_column, max_bytes, say)
    documents, skipped = _documents(source, extensions, exclude)
    if not documents:
        raise SpecError(f"no text in {str(path)!r}: {_why_none(source, extensions, skipped)}")
    return _tokenise(source, documents, skipped, tokenizer, Path(cache), validation, max_bytes, say)


def largest_id(corpus: Corpus) -> int:
    """Return the largest token id of the whole corpus, read in pieces."""
    piece = 1 << 24
    return max(int(corpus.tokens[start : start + piece].max()) for start in range(0, len(corpus.tokens), piece))


def _token_file(path: Path, dtype: str) -> tuple[Tokens, tuple[str, ...]]:
    """Return the token ids of a file in one row, and a note about them."""
    notes: tuple[str, ...] = ()
    if path.suffix == ".npy":
        try:
            found = np.load(path, mmap_mode="r", allow_pickle=False)
        except Exception as error:  # truncated, pickled objects, or not a .npy file
            raise SpecError(
                f"{str(path)!r} is not an .npy file of token ids: write one with numpy.save(path, ids), ids an array of "
                "integers"
            ) from error
        if not isinstance(found, np.ndarray):
            raise SpecError(f"{str(path)!r} is an archive of arrays (.npz), not one: save the token ids by numpy.save")
        if not np.issubdtype(found.dtype, np.integer):
            raise SpecError(f"{str(path)!r} holds {found.dtype}, not token ids: save an array of integers")
        tokens: Tokens = found.reshape(-1)
        if found.ndim > 1:
            shape = " x ".join(map(str, found.shape))
            notes = (f"{shape} token ids, read row after row as one text of {tokens.size:,}",)
    else:
        if dtype not in ("uint16", "uint32"):
            raise SpecError(f"token dtype {dtype!r}: a .bin file holds uint16 or uint32")
        size, each = path.stat().st_size, np.dtype(dtype).itemsize
        if size % each:
            raise SpecError(f"{str(path)!r} has {size} bytes, which is not a whole number of {dtype} token ids")
        tokens = np.memmap(path, dtype=dtype, mode="r") if size else np.zeros(0, dtype)
    if not len(tokens):
        raise SpecError(f"{str(path)!r} holds no token ids")
    if np.issubdtype(tokens.dtype, np.signedinteger) and int(tokens.min()) < 0:
        raise SpecError(f"{str(path)!r} holds the negative number {int(tokens.min())}: token ids start at 0")
    return tokens, notes


def _documents(source: Path, extensions: tuple[str, ...], exclude: tuple[str, ...]) -> tuple[list[Path], int]:
    """Return the text files, in an order independent of the file system, and the number of other files."""
    if source.is_file():
        return ([source], 0) if _is_text(source) else ([], 1)
    found: list[Path] = []
    skipped = 0
    left_out = {"__pycache__", *exclude}
    for folder, folders, names in os.walk(source):
        folders[:] = sorted(
            name
            for name in folders
            if name not in left_out and not name.startswith(".") and not _is_run(Path(folder, name))
        )
        for name in sorted(names):
            path = Path(folder, name)
            if name.startswith(".") or (extensions and not name.endswith(extensions)):
                continue
            if _is_text(path):
                found.append(path)
            else:
                skipped += 1
    return found, skipped


def _is_run(folder: Path) -> bool:
    """Return True for the folder of a training run: what it writes must not become its own data when it resumes."""
    return all((folder / name).is_file() for name in ("settings.json", "metrics.jsonl"))


def _is_text(path: Path) -> bool:
    """Return True if a file can be read, is not empty, and starts with UTF-8 without zeros."""
    try:
        with path.open("rb") as file:
            start = file.read(_LOOK)
    except OSError:
        return False
    try:
        start.decode()
    except UnicodeDecodeError as error:
        if len(start) < _LOOK or error.start < len(start) - 3:  # an error at the very end is a character cut in two
            return False
    return bool(start) and b"\0" not in start


def _why_none(source: Path, extensions: tuple[str, ...], skipped: int) -> str:
    if source.is_file():
        return "it is empty or not UTF-8 text; a file of token ids is called .bin or .npy"
    endings = " or ".join(extensions)
    if skipped == 1:
        return f"its only file{f' that ends in {endings}' if endings else ''} is empty or not UTF-8 text"
    which = f" that end in {endings}" if endings else ""
    return f"its {skipped} files{which} are empty or not UTF-8 text" if skipped else f"it has no files{which}"


def _tokenise(
    source: Path,
    documents: list[Path],
    skipped: int,
    tokenizer: Tokenizer,
    cache: Path,
    validation: float,
    max_bytes: int | None,
    say: Callable[[str], None],
) -> Corpus:
    """Return the tokens from the cache; tokenise and write it if it is missing."""
    sizes = {path: path.stat().st_size for path in documents}
    order = sorted(documents, key=lambda path: key_of(str(path.relative_to(source))))
    if max_bytes is not None:
        order = order[: max(1, sum(1 for total in _sums([sizes[path] for path in order]) if total <= max_bytes))]
    print_of = blake2b(digest_size=8)
    stamps = [(str(path), sizes[path], path.stat().st_mtime_ns) for path in order]
    print_of.update(repr((tokenizer.name, tokenizer.vocab_size, validation, stamps)).encode())
    file = cache / f"tokens-{print_of.hexdigest()}.npy"
    total = sum(sizes[path] for path in order)
    known = _kept(file)
    if known is None:
        say(f"tokenising {_files(len(order))}, {format_bytes(total)}")
        cache.mkdir(parents=True, exist_ok=True)
        tokens, train_tokens = _encode(order, tokenizer, total, validation)
        known = _keep(file, tokens, {"train_tokens": train_tokens})
    notes = [f"{_files(len(order))} of text"]
    if skipped:
        notes.append(f"{_files(skipped)} skipped: empty or not UTF-8 text")
    if len(order) < len(documents):
        notes.append(f"{_files(len(documents) - len(order))} left out to stay within {format_bytes(max_bytes or 0)}")
    tokens, numbers = known
    return Corpus(tokens=tokens, train_tokens=numbers["train_tokens"], notes=tuple(notes))


def _records(
    parts: list[Part],
    tokenizer: Tokenizer,
    cache: Path,
    validation: float,
    column: str | None,
    max_bytes: int | None,
    say: Callable[[str], None],
) -> Corpus:
    """Return the tokens of records, from the cache if it has them."""
    stamps = [(str(f), f.stat().st_size, f.stat().st_mtime_ns, part.aside) for part in parts for f in part.files]
    told = (tokenizer.name, tokenizer.vocab_size, validation, column, max_bytes, stamps)
    stem = f"tokens-{blake2b(repr(told).encode(), digest_size=8).hexdigest()}"
    file = cache / f"{stem}.npy"
    known = _kept(file)
    if known is None:
        say(f"tokenising records of {_files(len(stamps))}, {format_bytes(sum(size for _, size, *_ in stamps))}")
        cache.mkdir(parents=True, exist_ok=True)
        found = [_encode_records(part, tokenizer, column, max_bytes) for part in parts]
        tokens: Tokens = np.concatenate([made for made, _ in found])
        if not len(tokens):
            raise SpecError(f"no text in {_files(len(stamps))} of records: {stamps[0][0] if stamps else 'none'}")
        aside = [len(made) for part, (made, _) in zip(parts, found, strict=True) if part.aside]
        train_tokens = len(tokens) - (sum(aside) if aside else int(validation * len(tokens)))
        numbers = {"train_tokens": train_tokens, "records": sum(count for _, count in found)}
        known = _keep(file, tokens, numbers)
    tokens, numbers = known
    notes = [f"{numbers['records']:,} records of {_files(len(stamps))}"]
    if any(part.aside for part in parts):
        notes.append("validated on the dataset's validation split")
    return Corpus(tokens=tokens, train_tokens=numbers["train_tokens"], notes=tuple(notes))


def _keep(file: Path, tokens: Tokens, numbers: dict[str, int]) -> tuple[Tokens, dict[str, int]]:
    """Write tokens and numbers to the cache, and return both read back from it."""
    write_atomically(file, lambda path: np.save(path, tokens))
    kept: Tokens = np.load(file, mmap_mode="r")
    told = {**numbers, "tokens": len(kept), "crc32": zlib.crc32(np.ascontiguousarray(kept).data)}
    write_atomically(file.with_suffix(".json"), lambda path: path.write_text(json.dumps(told)))
    return kept, told


def _kept(file: Path) -> tuple[Tokens, dict[str, int]] | None:
    """Return tokens and numbers from the cache; None if they are missing or damaged."""
    try:
        numbers = parse_json_object(file.with_suffix(".json").read_bytes())
        tokens: Tokens = np.load(file, mmap_mode="r", allow_pickle=False)
        counts = all(type(number) is int and number >= 0 for number in numbers.values())
        if not counts or tokens.ndim != 1 or not 0 <= numbers["train_tokens"] <= len(tokens):
            return None
        whole = numbers.get("tokens", len(tokens)) == len(tokens)
        sums = "crc32" not in numbers or numbers["crc32"] == zlib.crc32(np.ascontiguousarray(tokens).data)
        return (tokens, {"records": 0, **numbers}) if whole and sums else None
    except Exception:  # from the system, JSON or numpy: tokenise again
        return None


def _encode_records(part: Part, tokenizer: Tokenizer, column: str | None, max_bytes: int | None) -> tuple[Tokens, int]:
    """Return the tokens of some records, and their number; each ends with an end token unless they are lines of a text."""
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    end: Tokens = np.full(1, tokenizer.end, dtype)
    pieces: list[Tokens] = []
    lines: list[str] = []
    read = count = held = 0

    def flush() -> None:
        if lines:
            pieces.append(tokenizer.encode("".join(lines)).astype(dtype))
            lines.clear()

    for text in texts_of(part, column):
        count += 1
        if not text:
            continue
        read, held = read + len(text), held + len(text)
        lines.append(text)
        if not text.endswith("\n"):
            flush()
            pieces.append(end)
        elif held > _PIECE:
            flush()
        held = held if lines else 0
        if max_bytes is not None and read >= max_bytes:
            break
    if lines:
        flush()
        pieces.append(end)
    return np.concatenate(pieces) if pieces else np.zeros(0, dtype), count


def _encode(order: list[Path], tokenizer: Tokenizer, total: int, validation: float) -> tuple[Tokens, int]:
    """Return the tokens of all documents, and how many of them to train on."""
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    end: Tokens = np.full(1, tokenizer.end, dtype)
    pieces: list[Tokens] = []
    read, train_tokens = 0, None
    for path in order:
        if train_tokens is None and len(order) > 1 and read >= (1 - validation) * total:
            train_tokens = sum(map(len, pieces))
        text = path.read_text(encoding="utf-8", errors="replace")
        pieces.append(tokenizer.encode(text).astype(dtype))
        pieces.append(end)
        read += path.stat().st_size
    tokens: Tokens = np.concatenate(pieces)
    if train_tokens is None:  # one document, or the last one is too large for validation
        train_tokens = len(tokens) - int(validation * len(tokens))
    return tokens, train_tokens


def _sums(sizes: list[int]) -> Iterator[int]:
    total = 0
    for size in sizes:
        total += size
        yield total


def _files(count: int) -> str:
    return f"{count} file{'' if count == 1 else 's'}"
