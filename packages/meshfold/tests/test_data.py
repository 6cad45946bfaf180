"""Text and token ids: what is read, how it is cut, and that nobody's order of batches depends on the spec."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from meshfold.data.corpus import Corpus, largest_id, open_corpus
from meshfold.data.rows import Batches
from meshfold.data.tokenizers import ByteTokenizer, load_tokenizer
from meshfold.engine.batches.sharding import shard_batch
from meshfold.mesh import SpecError

BYTES = ByteTokenizer()


def folder_of_text(root: Path) -> Path:
    """Ten documents in two folders, and things to leave out."""
    folder = root / "texts"
    (folder / "deep" / "deeper").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / "vendored").mkdir()
    for number in range(10):
        place = folder if number % 2 else folder / "deep" / "deeper"
        (place / f"{number}.txt").write_text(f"document {number}: " + "grüße " * (20 + number))
    (folder / "picture.txt").write_bytes(b"\x89PNG\0\0\0\xff\xfe")
    (folder / "latin.txt").write_bytes("grüße".encode("latin-1"))
    (folder / "empty.txt").write_text("")
    (folder / "notes.md").write_text("another extension")
    (folder / ".git" / "hidden.txt").write_text("never read")
    (folder / "vendored" / "other.txt").write_text("left out by name")
    return folder


def corpus_of(tokens: int, train: int | None = None) -> Corpus:
    return Corpus(tokens=np.arange(tokens), train_tokens=tokens if train is None else train)


def test_a_folder_becomes_documents_with_an_end_each(tmp_path: Path) -> None:
    folder = folder_of_text(tmp_path)
    found = open_corpus(
        folder,
        BYTES,
        cache=tmp_path / "cache",
        validation=0.2,
        extensions=(".txt",),
        exclude=("vendored",),
    )
    texts = BYTES.decode([int(i) if i != BYTES.end else 0 for i in found.tokens]).split("\0")[:-1]
    assert sorted(texts) == sorted(path.read_text() for path in folder.rglob("[0-9].txt"))
    assert found.notes == ("10 files of text", "3 files skipped: empty or not UTF-8 text")
    assert found.tokens[found.train_tokens - 1] == BYTES.end, "a document was cut in two"
    assert 0.1 < found.validation_tokens / len(found.tokens) < 0.35


def test_the_cache_is_used_until_a_file_changes(tmp_path: Path) -> None:
    folder, said = folder_of_text(tmp_path), []
    for _ in range(2):
        first = open_corpus(folder, BYTES, cache=tmp_path / "cache", say=said.append)
    assert len(said) == 1 and said[0].startswith("tokenising 12 files")
    (folder / "1.txt").write_text("something else")
    second = open_corpus(folder, BYTES, cache=tmp_path / "cache", say=said.append)
    assert len(said) == 2
    assert len(second.tokens) < len(first.tokens)
    assert not list((tmp_path / "cache").glob(".*")), "parts of files were left"


def test_reading_stops_at_the_bytes_allowed(tmp_path: Path) -> None:
    found = open_corpus(folder_of_text(tmp_path), BYTES, cache=tmp_path / "cache", max_bytes=500)
    assert len(found.tokens) <= 510
    assert "files left out to stay within 500 B" in found.notes[-1]


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_raw_token_files(dtype: str, tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(60000, size=1000)
    ids.astype(dtype).tofile(tmp_path / "ids.bin")
    np.save(tmp_path / "ids.npy", ids.reshape(10, 100))
    for name in ("ids.bin", "ids.npy"):
        found = open_corpus(tmp_path / name, None, cache=tmp_path, validation=0.1, token_dtype=dtype)
        np.testing.assert_array_equal(found.tokens, ids)
        assert (found.train_tokens, found.validation_tokens) == (900, 100)
        assert largest_id(found) == ids.max()
        flat = ("10 x 100 token ids, read row after row as one text of 1,000",)
        assert found.notes == (flat if name == "ids.npy" else ())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing", None, "no file or folder"),
        ("odd.bin", b"abc", "3 bytes, which is not a whole number of uint16"),
        ("empty.bin", b"", "holds no token ids"),
        ("bad.npy", b"not an array", r"bad\.npy' is not an \.npy file of token ids: write one with numpy\.save"),
        ("cut.npy", b"\x93NUMPY\x01", "is not an .npy file of token ids"),
        ("none.npy", b"", "is not an .npy file of token ids"),
        ("objects.npy", np.array([1, "a"], dtype=object), "is not an .npy file of token ids"),
        ("archive.npy", b"PK\x05\x06" + bytes(18), "is an archive of arrays"),
        ("floats.npy", np.zeros(3), "holds float64, not token ids"),
        ("negative.npy", np.array([1, -2]), "negative number -2"),
        ("picture", b"\x89PNG\0", "empty or not UTF-8 text"),
        ("empty.txt", b"", "empty or not UTF-8 text"),
    ],
)
def test_what_cannot_be_read_is_said(
    name: str, content: bytes | np.ndarray | None, message: str, tmp_path: Path
) -> None:
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    elif content is not None:
        np.save(tmp_path / name, content)
    with pytest.raises(SpecError, match=message):
        open_corpus(tmp_path / name, BYTES, cache=tmp_path / "cache")


def test_runs_in_the_folder_of_their_text_are_left_out(tmp_path: Path) -> None:
    root = tmp_path / "texts"
    (root / "run").mkdir(parents=True)
    (root / "text.txt").write_text("a few words of one's own")

    def length() -> int:
        return len(open_corpus(root, BYTES, cache=tmp_path / "cache", validation=0).tokens)

    before = length()
    (root / "run" / "settings.json").write_text("{}")
    assert length() > before  # a folder like any other
    (root / "run" / "metrics.jsonl").write_text("{}")
    assert length() == before


def test_a_folder_without_text_is_said(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(SpecError, match=r"it has no files that end in \.py or \.md"):
        open_corpus(tmp_path / "a", BYTES, cache=tmp_path / "cache", extensions=(".py", ".md"))
    (tmp_path / "a" / "picture.py").write_bytes(b"\0")
    with pytest.raises(SpecError, match=r"its only file that ends in \.py is empty or not"):
        open_corpus(tmp_path / "a", BYTES, cache=tmp_path / "cache", extensions=(".py",))
    (tmp_path / "a" / "empty.py").write_bytes(b"")
    with pytest.raises(SpecError, match=r"its 2 files that end in \.py are empty or not"):
        open_corpus(tmp_path / "a", BYTES, cache=tmp_path / "cache", extensions=(".py",))
    (tmp_path / "text").write_text("some text")
    with pytest.raises(SpecError, match="needs a tokenizer"):
        open_corpus(tmp_path / "text", None, cache=tmp_path / "cache")


def test_an_epoch_has_every_window_once_and_epochs_differ() -> None:
    corpus, length = corpus_of(1000, train=803), 10
    batches = Batches(corpus, batch_size=4, seq_len=length, seed=3)
    assert batches.windows == 79
    rows = torch.cat([batches.batch(step) for step in range(79)])  # four epochs of 79 rows
    epochs = rows.view(4, 79, length)
    for epoch in epochs:
        starts = epoch[:, 0].sort().values
        assert (starts.diff() == length).all() and 0 <= starts[0] < length
        assert epoch.max() < 803, "validation leaked into training"
        assert (epoch == epoch[:, :1] + torch.arange(length)).all()
    assert len({tuple(epoch[:, 0].tolist()) for epoch in epochs}) == 4


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    corpus = corpus_of(5000)
    first = Batches(corpus, batch_size=8, seq_len=16, seed=1)
    late = Batches(corpus, batch_size=8, seq_len=16, seed=1).batch(50)
    assert torch.equal(first.batch(50), late)
    assert not torch.equal(first.batch(50), Batches(corpus, batch_size=8, seq_len=16, seed=2).batch(50))
    # the same rows, whatever the number of rows a step
    by_fours = Batches(corpus, batch_size=4, seq_len=16, seed=1)
    assert torch.equal(first.batch(3), torch.cat([by_fours.batch(6), by_fours.batch(7)]))


@pytest.mark.parametrize("blocks", [1, 2, 3, 4])
def test_data_coordinates_share_a_batch_without_loss(blocks: int) -> None:
    batch = Batches(corpus_of(5000), batch_size=8, seq_len=16).batch(5)
    assert torch.equal(torch.cat([shard_batch(batch, index, blocks) for index in range(blocks)]), batch)


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(2, 4),
        {"x": torch.zeros(2, 4), "y": torch.zeros(2)},
        (torch.zeros(2, 4), torch.zeros(2)),
        ((torch.zeros(2, 4), torch.zeros(2, 4)), torch.zeros(2)),
    ],
    ids=["tensor", "dict", "pair", "pair of several"],
)
def test_too_few_rows_are_refused_on_every_rank(batch: object) -> None:
    for index in range(3):
        with pytest.raises(SpecError, match=r"2 rows for 3 data ranks, .* give at least 3 rows"):
            shard_batch(batch, index, 3)


def test_validation_is_what_was_set_aside() -> None:
    batches = Batches(corpus_of(1000, train=900), batch_size=4, seq_len=16)
    found = list(batches.validation(10))
    assert [len(batch) for batch in found] == [4, 2]
    assert torch.cat(found).min() == 900
    assert len(list(batches.validation(1))) == 1
    assert list(Batches(corpus_of(1000, train=990), batch_size=4, seq_len=16).validation(5)) == []


def test_too_few_tokens_are_refused() -> None:
    with pytest.raises(
        SpecError,
        match=r"100 tokens are too few to train on, .* it takes 143 at least; use more text, --batch-size 5 or --seq-len 11",
    ):
        Batches(corpus_of(100), batch_size=8, seq_len=16)
    with pytest.raises(SpecError, match="142 tokens are too few"):
        Batches(corpus_of(142), batch_size=8, seq_len=16)
    assert Batches(corpus_of(143), batch_size=8, seq_len=16).batch(0).shape == (8, 16)
    with pytest.raises(SpecError, match="1 token is too few to train on, for a batch of 1 window of 4: it takes 7"):
        Batches(corpus_of(1), batch_size=1, seq_len=4)


def test_bytes_there_and_back() -> None:
    text = "def grüße():\n    return '☃'\n"
    ids = BYTES.encode(text)
    assert ids.max() < 256 and BYTES.decode([*map(int, ids), BYTES.end]) == text
    assert BYTES.decode([0xE2, 0x98]) == "\N{REPLACEMENT CHARACTER}"


def test_a_hugging_face_tokenizer_from_a_folder(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs meshfold[hf]")
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<eos>": 0, "<unk>": 1, "def": 2, "return": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", unk_token="<unk>").save_pretrained(
        tmp_path / "words"
    )
    found = load_tokenizer(str(tmp_path / "words"))
    assert (found.vocab_size, found.end) == (4, 0)
    assert found.encode("def x return").tolist() == [2, 1, 3]
    assert found.decode([2, 3, 0]) == "def return"
    (tmp_path / "file.txt").write_text("return def")
    tokens = open_corpus(tmp_path / "file.txt", found, cache=tmp_path / "cache", validation=0).tokens
    assert tokens.tolist() == [3, 2, 0] and tokens.dtype == np.uint16


def test_no_tokenizer_in_a_folder(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="there is no such folder"):
        load_tokenizer(str(tmp_path / "nowhere"))
    pytest.importorskip("transformers", reason="needs meshfold[hf]")
    with pytest.raises(SpecError, match="has no tokenizer files"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(SpecError, match="transformers finds none there"):
        load_tokenizer(str(tmp_path))
