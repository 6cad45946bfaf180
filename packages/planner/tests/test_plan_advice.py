"""A plan that does not fit is a failure, with a change that makes it fit and was not made already."""

from __future__ import annotations

import json

import pytest

from meshfold.cli import main

MODEL = ["plan", "--model", "gpt-tiny", "--seq-len", "256", "--precision", "fp32"]


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What is said on standard error of a plan that does not fit."""
    assert main([*MODEL, *words]) == 1
    said = capsys.readouterr().err
    assert said.startswith("meshfold plan: it does not fit: ") and said.count("\n") == 1
    return said


def test_without_zero_too(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "--batch-size", "8", "--gpu-memory", "1MiB")
    assert "a rank holds " in said and "and a device of h200 has 1.00 MiB." in said
    assert main([*MODEL, "--batch-size", "8", "--gpu-memory", "1MiB", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["fits"] is False
    assert main([*MODEL, "--batch-size", "8"]) == 0


def test_recompute_is_told_where_it_helps_and_was_not_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert "With recompute='blocks' (--recompute blocks) it fits" in refused(
        capsys, "--batch-size", "16", "--gpu-memory", "25MiB"
    )
    said = refused(capsys, "--batch-size", "16", "--gpu-memory", "8MiB", "--recompute", "blocks")
    assert "recompute" not in said and "Split it over more ranks, take fewer tokens at once" in said
    assert "zero=dict(stage=3) would not do" in said
    said = refused(
        capsys, "--batch-size", "16", "--parallel", "zero.gpu_memory_limit=5MB", "--recompute", "blocks"
    )
    assert "recompute" not in said


def test_more_microbatches_are_told_where_they_help(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--batch-size", "16", "--parallel", "pipeline=2", "--gpu-memory"]
    said = refused(capsys, *words, "12MiB")
    assert "With pipeline.microbatches=" in said
    count = said.partition("pipeline.microbatches=")[2].split()[0]
    parallel = f"dict(pipeline=dict(size=2, microbatches={count}))"
    assert main([*MODEL, "--batch-size", "16", "--gpu-memory", "12MiB", "--parallel", parallel]) == 0
