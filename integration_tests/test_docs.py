"""Every block of code in the documentation runs.

A page is one script: its Python blocks share a namespace, in order, in a process and a folder of their own. A bash
block runs where ``<!-- run -->`` stands before it; a Python block is left out where ``<!-- no-run: reason -->`` does.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from integration_tests.house import PACKAGES, ROOT, Package
from integration_tests.markdown import blocks, write_script

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(package.folder / "README.md" for package in PACKAGES),
    *sorted((ROOT / "docs").rglob("*.md")),
]
# Anything else behind a fence is a slip: `py`, `pycon` or `sh` would never run.
LANGUAGES = {"", "python", "bash", "text", "toml", "json", "mermaid"}
TIMEOUT = 240.0

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


@each_page
def test_page_runs(page: Path, tmp_path: Path) -> None:
    text = page.read_text()
    known = blocks(text)
    strange = [f"line {block.line}: {block.language}" for block in known if block.language not in LANGUAGES]
    assert not strange, f"unknown languages: {strange}"
    if not any(block.runs for block in known):
        return
    script = tmp_path / f"{page.stem}.py"
    write_script(text, script)
    code, output = run_script(script, timeout=TIMEOUT)
    if code:
        pytest.fail(
            f"{page.relative_to(ROOT)} (line numbers are the page's own) {code}:\n{output}", pytrace=False
        )


def run_script(script: Path, *, timeout: float) -> tuple[str, str]:
    """How it ended ("" for well) and all it printed; it runs in a folder of its own, our commands on the path."""
    folder = script.parent / "work"
    folder.mkdir()
    environment = dict(os.environ, MPLBACKEND="agg", PYTHONUNBUFFERED="1")
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
    with (script.parent / "output").open("w+") as output:
        # a session of its own, so that at a timeout the ranks it started end with it
        process = subprocess.Popen(
            [sys.executable, str(script)],
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout)
            how = f"ended with {code}" if code else ""
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            how = f"took more than {timeout:.0f} s"
        output.seek(0)
        return how, output.read()


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_readme_starts_with_a_ten_line_example(package: Package) -> None:
    first = next((block for block in blocks((package.folder / "README.md").read_text()) if block.runs), None)
    assert first is not None, "no block of Python"
    assert first.language == "python"
    rows = [row for row in first.code.splitlines() if row.strip()]
    assert len(rows) <= 10, f"the example has {len(rows)} lines"
    assert f"meshfold.{package.name}" in first.code


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


def test_the_harness_runs_a_page(tmp_path: Path) -> None:
    script = tmp_path / "page.py"
    write_script(PAGE, script)
    assert run_script(script, timeout=60) == ("", "read from bash\n\n")


@pytest.mark.parametrize(
    ("page", "line", "message"),
    [
        ("# A\n\n```python\nx = 1\n\ny = missing\n```\n", 6, "NameError"),
        ("# A\n\n<!-- run -->\n```bash\nexit 3\n```\n", 5, "exit status 3"),
        ("# A\n\n<!-- run -->\n```bash\nfalse\ntrue\n```\n", 5, "exit status 1"),
    ],
)
def test_a_broken_page_fails_at_its_own_line(page: str, line: int, message: str, tmp_path: Path) -> None:
    script = tmp_path / "page.py"
    write_script(page, script)
    how, output = run_script(script, timeout=60)
    assert how == "ended with 1"
    assert f'page.py", line {line}' in output
    assert message in output


def test_a_page_that_hangs_ends(tmp_path: Path) -> None:
    script = tmp_path / "page.py"
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
