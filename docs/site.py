"""What mkdocs is told beside mkdocs.yml: the order of the pages, and where links out of docs/ lead.

README is the first page. A page that nobody has put into an order stands in the section of its
folder, or in the last one. A link to a file of the sources is shown as its text, since the site has
no sources; it must be there.
"""

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
#: By section: pages, and folders whose pages are all meant.
ORDER = {
    "Start": (
        "index",
        "first-steps",
        "how-it-works",
        "job-file",
        "job-keys",
        "own-models",
        "huggingface",
        "huggingface-classes",
        "optimizers",
        "python",
    ),
    "Come from": ("migrate/",),
    "Deploy": ("deploy/by-hand", "deploy/ssh", "deploy/"),
    "Operate": (
        "faults",
        "policies",
        "command-line",
        "metrics",
        "dashboard",
        "doctor",
        "upgrading",
        "security",
        "cuda",
    ),
    "Plan and measure": ("planning", "memory", "performance", "performance-faults"),
    "In detail": ("glossary", "formats", "sample-order", "architecture", "contributing"),
}
_LAST = "In detail"
#: A link, or else code, whichever begins first: the text of a link may be code.
_LINK_OR_CODE = re.compile(
    r"\[([^\]]*)\]\(([^)\s]+)\)|^```.*?^```$|`[^`\n]+`", flags=re.MULTILINE | re.DOTALL
)


def sections(pages: set[str]) -> list[dict[str, list[str]]]:
    """All of the pages, each once, in their order."""
    left, found = set(pages), {}
    for section, names in ORDER.items():
        placed: list[str] = []
        for name in names:
            of_folder = sorted(
                page for page in left if name.endswith("/") and page.startswith(name)
            )
            placed += [page for page in [f"{name}.md", *of_folder] if page in left]
            left -= {*placed}
        found[section] = placed
    found[_LAST] += sorted(left)
    return [{section: placed} for section, placed in found.items() if placed]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    docs = Path(config.docs_dir)
    pages = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")}
    config.nav = sections(pages | {"index.md"})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    text = (ROOT / "README.md").read_text()
    files.append(File.generated(config, "index.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    source = page.file.src_uri
    here = "README.md" if source == "index.md" else f"docs/{source}"
    return _LINK_OR_CODE.sub(lambda m: m[0] if m[2] is None else resolved(m, here), markdown)


def resolved(link: "re.Match[str]", here: str) -> str:
    """A link of the file `here` as the site has it. Raises PluginError where it leads nowhere."""
    text, target = link[1], link[2]
    place, mark, anchor = target.partition("#")
    if not place or "://" in target:
        return link[0]
    folder = PurePosixPath(here).parent.as_posix()
    path = normpath(f"{folder}/{place}")
    if path == "README.md":
        path = "docs/index.md"
    elif not (ROOT / path).exists():
        raise PluginError(f"{here}: the link to {target} leads nowhere")
    if not path.startswith("docs/") or not path.endswith(".md"):
        return text
    on_site = "docs" if here == "README.md" else folder
    return f"[{text}]({relpath(path, on_site)}{mark}{anchor})"
