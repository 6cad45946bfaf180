"""Every block of code in the documentation runs, and prints what the page says.

A page is one script: its Python blocks share a namespace, in order, in a process and a folder of their own. A bash
block runs where ``<!-- run -->`` stands before it; a Python block is left out where ``<!-- no-run: reason -->`` does.
"""

from __future__ import annotations

import ast
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from docs.refresh import outputs, tidy

from integration_tests.house import PACKAGES, ROOT, Package, absent_alone
from integration_tests.markdown import blocks, write_script
from integration_tests.page_server import PageServer
from integration_tests.warm_python import WarmPython

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(package.folder / "README.md" for package in PACKAGES),
    *sorted((ROOT / "docs").rglob("*.md")),
]
# Anything else behind a fence is a slip: `py`, `pycon` or `sh` would never run.
LANGUAGES = {"", "python", "bash", "diff", "text", "toml", "json", "mermaid"}
TIMEOUT = 540.0

SLOW = {
    "choosing.md",
    "command-line.md",
    "finetune-opt.md",
    "long-runs.md",
    "multi-node.md",
    "pipeline.md",
    "ray-and-trainer.md",
    "sequence.md",
    "testing.md",
    "training.md",
    "zero-fit.md",
    "zero-optimizers.md",
    "zero-plan.md",
}
"""Pages that start many processes or plan large models; what they show has quick tests of its own, and `make test-all` runs them"""

each_page = pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.slow if page.name in SLOW else ()) for page in PAGES],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)


COLUMNS = 88
"""Width that half a laptop's screen shows without scrolling; output may be wider"""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_code_is_narrow(page: Path) -> None:
    code = [block for block in blocks(page.read_text(encoding="utf-8")) if block.language not in {"", "text"}]
    wide = [
        f"line {block.line + number}: {len(row)} columns"
        for block in code
        for number, row in enumerate(block.code.splitlines())
        if len(row) > COLUMNS
    ]
    assert not wide, f"code is at most {COLUMNS} columns wide: {wide}"


RunScript = Callable[..., tuple[str, str]]


@pytest.fixture
def run_script(warm: WarmPython) -> RunScript:
    """Runs a script in a process of its own: how it ended, and all it printed."""
    return PageServer(warm).run


@each_page
def test_page_runs_and_prints_what_it_shows(page: Path, tmp_path: Path, run_script: RunScript) -> None:
    """Printed text to the letter for the blocks of Python that promise it; else to the letter but for its numbers."""
    text = page.read_text(encoding="utf-8")
    known = blocks(text)
    strange = [f"line {block.line}: {block.language}" for block in known if block.language not in LANGUAGES]
    assert not strange, f"unknown languages: {strange}"
    code = [block for block in known if block.runs]
    exact = [output for output in outputs(text) if output.exact]
    assert all(code[output.source].language == "python" for output in exact), "bash promises no output"
    if not code:
        return
    script = tmp_path / f"{page.stem}.py"
    write_script(text, script, watched=True)
    alone = [package for package in PACKAGES if page == package.folder / "README.md"]
    if alone:
        hide(absent_alone(alone[0]), script)
    how, shown = run_script(script, timeout=TIMEOUT)
    if how:
        pytest.fail(f"{page.relative_to(ROOT)} (line numbers are the page's own) {how}:\n{shown}", pytrace=False)
    everything = _lines(tidy(shown))
    for output in outputs(text):
        if not output.exact and not output.reason.startswith("it depends"):
            missing = [row for row in _lines(output.text) if row not in everything]
            assert not missing, f"line {output.first}: run python docs/refresh.py; not printed: {missing}"
    for output in exact:
        printed = (tmp_path / f"printed.{output.source}").read_text(encoding="utf-8")
        assert output.text == tidy(printed), f"line {output.first}: run python docs/refresh.py"


def hide(modules: list[str], script: Path) -> None:
    """Let a script run as if modules of Meshfold were not installed: ``import`` and ``find_spec`` do not find them.

    Packages build on less than is installed here. That a wheel installs alone takes a minute and is in ``make test-all``.
    """
    rows = script.read_text(encoding="utf-8").splitlines()
    assert not rows[0], "a README opens with its title"
    loaded = "[name for name in sys.modules if name.startswith('meshfold.')]"
    rows[0] = (
        f"import sys; [sys.modules.pop(name) for name in {loaded}]; sys.modules.update(dict.fromkeys({modules!r}))"
    )
    script.write_text("\n".join(rows) + "\n", encoding="utf-8")


def _lines(text: str) -> list[str]:
    """Return the lines of a text with a # for each number, and one blank where there were several."""
    return [" ".join(re.sub(r"[-+]?\d[\d.,:e+-]*", "#", row).split()) for row in text.splitlines()]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_readme_starts_with_a_short_example(package: Package) -> None:
    first = next((block for block in blocks((package.folder / "README.md").read_text()) if block.runs), None)
    assert first is not None, "no block of Python"
    assert first.language == "python"
    statements = [node for node in ast.walk(ast.parse(first.code)) if isinstance(node, ast.stmt)]
    assert len(statements) <= 10, f"the example has {len(statements)} statements"
    assert any(f"meshfold.{source.name}" in first.code for source in package.sources)


CONCEPTS = (
    "checkpoints choosing composition hugging-face kernels layouts-and-algebra long-runs mesh-and-spec modes/README parallelize "
    "pipeline random-numbers sequence training zero zero-chunks zero-disk zero-optimizers zero-plan"
)


