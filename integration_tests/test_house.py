"""The rules of the house: who may import whom, what a package consists of, what an import costs."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement

from integration_tests.house import (
    APPLICATION,
    BANNED,
    DISTRIBUTIONS,
    PACKAGES,
    ROOT,
    SIBLINGS,
    TOP_LEVEL,
    Package,
    bare,
    closure,
    deep_imports,
    documented,
    formatter_comments,
    imports,
    imports_of,
    owner,
    private_uses,
    replaced,
    suspect_identifiers,
    tracked,
    undocumented,
    wrong_openings,
)
from meshfold.mesh import ParallelSpec
from meshfold.mesh.spec.parallel import Need, why_missing

# Files of meshfold.mesh that may import torch.distributed: communication, process groups, and the pool of test ranks.
DISTRIBUTED = ("collectives/issue.py", "collectives/operations.py", "collectives/push/gpu.py", "processes/", "testing/")

each_package = pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)


def breaches(package: str, found: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """The imports that the import rule forbids to a package."""
    allowed = SIBLINGS[package] | {package}
    return [
        (line, name)
        for line, name in found
        if name.split(".")[0] == "meshfold" and len(name.split(".")) > 1 and owner(name) not in allowed
    ]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import meshfold.engine", "meshfold.engine"),
        ("def f():\n    from meshfold.engine import Engine", "meshfold.engine"),
        ("from meshfold import engine", "meshfold.engine"),
        ("from ..engine import Engine", "meshfold.engine"),
        ("from ...meshfold import engine", "meshfold.engine"),
        (
            "import importlib\nimportlib.import_module('meshfold.train.demo')",
            "meshfold.train.demo",
        ),
        ("if TYPE_CHECKING:\n    import meshfold.engine as e", "meshfold.engine"),
    ],
)
def test_the_import_rule_sees_every_way_to_import(source: str, expected: str) -> None:
    found = imports(source, "meshfold.tensor_parallel.layers", is_package=False)
    assert expected in {name for _, name in breaches("tensor_parallel", list(found))}


def test_the_import_rule_lets_through_what_is_allowed() -> None:
    source = "import torch\nfrom meshfold.mesh import Mesh\nimport meshfold.kernels.norms\nfrom . import plan"
    found = list(imports(source, "meshfold.tensor_parallel.layers", is_package=False))
    assert (4, "meshfold.tensor_parallel.plan") in found
    assert breaches("tensor_parallel", found) == []


@each_package
def test_import_rule(package: Package) -> None:
    assert package.modules, f"{package.folder} holds no module"
    broken = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in package.modules
        for line, name in breaches(package.name, imports_of(path, package))
    ]
    assert not broken, "\n".join(broken)


def test_the_border_rule_sees_deep_imports() -> None:
    deep = "def f():\n    from meshfold.mesh.mesh import Mesh, Nothing\nimport meshfold.mesh.layout"
    found = {name: advice for _, name, advice in deep_imports(deep, "engine")}
    assert found["meshfold.mesh.mesh.Mesh"] == "write 'from meshfold.mesh import Mesh'"
    assert "no public folder of meshfold.mesh exports 'Nothing'" in found["meshfold.mesh.mesh.Nothing"]
    assert "meshfold.mesh.layout" in found
    assert list(deep_imports(deep, "mesh")) == []
    public = (
        "from meshfold.mesh import Mesh, collectives\nfrom meshfold.mesh.spec import ZeroSpec\nimport meshfold.mesh"
    )
    assert list(deep_imports(public, "engine")) == []


def test_siblings_are_imported_through_public_folders() -> None:
    """A sibling is imported by a name in the ``__all__`` of one of its package folders, never from a module behind it."""
    broken = [
        f"{path.relative_to(ROOT)}:{line} imports {name}: {advice}"
        for package in PACKAGES
        for path in package.modules
        for line, name, advice in deep_imports(path.read_text(), package.name)
    ]
    assert not broken, "\n".join(broken)


def test_the_private_rule_sees_uses() -> None:
    source = "engine._a\nself.engine._b\ntrainer.engine._c()\nengine.d._e\nengine.__doc__\nself._engine._f"
    assert sorted(private_uses(source)) == [(1, "_a"), (2, "_b"), (3, "_c"), (6, "_f")]


def test_nobody_uses_private_attributes_of_the_engine() -> None:
    folders = ("packages", "benchmarks", "experiments", "examples", "docs", "integration_tests")
    broken = [
        f"{path.relative_to(ROOT)}:{line} uses engine.{name}"
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, name in private_uses(path.read_text())
    ]
    assert not broken, "\n".join(broken)


def units_in_circles(edges: dict[str, set[str]]) -> set[str]:
    """Return the nodes of a graph that reach themselves."""

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        todo = [start]
        while todo:
            new = edges.get(todo.pop(), set()) - found
            found |= new
            todo += new
        return found

    return {unit for unit in edges if unit in reached(unit)}


@each_package
def test_folders_do_not_import_each_other_in_circles(package: Package) -> None:
    """The folders of a package, and the modules beside them, import one way, under TYPE_CHECKING too."""
    found: set[str] = set()
    for source in package.sources:
        root = f"meshfold.{source.name}"
        edges: dict[str, set[str]] = {}
        for path in source.rglob("*.py"):
            unit = path.relative_to(source).with_suffix("").parts[0]
            if unit in ("__init__", "__main__"):
                continue
            for line, name in imports_of(path, package):
                part = name.removeprefix(f"{root}.").split(".")[0]
                is_unit = (source / part).is_dir() or (source / f"{part}.py").is_file()
                assert is_unit or not name.startswith(f"{root}."), (
                    f"{path.relative_to(ROOT)}:{line} imports {name} from the root of its own package"
                )
                if name.startswith(f"{root}.") and part != unit:
                    edges.setdefault(unit, set()).add(part)
        found |= {unit for unit in units_in_circles(edges) if (source / unit).is_dir()}
    assert not found, f"{package.name}: these folders import each other in a circle: {sorted(found)}"


@each_package
def test_only_mesh_imports_torch_distributed(package: Package) -> None:
    broken = []
    for path in package.modules:
        [source] = [source for source in package.sources if path.is_relative_to(source)]
        if package.name == "mesh" and path.relative_to(source).as_posix().startswith(DISTRIBUTED):
            continue
        broken += [
            f"{path.relative_to(ROOT)}:{line} imports {name}"
            for line, name in imports_of(path, package)
            if f"{name}.".startswith("torch.distributed.")
        ]
        # `import torch` and then torch.distributed.all_reduce(...)
        text = path.read_text()
        if not re.search(r"\btorch\s*\.\s*distributed\b", text):  # parsing takes most of the time
            continue
        broken += [
            f"{path.relative_to(ROOT)}:{node.lineno} uses torch.distributed"
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Attribute)
            and node.attr == "distributed"
            and isinstance(node.value, ast.Name)
            and node.value.id == "torch"
        ]
    assert not broken, "\n".join(broken)


@each_package
def test_imports_are_declared(package: Package) -> None:
    """What a package imports is among its dependencies and extras, so that it installs alone."""
    known = sys.stdlib_module_names | {bare(name).replace("-", "_") for name in package.required | package.optional}
    missing = {
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in package.modules
        for line, name in imports_of(path, package)
        if name.split(".")[0] not in known | {"meshfold"}
    }
    assert not missing, "\n".join(sorted(missing))
    siblings = {
        owner(name)
        for path in package.modules
        for _, name in imports_of(path, package)
        if name.startswith("meshfold.") and owner(name) != package.name
    }
    named = package.required | package.optional  # a sibling that is imported when it is wanted may be an extra
    declared = {DISTRIBUTIONS[name].name for name in named if name in DISTRIBUTIONS}
    assert siblings <= declared


def test_docstrings_open_with_a_verb_or_a_noun() -> None:
    """Functions: an imperative verb. Classes and modules: a noun. None opens as a question does, no function's with a clause."""
    broken = [
        f"{path.relative_to(ROOT)}:{line}: {opening}"
        for package in PACKAGES
        for path in package.modules
        for line, opening in wrong_openings(path.read_text())
    ]
    assert not broken, "write what it does (a verb first) or is:\n" + "\n".join(broken)


