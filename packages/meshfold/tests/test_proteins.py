"""Sequences and FASTA files: what is read, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshfold.data.proteins import Protein, ProteinError, parse_chains, read_fasta, unique_names


def test_chains_are_parsed() -> None:
    assert parse_chains("ac de\nX*", "it") == ("ACDEX",)
    assert parse_chains("ACD:EFG : HIK", "it") == ("ACD", "EFG", "HIK")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "it: it is empty: give amino acids"),
        ("ACD:", "it: chain 2 is empty: give amino acids"),
        ("AC1D", "it: '1' at position 3 is no amino acid. Letters are ACDEFGHIKLMNPQRSTVWY, and X for an unknown one"),
        ("AC:DEU", r"it: 'U' at position 3 of chain 2 is no amino acid \(selenocysteine: write C\)"),
        ("AC-D", r"'-' at position 3 is no amino acid \(a gap: give sequences without an alignment\)"),
        ("A" * 10000, "it: 10000 residues: a PDB file numbers at most 9999 in a chain"),
        (":".join("A" * 63), "it: 63 chains: a PDB file names at most 62"),
    ],
)
def test_what_cannot_be_folded_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(ProteinError, match=sentence):
        parse_chains(text, "it")


def test_a_fasta_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "proteins.fasta"
    file.write_text("\n;a comment\n>sp|P1|A the first\nACD\nEFG\n\n>two\nac:de*\n>Two\nX\n>\nW\n")
    assert read_fasta(file) == [
        Protein("sp_P1_A", ("ACDEFG",)),
        Protein("two", ("AC", "DE")),
        Protein("Two-2", ("X",)),
        Protein("protein4", ("W",)),
    ]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "no protein in it: write >my_protein in a line"),
        ("\n\n", "no protein in it"),
        ("ACDE\n", "line 1: a name comes first, in a line of its own"),
        (">a\n>b\nAC\n", "line 1, 'a': it is empty"),
        (">a\nAC\n>b\nA\nCZ\n", r"line 3, 'b': 'Z' at position 3 is no amino acid \(E or Q: write one of them\)"),
    ],
)
def test_a_fasta_file_that_cannot_be_folded_is_refused(text: str, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "proteins.fasta"
    file.write_text(text)
    with pytest.raises(ProteinError, match=sentence):
        read_fasta(file)


def test_all_wrong_proteins_of_a_file_are_named(tmp_path: Path) -> None:
    file = tmp_path / "proteins.fasta"
    file.write_text(">a\nAB\n>b\nAC\n" + ">c\n1\n" * 9)
    with pytest.raises(ProteinError) as raised:
        read_fasta(file)
    lines = str(raised.value).splitlines()
    assert "line 1, 'a': 'B' at position 2" in lines[0] and "line 5, 'c': '1' at position 1" in lines[1]
    assert len(lines) == 9 and lines[-1] == "and 2 more of its proteins"


def test_names_differ_in_more_than_capitals() -> None:
    assert unique_names(["a", "A-2", "A", "a", "A-2"]) == ["a", "A-2", "A-3", "a-4", "A-2-2"]


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "proteins.fasta"
    file.write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(ProteinError, match="it is not a text file"):
        read_fasta(file)
