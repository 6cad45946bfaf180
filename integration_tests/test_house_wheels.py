"""Every distribution builds as a wheel, holds what it should, and works alone with only what it depends on."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import sysconfig
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from integration_tests.house import DISTRIBUTIONS, PACKAGES, ROOT, Package, bare
from integration_tests.markdown import write_script

each_package = pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)


@pytest.fixture(scope="session")
def wheelhouse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel of every package, built from the working tree."""
    folder = tmp_path_factory.mktemp("wheelhouse")
    for package in PACKAGES:
        run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)], cwd=package.folder)
    return folder


def run(command: list[str], *, cwd: Path, timeout: float = 240) -> str:
    """Run a command with no Python path of ours; what it printed. A failure shows all of it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        command,
        cwd=cwd,
        env=environment,
        text=True,
        timeout=timeout,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode:
        pytest.fail(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}", pytrace=False)
    return done.stdout


def wheel_of(package: Package, wheelhouse: Path) -> Path:
    stem = f"{package.distribution.replace('-', '_')}-{package.project['version']}"
    return wheelhouse / f"{stem}-py3-none-any.whl"


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


@each_package
def test_wheel_holds_the_package_and_nothing_else(package: Package, wheelhouse: Path) -> None:
    with zipfile.ZipFile(wheel_of(package, wheelhouse)) as archive:
        names = set(archive.namelist())
    info = f"{package.distribution.replace('-', '_')}-{package.project['version']}.dist-info"
    inside = {name for name in names if not name.startswith(f"{info}/")}
    expected = {
        path.relative_to(package.folder / "src").as_posix()
        for source in package.sources
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert inside == expected
    assert all(f"meshfold/{source.name}/py.typed" in inside for source in package.sources)
    assert "meshfold/__init__.py" not in inside
    assert f"{info}/licenses/LICENSE" in names


@each_package
def test_wheel_metadata(package: Package, wheelhouse: Path) -> None:
    metadata = metadata_of(wheel_of(package, wheelhouse))
    assert metadata["Name"] == package.distribution
    assert metadata["Version"] == package.project["version"]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    required = {bare(line) for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line}
    assert required == package.required
    assert "```python" in metadata.get_payload(), "the README with its example is the long description"


def link_dependencies(package: Package, into: Path) -> set[str]:
    """Put into a fresh environment what the package declares, with all that this needs, and nothing else.

    Links to what is installed here, so the test needs no network.

    Returns:
        The siblings that it needs, by name.
    """
    todo = [(Requirement(line), "") for line in package.project["dependencies"]]
    seen: set[tuple[str, str]] = set()
    while todo:
        requirement, of_extra = todo.pop()
        name = bare(requirement.name)
        if requirement.marker and not requirement.marker.evaluate({"extra": of_extra}):
            continue
        for extra in {"", *requirement.extras} - {extra for known, extra in seen if known == name}:
            seen.add((name, extra))
            if name in DISTRIBUTIONS:
                project = DISTRIBUTIONS[name].project
                lines = project["optional-dependencies"][extra] if extra else project["dependencies"]
                todo += [(Requirement(line), "") for line in lines]
            else:
                link(name, into)
                todo += [(Requirement(line), extra) for line in importlib.metadata.requires(name) or ()]
    return {name for name, _ in seen if name in DISTRIBUTIONS}


def link(name: str, into: Path) -> None:
    found = importlib.metadata.distribution(name)
    tops = {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}
    for top in tops:
        target = Path(str(found.locate_file(top)))
        if target.exists() and not (into / top).exists():
            (into / top).symlink_to(target)


def modules_of(package: Package) -> set[str]:
    """What it adds to ``meshfold``: meshfold-pipeline has ``sequence`` too."""
    return {path.name for path in (package.folder / "src" / "meshfold").iterdir() if (path / "__init__.py").exists()}


@pytest.mark.parametrize(
    "package",
    [
        # the one that needs least
        pytest.param(package, marks=() if package.name == "mesh" else pytest.mark.slow)
        for package in PACKAGES
    ],
    ids=lambda package: package.name,
)
def test_package_works_alone(package: Package, wheelhouse: Path, tmp_path: Path) -> None:
    """Installed by pip into an empty environment, it passes `pip check` and runs the example of its README."""
    environment = tmp_path / "environment"
    run([sys.executable, "-m", "venv", "--without-pip", str(environment)], cwd=tmp_path)
    python = str(environment / "bin" / "python")
    site = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    needed = link_dependencies(package, site)

    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    run([*pip, "install", "--no-index", "--find-links", str(wheelhouse), package.distribution], cwd=tmp_path)
    run([*pip, "check"], cwd=tmp_path)
    siblings = {path.name for path in (site / "meshfold").iterdir()}
    parts = [package, *(DISTRIBUTIONS[name] for name in needed)]
    assert siblings == {name for part in parts for name in modules_of(part)}

    readme = package.folder / "README.md"
    script = tmp_path / "example.py"
    write_script(readme.read_text(), script, bash=False)
    run([python, str(script)], cwd=tmp_path)

    # The console script of the wheel, if it has one, starts too.
    for command in package.project.get("scripts", {}):
        assert command in run([str(environment / "bin" / command), "--help"], cwd=tmp_path)


@pytest.mark.few(1)
@each_package
def test_source_distribution_holds_its_tests(package: Package, tmp_path: Path) -> None:
    run([sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)], cwd=package.folder)
    (archive,) = tmp_path.glob("*.tar.gz")
    names = run(["tar", "-tzf", str(archive)], cwd=tmp_path).splitlines()
    stem = archive.name.removesuffix(".tar.gz")
    for needed in (
        "pyproject.toml",
        "README.md",
        "CHANGELOG.md",
        "LICENSE",
        *(f"src/meshfold/{source.name}/py.typed" for source in package.sources),
    ):
        assert f"{stem}/{needed}" in names
    assert any(name.startswith(f"{stem}/tests/") for name in names)
    assert not [name for name in names if "__pycache__" in name]


def test_root_holds_no_package() -> None:
    assert "[project]" not in (ROOT / "pyproject.toml").read_text().splitlines()