def test_the_rule_of_openings_sees_questions_and_clauses() -> None:
    source = """class C:
    'Of one rank.'
    def f(self):
        'After a step: forget it.'
    @property
    def p(self):
        'True if it ran.'
    def g(self):
        'Forget it, after a step.'
"""
    assert list(wrong_openings(source)) == [(1, "Of one rank."), (3, "After a step: forget it.")]


def test_the_rule_of_docstrings_sees_what_has_none() -> None:
    source = """def f(): ...
def _g(): ...
class C:
    'Has size.'
    size = property()
    def forward(self): ...
    def known(self): ...
    def h(self): ...
"""
    assert list(undocumented(ast.parse(source), {"known"})) == [(1, "f"), (8, "C.h")]


@each_package
def test_public_names_are_documented(package: Package) -> None:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in package.modules}
    elsewhere = set[str]().union(*map(documented, trees.values()))
    missing = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path, tree in trees.items()
        for line, name in undocumented(tree, elsewhere)
    ]
    assert not missing, "write a docstring:\n" + "\n".join(missing)


def test_the_rule_of_words_sees_every_identifier() -> None:
    source = """import a.talk
def f(tape, *, x=1):
    return f(x.held_model, dear=tape)
class HeldModel: ...
untouched = 1"""
    found = [(line, replaced(name)) for line, name in suspect_identifiers(source) if replaced(name)]
    assert sorted(found) == [
        (1, "talk"),
        (2, "tape"),
        (3, "dear"),
        (3, "held_model"),
        (3, "tape"),
        (4, "held_model"),
        (5, "untouched"),
    ]
    for fine in ("absent_parameters", "ModeAroundModules", "talker", "endear", "master_weights"):
        assert replaced(fine) is None


