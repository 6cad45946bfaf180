"""Text in records: what datasets saves, Arrow, Parquet and JSON lines give the same tokens as the text in a file."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshfold.data.corpus import Corpus, open_corpus
from meshfold.data.tokenizers import ByteTokenizer
from meshfold.mesh import SpecError

BYTES = ByteTokenizer()
TEXTS = ["one two", "", "three ü four", "five"]
needs_datasets = pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="needs meshfold[datasets]")


def tokens_of(path: Path, **settings: Any) -> Corpus:
    return open_corpus(path, BYTES, cache=path.parent / "cache", validation=0.0, **settings)


def assert_holds(found: Corpus, texts: list[str] = TEXTS) -> None:
    """Every document and an end behind it."""
    wanted = [token for text in texts if text for token in [*text.encode(), BYTES.end]]
    assert np.asarray(found.tokens).tolist() == wanted


def write(kind: str, root: Path) -> Path:
    if kind == "json lines":
        path = root / "data.jsonl"
        path.write_text("".join(json.dumps({"text": text, "n": 1}) + "\n" for text in TEXTS))
        return path
    import datasets

    made = datasets.Dataset.from_dict({"text": TEXTS, "n": [1, 2, 3, 4]})
    if kind == "parquet":
        made.to_parquet(str(root / "data.parquet"))
        return root / "data.parquet"
    made.save_to_disk(str(root / "saved"))
    return root / "saved" if kind == "saved" else next((root / "saved").glob("*.arrow"))


@pytest.mark.parametrize(
    "kind", ["json lines", *(pytest.param(k, marks=needs_datasets) for k in ("parquet", "arrow", "saved"))]
)
def test_every_form_gives_the_same_tokens(kind: str, tmp_path: Path) -> None:
    path = write(kind, tmp_path)
    said: list[str] = []
    found = tokens_of(path, say=said.append)
    assert_holds(found)
    assert found.notes == ("4 records of 1 file",)
    assert said[0].startswith("tokenising records of 1 file")
    assert_holds(tokens_of(path, say=said.append))  # from the cache
    assert len(said) == 1


@needs_datasets
def test_splits_of_a_saved_dictionary_are_used(tmp_path: Path) -> None:
    import datasets

    splits = {"train": ["a", "bb"], "validation": ["ccc"], "test": ["dddd"]}
    datasets.DatasetDict({k: datasets.Dataset.from_dict({"text": v}) for k, v in splits.items()}).save_to_disk(
        str(tmp_path / "saved")
    )
    found = open_corpus(tmp_path / "saved", BYTES, cache=tmp_path / "cache", validation=0.5)
    end = BYTES.end
    assert np.asarray(found.tokens).tolist() == [97, end, 98, 98, end, 99, 99, 99, end]
    assert found.validation_tokens == 4
    assert "validated on the dataset's validation split" in found.notes
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["test"]}')
    with pytest.raises(SpecError, match="has the splits test and no 'train'"):
        tokens_of(tmp_path / "saved")


def test_a_folder_of_records_and_its_parts(tmp_path: Path) -> None:
    for name, text in (("train-0", "a"), ("train-1", "b"), ("validation-0", "c"), ("test-0", "d")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": text}) + "\n\n")
    found = tokens_of(tmp_path)
    assert [token for token in np.asarray(found.tokens).tolist() if token != BYTES.end] == [97, 98, 99]
    assert found.validation_tokens == 2
    (tmp_path / "notes.txt").write_text("a text among them: the folder is one of text files")
    assert "5 files of text" in tokens_of(tmp_path).notes


def test_lines_of_one_text_are_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [" = A title = \n", "", "first line\n", "second line\n", "a document by itself", "next\n"]
    path = tmp_path / "wiki.jsonl"
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    for piece in (1 << 20, 12):
        monkeypatch.setattr("meshfold.data.corpus._PIECE", piece)
        found = open_corpus(path, BYTES, cache=tmp_path / str(piece), validation=0.0)
        assert_holds(found, ["".join(lines[:5]), lines[5]])


def test_the_field_with_the_text(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"body": "x", "n": 3}) + "\n")
    assert_holds(tokens_of(path), ["x"])  # the only one of strings
    path.write_text(json.dumps({"body": "x", "title": "yy"}) + "\n")
    assert_holds(tokens_of(path, text_column="title"), ["yy"])
    with pytest.raises(SpecError, match="has no field called 'text': its fields of text are body, title; say which"):
        tokens_of(path)
    with pytest.raises(SpecError, match=r"line 1: has no text under 'n', but body, title"):
        tokens_of(path, text_column="n")


def test_what_is_no_record_is_said(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "x"}\n[1]\n')
    with pytest.raises(SpecError, match=r"line 2: holds a list, not \{\.\.\.\}"):
        tokens_of(path)
    path.write_text('{"text": "x"\n')
    with pytest.raises(SpecError, match="line 1: is not JSON"):
        tokens_of(path)
    path.write_text("\n")
    with pytest.raises(SpecError, match=r"no text in 1 file of records: .*data\.jsonl"):
        tokens_of(path)


@needs_datasets
def test_a_damaged_table_is_said(tmp_path: Path) -> None:
    for name in ("data.parquet", "data.arrow"):
        (tmp_path / name).write_bytes(b"nothing of the kind")
        with pytest.raises(SpecError, match=f"{name}' cannot be read"):
            tokens_of(tmp_path / name)
