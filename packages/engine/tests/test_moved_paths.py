"""Import paths of version 0.1 give the modules of today."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from meshfold.engine.moved import MOVED, integration, today


@pytest.mark.parametrize("old", sorted(MOVED))
def test_an_old_path_is_the_module_of_today(old: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"{old} is now {MOVED[old]}: change the import"):
        found = importlib.import_module(old)
    assert found is importlib.import_module(MOVED[old])
    assert found.__spec__ is not None and found.__spec__.name == found.__name__ == MOVED[old]
    del sys.modules[old]


def test_names_and_submodules_have_old_paths_too(warm_python: str) -> None:
    code = (
        "from meshfold.engine.models.config import GPTConfig as a\n"
        "from meshfold.models.config import GPTConfig as b\n"
        "from meshfold.engine import planning\n"
        "import meshfold.planner\n"
        "assert a is b and planning is meshfold.planner\n"
        "from meshfold.engine import plan_memory, pretrained\n"
    )
    subprocess.run([warm_python, "-c", code], check=True, timeout=120)


def test_what_has_not_moved_is_left_alone() -> None:
    assert today("meshfold.engine.train_step") is None
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'meshfold\.engine\.nowhere'"):
        importlib.import_module("meshfold.engine.nowhere")


def test_a_package_that_is_not_installed_is_named() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"meshfold\.no_such is not installed: pip install meshfold-no-such"):
        integration("meshfold.no_such.module")