def test_identifiers_use_the_words_of_the_glossary() -> None:
    """Words that were replaced do not return, in names of files or in them."""
    broken = [
        f"{path.relative_to(ROOT)}:{line}: {name}: write {BANNED[word]} instead of {word}"
        for package in PACKAGES
        for path in package.modules
        for line, name in [(1, path.stem), *suspect_identifiers(path.read_text(encoding="utf-8"))]
        if (word := replaced(name))
    ]
    assert not broken, "\n".join(broken)


def test_the_glossary_has_each_term_once() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    terms = [term.strip() for term in re.findall(r"^\| ([^|]+) \|", text, flags=re.MULTILINE)]
    terms = [term for term in terms if term != "term"]
    twice = {term for term in terms if terms.count(term) > 1}
    assert len(terms) > 50 and not twice, twice
    # a word with two meanings says in brackets of what it is, in each of its rows
    bare_terms = {term.partition(" (")[0]: term for term in terms if " (" in term}
    assert not set(bare_terms) & set(terms)


def test_files_hold_one_idea() -> None:
    """A file of more than 450 lines has several ideas; many files of a few lines have one idea between them."""
    lines = {
        path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for package in PACKAGES
        for path in package.modules
        if path.name != "__init__.py"
    }
    long = {path: count for path, count in lines.items() if count > 450}
    assert not long, f"split them by idea: {long}"
    short = sorted(path for path, count in lines.items() if count < 60)
    assert len(short) < 0.15 * len(lines), f"join those that are one idea: {short}"
    [step] = [count for path, count in lines.items() if path.endswith("/engine/train_step.py")]
    assert step <= 350, f"engine/train_step.py has {step} lines: a reader follows a step there from top to bottom"


def tracked_or_skipped(*patterns: str) -> list[str]:
    """Return the paths that git tracks and that match; a test is skipped where nothing says what they are."""
    paths = tracked(*patterns)
    if paths is None:
        pytest.skip("not a git checkout: nothing says which files belong to the repository")
    return paths


def test_nothing_in_the_root_by_mistake() -> None:
    """Outputs of examples (``adapter/``, ``checkpoint/``) were once committed: each entry of the root is listed."""
    paths = tracked_or_skipped()
    found = {path.partition("/")[0] for path in paths}
    new, gone = sorted(found - TOP_LEVEL), sorted(TOP_LEVEL - found)
    assert not new, f"{new}: remove what a command wrote, or list it in TOP_LEVEL of integration_tests/house.py"
    assert not gone, f"{gone}: not in the root any more, take it out of TOP_LEVEL of integration_tests/house.py"


def test_no_merge_was_left_half_done() -> None:
    """Both sides of a merge once stood in a page, between the marks that git wrote."""
    paths = tracked_or_skipped()
    marks = re.compile(rb"^(<{7}|>{7}) ", re.MULTILINE)
    found = [path for path in paths if (ROOT / path).is_file() and marks.search((ROOT / path).read_bytes())]
    assert not found, f"{found}: choose one side between <<<<<<< and >>>>>>>"


def test_the_rule_of_formatting_sees_comments_only() -> None:
    source = """x = 1  # fmt: skip
#fmt:off
y = "# fmt: off"
z = 2  # noqa: E501  # fmt: skip
# fmt: on, offhand"""
    assert list(formatter_comments(source)) == [1, 2, 4]


def test_the_formatter_is_never_turned_off() -> None:
    paths = tracked_or_skipped("*.py")
    assert len(paths) > 500
    broken = [
        f"{path}:{line}"
        for path in paths
        if (ROOT / path).is_file()
        for line in formatter_comments((ROOT / path).read_text(encoding="utf-8"))
    ]
    assert not broken, "write code that the formatter leaves readable:\n" + "\n".join(broken)


