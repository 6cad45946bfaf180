"""Which implementation runs, who decides, and what importing costs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch._subclasses import FakeTensorMode

from meshfold import kernels as K
from meshfold.kernels import dispatch

F32 = torch.float32


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """No choice made yet in this process."""
    monkeypatch.setattr(dispatch, "_choice", None)
    monkeypatch.delenv(dispatch.ENVIRONMENT, raising=False)


def python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_is_light() -> None:
    code = (
        "import torch, sys; before = set(sys.modules); import meshfold.kernels, meshfold.kernels.dispatch as d; "
        "d.available(); print(sorted({m.split('.')[0] for m in set(sys.modules) - before} & "
        "{'numba', 'triton', 'transformers'}), [m for m in set(sys.modules) - before if m.startswith('torch._dynamo') "
        "or m.startswith('torch._inductor') or m.startswith('torch.distributed.tensor')])"
    )
    assert python(code) == "[] []"


def test_automatic_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dispatch.implementation("norms", "cpu", F32) == "reference"
    assert dispatch.implementation("masks", "cpu", F32) == "numba"
    monkeypatch.setattr(dispatch, "_installed", lambda package: True)
    assert dispatch.implementation("norms", "cuda", F32) == "triton"
    assert dispatch.implementation("norms", "cuda", torch.bfloat16) == "triton"
    assert dispatch.implementation("norms", "cuda", torch.float64) == "reference"
    assert dispatch.implementation("norms", "meta", F32) == "reference"
    monkeypatch.setattr(dispatch, "_installed", lambda package: False)
    assert dispatch.implementation("norms", "cuda", F32) == "reference"
    assert dispatch.implementation("masks", "cpu", F32) == "reference"


def test_use_lasts_as_a_call_and_ends_as_a_block() -> None:
    with K.use("reference"):
        assert dispatch.implementation("masks", "cpu", F32) == "reference"
        with K.use("numba"):
            assert dispatch.implementation("masks", "cpu", F32) == "numba"
            assert dispatch.implementation("norms", "cpu", F32) == "reference"  # it has no numba twin
        assert dispatch.choice() == "reference"
        K.use("numba")
        assert dispatch.choice() == "numba"
    assert dispatch.choice() == "auto"


def test_the_environment_chooses(unset: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(dispatch.ENVIRONMENT, "reference")
    assert dispatch.implementation("masks", "cpu", F32) == "reference"
    monkeypatch.setattr(dispatch, "_choice", None)
    monkeypatch.setenv(dispatch.ENVIRONMENT, "cuda")
    with pytest.raises(ValueError, match="MESHFOLD_KERNELS is 'cuda'; it must be one of 'auto', 'reference'"):
        K.rms_norm(torch.ones(2, 2), None)


def test_a_wrong_word_is_refused_and_changes_nothing() -> None:
    with pytest.raises(ValueError, match=r"given to use\(\) is 'fast'"):
        K.use("fast")
    assert dispatch.choice() == "auto"


def test_a_choice_that_cannot_be_is_an_error() -> None:
    if not torch.cuda.is_available():
        with K.use("triton"), pytest.raises(K.KernelError, match="'triton' was chosen, but"):
            K.rms_norm(torch.ones(2, 2), None)
    with K.use("numba"), pytest.raises(K.KernelError, match="numba kernels run on the CPU, not on cuda"):
        dispatch.implementation("masks", "cuda", F32)


def test_backward_runs_where_forward_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    from meshfold.kernels.masks import numba_kernels

    calls = []
    plain = numba_kernels.dropout

    def counted(*arguments: object) -> torch.Tensor:
        calls.append(1)
        return plain(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(numba_kernels, "dropout", counted)
    x = torch.ones(4, 4, requires_grad=True)
    with K.use("numba"):
        y = K.dropout(x, 0.5, 1, 2)
    with K.use("reference"):
        y.sum().backward()
    assert len(calls) == 2


def test_tensors_without_memory_take_the_reference() -> None:
    with FakeTensorMode():
        x = torch.ones(4, 8, requires_grad=True)
        y = K.dropout(K.swiglu(K.rms_norm(x, None)), 0.5, 1, 2)
        y.sum().backward()
        assert y.shape == (4, 4) and x.grad is not None
    assert K.layer_norm(torch.ones(4, 8, device="meta"), None, None).device.type == "meta"


def test_available_says_what_there_is() -> None:
    rows = {row.family: row for row in K.available()}
    assert set(rows) == set(dispatch.FAMILIES)
    for row in rows.values():
        assert row.implementations["reference"] == "ok" and row.cpu in ("reference", "numba")
        for name in row.kernels.replace(" and their pieces", "").replace(" and its pieces", "").split(", "):
            assert callable(getattr(K, name)), name
    assert rows["masks"].implementations["numba"] == "ok"
    assert set(rows["norms"].implementations) == {"reference", "triton"}
    if not torch.cuda.is_available():
        assert rows["norms"].implementations["triton"] in ("no CUDA device", "triton is not installed")
        assert rows["norms"].cuda == ""


def test_every_family_has_the_twins_that_the_table_says() -> None:
    """Each twin defines every function of the family's interface (Triton itself need not be there for the check)."""
    import ast
    from pathlib import Path

    root = Path(dispatch.__file__).parent

    def functions(file: Path) -> set[str]:
        return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}

    for family, (_, twins) in dispatch.FAMILIES.items():
        tree = ast.parse((root / family / "interface.py").read_text())
        wanted = {
            method.name
            for node in tree.body
            if isinstance(node, ast.ClassDef)
            for method in node.body
            if isinstance(method, ast.FunctionDef)
        }
        files = {file.stem.removesuffix("_kernels") for file in (root / family).glob("*_kernels.py")}
        assert wanted and files == set(twins), family
        for file in ("reference.py", *(f"{twin}_kernels.py" for twin in twins)):
            assert wanted <= functions(root / family / file), f"{family}/{file}"
