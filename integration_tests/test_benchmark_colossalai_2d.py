"""Colossal-AI's legacy 2D in the benchmark of tensor parallelism: measured where it is installed, elsewhere absent."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.peers.absent import AbsentError
from benchmarks.peers.colossalai_2d import Grid, Normalized
from benchmarks.tensor_parallel import report
from benchmarks.wheels import unpacked
from meshfold.cli import main
from meshfold.mesh.testing import run_on_ranks


@pytest.mark.usefixtures("warm_commands")
def test_it_is_measured_or_said_to_be_absent(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    asked = ["--only", "2d by stream,Colossal-AI 2D", "--out", str(out)]
    assert main(["bench", "tensor-parallel", "--ranks", "4", "--tiny", *asked]) == 0
    found = json.loads(out.read_text())
    assert found["settings"]["hidden"] == 32 and "tiny" not in found["settings"]
    if importlib.util.find_spec("colossalai") is None:
        [note] = found["notes"].values()
        assert note.startswith(
            "could not run: AbsentError: colossalai is not installed: give --wheels of colossalai 0.5.0 "
        )
        assert "2d by stream" in found["milliseconds"]
    else:
        assert found["notes"] == {} and "Colossal-AI 2D" in found["milliseconds"]
        assert found["relative_error"]["Colossal-AI 2D"] < 1e-5


def test_ranks_that_are_no_square_are_refused() -> None:
    with pytest.raises(ValueError, match="6 ranks: Colossal-AI's 2D takes a square number of ranks, as 4"):
        Grid(6)


def test_a_package_that_lacks_the_layers_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "colossalai").mkdir()
    (tmp_path / "colossalai" / "__init__.py").write_text("raise RuntimeError('its own imports are not wanted')")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "colossalai"}
    for name in before:
        monkeypatch.delitem(sys.modules, name)
    try:
        with pytest.raises(AbsentError, match=r"parallel_2d.*give --wheels of colossalai 0\.5\.0"):
            Grid(4)
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "colossalai"]:
            del sys.modules[name]
        sys.modules.update(before)


def _norm(split: bool) -> list[Tensor]:
    """The normalised rows and the input's gradient: of a rank's columns, or of all by torch."""
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(2, 3, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    rank = dist.get_rank() if split else 0
    x, grad = (t.chunk(2 if split else 1, -1)[rank].contiguous() for t in (x, grad))
    x.requires_grad_()
    if split:
        y: Tensor = Normalized.apply(x, 8, 1e-5, dist.GroupMember.WORLD)  # type: ignore[no-untyped-call]
    else:
        y = nn.functional.rms_norm(x, (8,), eps=1e-5)
    y.backward(grad)
    assert x.grad is not None
    return [y.detach(), x.grad]


def test_a_row_over_two_ranks_is_normalised_as_torch_does() -> None:
    parts = run_on_ranks(2, _norm, True)
    for found, wanted in zip(zip(*parts, strict=True), _norm(False), strict=True):
        torch.testing.assert_close(torch.cat(found, -1), wanted, rtol=1e-12, atol=1e-12)


def test_the_bar_is_twice_as_fast() -> None:
    times = {"2d": [2.0, 2.0], "2d compiled": [1.0, 1.0], "Colossal-AI 2D": [1.9, 1.9]}
    found = dict(settings=dict(report.JUDGED, ranks=4, batch=4, seq_len=4096), milliseconds=times)
    [line] = report.bars(found)
    assert line.endswith("1.900 (bar 2): **not met**") and "(2d compiled)" in line
    times["Colossal-AI 2D"] = [2.1, 2.1]
    [line] = report.bars(found)
    assert line.endswith("2.100 (bar 2): met")


def test_wheels_are_imported_by_this_process_and_those_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "kept")
    wheel = tmp_path / "peer_of_a_test-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("peer_of_a_test.py", "")
    with unpacked([wheel]):
        found = importlib.util.find_spec("peer_of_a_test")
        assert found is not None and found.origin is not None
        assert os.environ["PYTHONPATH"] == os.pathsep.join([str(Path(found.origin).parent), "kept"])
    assert importlib.util.find_spec("peer_of_a_test") is None and os.environ["PYTHONPATH"] == "kept"