@pytest.mark.parametrize("name", CONCEPTS.split())
def test_a_concept_starts_with_a_short_example(name: str) -> None:
    found = blocks((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8"))
    assert found[0].language == "python" and found[0].runs
    assert len(found[0].code.splitlines()) < 15


PAGE = """\
# A page

```python
import sys
a = 1
```

- in a list

  <!-- run -->
  ```bash
  echo "from bash" > out.txt
  ```

```python
text = open("out.txt").read()
assert a == 1
assert text == "from bash\\n"
print("read", text)
```

<!-- no-run: needs eight GPUs -->
```python
raise SystemExit("never")
```

```bash
exit 3
```

```text
not code
```
"""


def test_the_harness_reads_a_page() -> None:
    found = blocks(PAGE)
    assert [(block.language, block.mark, block.runs) for block in found] == [
        ("python", "", True),
        ("bash", "run", True),
        ("python", "", True),
        ("python", "no-run", False),
        ("bash", "", False),
        ("text", "", False),
    ]
    assert found[1].code == 'echo "from bash" > out.txt'
    assert found[3].reason == "needs eight GPUs"
    assert all(PAGE.splitlines()[block.line - 1].strip() == block.code.splitlines()[0] for block in found)


def test_the_harness_runs_a_page(tmp_path: Path, run_script: RunScript) -> None:
    script = tmp_path / "page.py"
    write_script(PAGE, script, watched=True)
    assert run_script(script, timeout=TIMEOUT) == ("", "read from bash\n\n")
    printed = [(tmp_path / f"printed.{number}").read_text() for number in range(3)]
    assert printed == ["", "", "read from bash\n\n"]


@pytest.mark.parametrize(
    ("page", "line", "message"),
    [
        ("# A\n\n```python\nx = 1\n\ny = missing\n```\n", 6, "NameError"),
        ("# A\n\n<!-- run -->\n```bash\nexit 3\n```\n", 5, "exit status 3"),
        ("# A\n\n<!-- run -->\n```bash\nfalse\ntrue\n```\n", 5, "exit status 1"),
    ],
)
def test_a_broken_page_fails_at_its_own_line(
    page: str, line: int, message: str, tmp_path: Path, run_script: RunScript
) -> None:
    script = tmp_path / "page.py"
    write_script(page, script, watched=True)
    how, output = run_script(script, timeout=TIMEOUT)
    assert how == "ended with 1"
    assert f'page.py", line {line}' in output
    assert message in output


def test_pages_know_nothing_of_each_other(tmp_path: Path, run_script: RunScript) -> None:
    pages = [
        "```python\nimport os, sys, torch\nsys.left = os.environ['LEFT'] = 'behind'\ntorch.set_default_dtype(torch.float64)\n"
        "import atexit\natexit.register(print, 'at the end')\n```\n",
        "```python\nimport os, sys\nassert not hasattr(sys, 'left') and 'LEFT' not in os.environ\n"
        "import torch\nprint(torch.get_default_dtype(), __name__, sys.argv[0] == __file__)\n```\n",
    ]
    said = []
    for number, page in enumerate(pages):
        script = tmp_path / str(number) / "page.py"
        script.parent.mkdir()
        write_script(page, script, watched=True)
        said.append(run_script(script, timeout=TIMEOUT))
    assert said == [("", "at the end\n"), ("", "torch.float32 __main__ True\n")]


def test_a_page_that_hangs_ends(tmp_path: Path, run_script: RunScript, monkeypatch: pytest.MonkeyPatch) -> None:
    script, output, wait = tmp_path / "page.py", tmp_path / "output", subprocess.Popen.wait

    def wait_when_it_hangs(process: Any, timeout: float | None = None) -> int:
        while timeout == 2 and not output.read_bytes():  # a busy machine may take longer to come so far
            time.sleep(0.01)
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait_when_it_hangs)
    write_script("```python\nimport time\nprint('before')\ntime.sleep(60)\n```\n", script)
    assert run_script(script, timeout=2) == ("took more than 2 s", "before\n")


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("```python\nx = 1\n", "never ends"),
        ("<!-- no-run -->\n```python\nx = 1\n```\n", "say why"),
        ("<!-- no-run: -->\n```python\nx = 1\n```\n", "say why"),
        ("<!-- run -->\nwords\n", "stands before no block"),
        ("<!-- run -->\n", "stands before no block"),
        ("<!-- run -->\n```python\nx = 1\n```\n", "does nothing"),
        ("<!-- no-run: it is long -->\n```bash\nx\n```\n", "does nothing"),
    ],
)
def test_a_wrong_mark_is_an_error(page: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        blocks(page)


def test_architecture_names_files_and_functions_that_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    _, _, text = text.partition("\n## A training step")
    names = "|".join(source.name for package in PACKAGES for source in package.sources)
    paths = set(re.findall(rf"`((?:{names})/[\w/]*(?:\.py)?)`", text))
    assert len(paths) > 20
    for path in paths:
        assert [*ROOT.glob(f"packages/*/src/meshfold/{path}")], f"docs/architecture.md: {path} does not exist"
    for path in re.findall(r"`((?:packages|integration_tests|benchmarks|experiments)/[\w./]*)`", text):
        assert (ROOT / path).exists(), f"docs/architecture.md: {path} does not exist"
    places = re.findall(r"`([\w.]+)` (?:and `\w+` )?in `([\w/]+\.py)`", text)
    assert len(places) > 10
    for symbol, path in places:
        source = next(ROOT.glob(f"packages/*/src/meshfold/{path}")).read_text()
        for name in symbol.split("."):
            assert re.search(rf"\b(?:def|class) {name}\b|^{name}\b", source, re.M), f"{path} has no {name}"
