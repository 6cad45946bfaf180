"""An old torch is refused when the package is imported, with the command that installs another one."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from meshfold.mesh.torch_version import OLDEST, check_version


def test_an_old_torch_is_refused_at_the_import(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("__version__ = '2.3.1+cu121'\n")
    code = "import sys; sys.path.insert(0, sys.argv[1]); import meshfold.mesh"
    found = subprocess.run(
        [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, timeout=60, check=False
    )
    said = "ImportError: Meshfold needs torch 2.11 or later, and this environment has torch 2.3.1+cu121: pip install"
    assert found.returncode == 1 and found.stderr.splitlines()[-1].startswith(said), found.stderr


def test_versions() -> None:
    for fine in ("2.11.0", "2.11.0a0+git123", "2.13.0+cpu", "3.0.0", "from source"):
        check_version(fine)
    for old in ("2.10.1", "1.13.1+cpu"):
        with pytest.raises(ImportError, match=r"pip install --upgrade 'torch>=2\.11'"):
            check_version(old)
    written = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"torch>={OLDEST[0]}.{OLDEST[1]}" in written
