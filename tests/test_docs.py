"""What the documentation names is there, its lines are run, and the site of it is whole."""

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import accumulate, pairwise
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from oobleck.core.messages import SaveFailed
from oobleck.master.events.jobs import Cause, Phase
from oobleck.master.state.incident import Kind
from oobleck.master.storage import event_lines, incident_lines
from oobleck.planner.recovery.rules import Rule

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FILE = re.compile(
    r"\b(?:core|planner|host|proto|master|agent|worker|cli|bench|deploy|tests)/[\w/]+\.(?:py|proto|txt)\b"
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    named = set(_FILE.findall(page.read_text()))
    assert sorted(name for name in named if not (ROOT / name).exists()) == []


def test_each_attacker_that_the_security_page_names_is_played_by_a_test() -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    table = page.split("| somebody who |")[1].split("\n\n")[0]
    rows = [line for line in table.splitlines()[2:] if line]
    known = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    named = [re.findall(r"`(test_\w+)`", row) for row in rows]
    assert len(rows) > 10
    assert all(named), "each row names a test"
    assert sorted({name for names in named for name in names} - known) == []


def kinds_of_lines() -> set[str]:
    """Names that the modules which write lines of events.jsonl give to `event`."""
    named: list[ast.expr] = []
    for module in (event_lines, incident_lines):
        for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
            match node:
                case ast.Call(func=ast.Name(id="_with"), args=[first, *_]):
                    named.append(first)
                case ast.Dict(keys=[ast.Constant(value="event"), *_], values=[first, *_]):
                    named.append(first)
    parts = [part for name in named for part in ast.walk(name)]
    words = {p.value for p in parts if isinstance(p, ast.Constant) and isinstance(p.value, str)}
    whats = get_args(get_type_hints(SaveFailed)["what"])
    plain = {names[0] for names in event_lines._PLAIN.values()}
    return (words - {"_failed"}) | {f"{what}_failed" for what in whats} | plain


@pytest.mark.parametrize(
    ("heading", "words"),
    [
        ("Kinds of lines:", tuple(sorted(kinds_of_lines()))),
        ("Phases:", get_args(Phase)),
        ("Causes:", get_args(Cause)),
        ("Rules:", get_args(Rule)),
        ("Kinds of an incident's root cause:", get_args(Kind)),
    ],
)
def test_the_glossary_has_the_words_of_event_lines(heading: str, words: tuple[str, ...]) -> None:
    page = (ROOT / "docs/glossary.md").read_text()
    part = page.split(f"{heading}\n\n")[1].split("\n\n")[0]
    assert len(words) > 5
    assert {word.replace("_", " ") for word in words} <= {*re.findall(r"\*\*(.+?)\*\*", part)}


def test_the_formats_have_each_kind_of_event_line() -> None:
    page = (ROOT / "docs/formats.md").read_text()
    part = page.split("## events.jsonl")[1].split("### reconfigured")[0]
    assert kinds_of_lines() - {*re.findall(r"`(\w+)`", part)} == set()


def test_the_picture_of_a_loss_has_the_milliseconds_that_were_measured() -> None:
    figures = (ROOT / "docs/performance-faults.md").read_text().split("| signal noticed |")[1]
    row = [int(cell) for cell in figures.splitlines()[2].split("|")[1:-1]]
    picture = (ROOT / "docs/how-it-works.md").read_text().split("   0 ms   kill -9")[1]
    spans = [int(ms) for ms in re.findall(r"│ [a-z ]+ (\d+) ms", picture)]
    ends = [int(ms) for ms in re.findall(r"^ *(\d+) ms   [│▼]", picture, re.MULTILINE)]
    assert [*spans, ends[-1]] == row[:8]
    assert ends == list(accumulate(spans))
    assert f"undisturbed step takes {row[8]} ms, so the loss cost about {row[9]} ms" in picture


def test_no_page_is_long() -> None:
    lines = {page.name: len(page.read_text().splitlines()) for page in PAGES}
    assert {name: count for name, count in lines.items() if count > 300} == {}


# ---- what is typed

_FENCED = r"^```(?:console|bash|sh|shell)\b[^\n]*\n(?P<fenced>.*?)^```$"
_PLAIN = r"(?<=\n\n)(?P<plain>(?: {4}\S[^\n]*\n)+)"
_BLOCK = re.compile(f"{_FENCED}|{_PLAIN}", re.MULTILINE | re.DOTALL)
_OTHER = re.compile(r"^```(?:python|yaml).*?^```$", re.MULTILINE | re.DOTALL)
_TEST = re.compile(r"tests/[\w/]+\.py")
TYPED = [
    ROOT / "README.md",
    ROOT / "docs/upgrading.md",
    *sorted((ROOT / "docs/deploy").glob("*.md")),
    *sorted((ROOT / "docs/migrate").glob("*.md")),
]


def _sections(page: str) -> list[str]:
    """By headings, which lines of code are not."""
    parts = re.split(r"(^```.*?^```$)", page, flags=re.MULTILINE | re.DOTALL)
    headed = [
        part if i % 2 else re.sub(r"^#+ .*$", "\0", part, flags=re.M)
        for i, part in enumerate(parts)
    ]
    return "".join(headed).split("\0")


def unproven(name: str, page: str) -> Iterator[str]:
    """The first line of each shell block that no test runs, and that is not marked with the reason.

    A section names the test that runs its blocks, which must name the page; or a comment in front
    of a block says why none does.
    """
    for section in _sections(_OTHER.sub("", page)):
        tests = [ROOT / path for path in _TEST.findall(re.sub(r"<!--.*?-->", "", section))]
        if any(path.exists() and name in path.read_text() for path in tests):
            continue
        for block in _BLOCK.finditer(section):
            before = section[: block.start()].rstrip()
            if not re.search(r"<!-- not run: \S.*-->$", before):
                yield (block["fenced"] or block["plain"]).strip().splitlines()[0]


@pytest.mark.parametrize("page", TYPED, ids=lambda page: page.name)
def test_what_a_page_has_you_type_is_run_by_a_test_or_marked(page: Path) -> None:
    found = list(unproven(page.name, page.read_text()))
    assert found == [], "name the test that runs it, or say <!-- not run: why --> in front of it"


def test_the_search_for_what_is_not_run_finds_it() -> None:
    page = """# A

    make all

<!-- not run: slow -->

    make some

```console
$ ls
```

# B

`tests/test_docs.py` runs it.

    make none

# C

`tests/cluster/test_first_steps.py` does not.

```bash
true
```
"""
    # This file names the page, as a test that reads it would.
    assert list(unproven("a page.md", page)) == ["make all", "$ ls", "true"]
    assert list(unproven("no".join(("", "where.md")), page)) == [
        *("make all", "$ ls", "make none", "true")
    ]


def test_what_the_readme_has_you_type_is_what_first_steps_shows() -> None:
    (shown,) = re.findall(r"```console\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    page = (ROOT / "docs/first-steps.md").read_text().splitlines()
    assert len(shown.splitlines()) > 4
    assert [line for line in shown.splitlines() if line not in page] == []


# ---- the site


def made(folder: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_the_site_has_every_page_and_asks_nobody_else(tmp_path: Path) -> None:
    result = made(ROOT, "--site-dir", str(tmp_path))
    assert result.returncode == 0, result.stderr
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in PAGES[1:]}
    assert {path.relative_to(tmp_path) for path in tmp_path.rglob("*.html")} == {
        *pages, Path("index.html"), Path("404.html"),
    }  # fmt: skip
    for path in tmp_path.rglob("*.html"):
        asked = re.findall(
            r"<(?:script|link|img|iframe)[^>]+(?:https?:)?//[^>]*>", path.read_text()
        )
        assert asked == [], path
        assert "mermaid" not in path.read_text(), "its script comes from another host"


@pytest.mark.parametrize(
    ("readme", "page", "told"),
    [
        ("[a](docs/a.md#there)", "# A\n## There\n[back](../README.md)", ""),
        ("[a](docs/a.md#here)", "# A\n[b](#b)", "does not contain an anchor '#here'"),
        ("[a](docs/b.md)", "# A", "README.md: the link to docs/b.md leads nowhere"),
        ("# R", "# A\n[b](../src/b.py)", "docs/a.md: the link to ../src/b.py leads nowhere"),
    ],
)
def test_a_link_that_leads_nowhere_is_an_error(
    tmp_path: Path, readme: str, page: str, told: str
) -> None:
    (tmp_path / "docs").mkdir()
    for name in ("mkdocs.yml", "docs/site.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "README.md").write_text(readme)
    (tmp_path / "docs/a.md").write_text(page)
    result = made(tmp_path)
    assert (result.returncode == 0) == (not told), result.stderr
    assert told in result.stderr


def test_a_page_that_is_added_finds_its_place() -> None:
    spec = importlib.util.spec_from_file_location("docs_site", ROOT / "docs/site.py")
    assert spec is not None
    assert spec.loader is not None
    site = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(site)
    pages = {"index.md", "deploy/slurm.md", "deploy/ssh.md", "novel.md", "formats.md"}
    assert site.sections(pages) == [
        {"Start": ["index.md"]},
        {"Deploy": ["deploy/ssh.md", "deploy/slurm.md"]},
        {"In detail": ["formats.md", "novel.md"]},
    ]
    named = [name for names in site.ORDER.values() for name in names]
    assert len(named) == len({*named})
    assert all(a != b for a, b in pairwise(sorted(named)))
