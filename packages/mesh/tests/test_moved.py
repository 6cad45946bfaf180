"""Import paths of version 0.1."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

from meshfold.mesh.moved import MOVED


@pytest.mark.parametrize("name", sorted(MOVED))
def test_an_old_path_is_the_module_of_today(name: str) -> None:
    old, new = f"meshfold.mesh.{name}", f"meshfold.mesh.{MOVED[name]}"
    with pytest.warns(DeprecationWarning, match=f"{old} is now {new}: change the import"):
        found = import_module(old)
    assert found is import_module(new)
    assert found.__spec__ is not None and found.__spec__.name == found.__name__ == new
    del sys.modules[old]


def test_functions_keep_their_names_beside_old_paths(torch_python: str) -> None:
    code = (
        "from meshfold.mesh.process_group import start as a\n"
        "from meshfold.mesh import launch, metadata, process_group, start as b\n"
        "assert a is b is process_group.start and callable(launch) and callable(metadata)\n"
    )
    subprocess.run([torch_python, "-c", code], check=True, timeout=120)