def test_meshfold_is_a_namespace() -> None:
    """PEP 420: a ``meshfold/__init__.py`` in one distribution would hide all the others."""
    roots = [path.as_posix() for path in ROOT.glob("packages/*/src/meshfold/__init__.py*")]
    assert roots == []
    strangers = [path.as_posix() for path in ROOT.glob("packages/*/src/*.py")]
    strangers += [path.as_posix() for path in ROOT.glob("packages/*/src/meshfold/*.py")]
    assert strangers == []


def test_every_folder_of_packages_is_known_here() -> None:
    folders = {path.parent.name for path in ROOT.glob("packages/*/pyproject.toml")}
    assert folders == set(SIBLINGS)
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert "$(wildcard packages/*/pyproject.toml)" in (ROOT / "Makefile").read_text()
    assert settings["ruff"]["src"] == ["packages/*/src"] and "packages/*/src" in settings["mypy"]["files"]
    assert set(settings["mypy"]["mypy_path"]) == {".", *(f"packages/{folder}/src" for folder in folders)}


def test_what_a_spec_can_ask_for_is_here() -> None:
    entries = dict(pipeline=2, sequence=dict(mode="ring", size=2), tensor=2, zero=dict(stage=1))
    asked = set(ParallelSpec.parse(entries).required_distributions())
    assert asked <= set(DISTRIBUTIONS)
    for distribution in asked:  # the folder that the refusal names
        assert DISTRIBUTIONS[distribution].folder.name in why_missing([Need("x", distribution, "x")])


@each_package
def test_what_a_package_consists_of(package: Package) -> None:
    assert all((source / "py.typed").is_file() for source in package.sources)
    assert package.name == APPLICATION or package.name in {source.name for source in package.sources}
    assert (package.folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert package.project["license"] == "Apache-2.0"
    assert "version" not in package.project.get("dynamic", []), "versions are static"
    version = package.project["version"]
    assert f"## {version}" in (package.folder / "CHANGELOG.md").read_text(), f"CHANGELOG.md has no entry for {version}"
    assert any(package.folder.glob("tests/**/test_*.py")), "no tests"


@each_package
def test_siblings_are_required_within_one_minor_version(package: Package) -> None:
    for text in package.project["dependencies"]:
        requirement = Requirement(text)
        if requirement.name in DISTRIBUTIONS:
            version = DISTRIBUTIONS[requirement.name].project["version"]
            assert requirement.specifier.contains(version), f"{text}, but the sibling is {version}"
            assert not requirement.specifier.contains("1.0"), f"{text} has no upper bound"


def test_everything_that_make_installs_is_pinned() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    pins = {bare(line): line.partition("==")[2] for line in lines}
    assert list(pins) == sorted(pins)
    assert all(re.fullmatch(r"[0-9][0-9A-Za-z.]*", version) for version in pins.values()), "a pin is name==version"
    assert pins["torch"] == "2.13.0"
    installed = closure([Requirement("meshfold[all,lint,test]"), Requirement("hatchling")]) - set(DISTRIBUTIONS)
    # torch's CUDA builds pin their own CUDA packages; pip itself comes with the environment
    installed = {name for name in installed if not name.startswith(("nvidia-", "cuda-"))}
    assert installed - set(pins) == set(), "make installs these, and constraints.txt does not pin them"


# What an import of meshfold.mesh must not load: heavy, or needed by few.
HEAVY = (
    "transformers",
    "lightning",
    "numba",
    "triton",
    "torch.distributed.tensor",
    "torch._dynamo",
    "matplotlib",
    "rich",
)

MEASURE = """
import json, sys
import torch
before = set(sys.modules)
import meshfold.mesh
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def test_import_of_mesh_is_light(torch_python: str) -> None:
    """On top of torch it loads few modules of ours, and of others only the standard library's and small ones of torch."""
    output = subprocess.run([torch_python, "-c", MEASURE], capture_output=True, text=True, check=True, timeout=120)
    loaded = json.loads(output.stdout)
    assert [name for name in loaded if f"{name}.".startswith(tuple(f"{module}." for module in HEAVY))] == []
    ours = [name for name in loaded if name.startswith("meshfold")]
    others = {name.partition(".")[0] for name in loaded} - {"meshfold", "torch"} - sys.stdlib_module_names
    assert not others and all(name.split(".")[:2] == ["meshfold", "mesh"] for name in ours if "." in name)
    torchs = [name for name in loaded if name.startswith("torch.")]
    assert 30 < len(ours) < 80 and len(torchs) < 10, (len(ours), torchs)
