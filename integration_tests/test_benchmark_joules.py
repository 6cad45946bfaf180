"""Benchmarks that print a list or a table of their own have joules and clocks where power was sampled, and none elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import push, reports, saving
from benchmarks.power import PowerLog
from meshfold.cli import main


class PowerOfAnyTime(PowerLog):
    """Reads 500 W and 1,500 MHz of each GPU."""

    def __enter__(self) -> PowerLog:
        return self

    def mean(self, begin: float, end: float, gpus: int) -> dict[str, float]:
        assert begin < end
        return {"watts": 500.0 * gpus, "mhz": 1500.0}


def test_collectives_have_joules_where_power_was_sampled() -> None:
    """2 ms at 1,000 W are 2 J; a case without samples has dashes."""
    result = json.loads((Path(reports.__file__).parent / "results" / "push.json").read_text())
    head = "| J, both; matmul alone | MHz |"
    assert head not in push.table(result)
    first = next(iter(result["cases"].values()))
    power = {"watts": 1000.0, "mhz": 1650.0, "milliseconds": 2.0}
    first["power"] = {"matmul": power | {"milliseconds": 1.5}, "push": power}
    titles, _, nccl, pushed, *_ = push.table(result).splitlines()
    assert titles.endswith(head) and nccl.endswith("| – | – |") and pushed.endswith("| 2.000; 1.500 | 1650 |")


def test_a_save_has_joules_where_power_was_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found.json"
    monkeypatch.setattr("benchmarks.saving.PowerLog", PowerOfAnyTime)
    few = ["--model", "llama-tiny", "--batch-size", "2", "--seq-len", "8", "--window", "2", "--rounds", "1"]
    assert main(["bench", "saving", *few, "--folder", str(tmp_path / "saves"), "--out", str(out)]) == 0
    found, said = json.loads(out.read_text()), capsys.readouterr().out
    ways = ("no save", "at once", "asynchronous")
    assert found["power"] == {way: {"watts": 500.0, "mhz": 1500.0} for way in ways} and found["tokens"] == 32
    spent = 500.0 * found["window_seconds"]["at once"]
    assert f"at once: {spent:,.1f} J in 2 steps and a save, {spent / 32:#.3g}".rstrip(".") in said
    assert "500 W, 1500 MHz" in said and "no save: " in said
    assert " W, " not in saving.table(found | {"power": {}})


def test_galore_has_joules_where_power_was_sampled(tmp_path: Path) -> None:
    """0.5 s at 600 W are 300 J of 2,048 tokens."""
    file = tmp_path / "galore.json"
    found = json.loads((Path(reports.__file__).parent / "results" / "galore.json").read_text())
    file.write_text(json.dumps(found | {"power": {"watts": 600.0, "mhz": 1700.0, "milliseconds": 500.0}}))
    assert main(["bench", "optimizers", "--case", "galore", "--report", str(file)]) == 0
    line = "- when clocks have settled: 0.50 s a step, 300.0 J a step, 0.146 J a token, 600 W, 1700 MHz"
    assert line in file.with_suffix(".md").read_text().splitlines()
