"""README and docs: how long they are, that their links and paths lead somewhere, and which words they don't use."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.anywhere

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
JOURNAL = DOCS / "journal"
MOST_WORDS, MOST_COLUMNS = 1200, 120

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(path for path in DOCS.rglob("*.md") if path.parent != JOURNAL), JOURNAL / "index.md"]
"""What is kept up to date. The journal isn't."""

GONE = (
    "AT_ONCE",
    "Desk",
    "HandedOver",
    "KeyFacts",
    "ShownKeys",
    "TileFacts",
    "calm",
    "from_half",
    "half_q",
    "hand_out",
    "hand_over",
    "hand_over_bytes",
    "handed_over",
    "misfit",
    "poison",
    "read_mask",
    "sharers",
    "spoiled",
    "take_over",
    "why_not",
)
"""Names that this project invented and gave up for the field's."""

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
PATH = re.compile(r"`((?:fp8attn|bench|tests|docs|examples|\.ci)/[\w./-]*)`")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def lines(text: str) -> Iterator[tuple[int, str]]:
    """Those outside code blocks and tables filled by `python -m bench readme`, with their numbers."""
    inside = None
    for number, line in enumerate(text.splitlines(), 1):
        if inside is None and (line.startswith("```") or line.startswith("<!-- table: ")):
            inside = "```" if line.startswith("```") else "<!-- end -->"
        elif inside is not None:
            inside = None if line.startswith(inside) else inside
        else:
            yield number, line


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Those that are neither tables nor indented code, without the targets of links."""
    for number, line in lines(text):
        if not line.startswith(("|", "    ")) or line.lstrip().startswith("- "):
            yield number, re.sub(r"https?://\S+", "", LINK.sub(lambda link: link[0].replace(link[1], ""), line))


def anchors(path: Path) -> set[str]:
    """Of a page's headings, as GitHub and MkDocs make them."""
    headings = (re.sub(r"[`*]", "", line.lstrip("#").strip()) for _, line in lines(path.read_text()) if line.startswith("#"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= MOST_WORDS


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_lines_of_prose_are_short(path: Path) -> None:
    long = {number: line for number, line in prose(path.read_text()) if len(line) > MOST_COLUMNS}
    assert not long


@pytest.mark.parametrize("path", [*PAGES, *sorted(JOURNAL.glob("2*.md"))], ids=name)
def test_relative_links_lead_somewhere(path: Path) -> None:
    for target in LINK.findall(path.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        to = (path.parent / file).resolve() if file else path
        assert to.exists(), f"{target} isn't there"
        assert not anchor or anchor in anchors(to), f"{to.name} has no heading #{anchor}; it has {sorted(anchors(to))}"


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_paths_in_the_repository_exist(path: Path) -> None:
    assert not [found for found in PATH.findall(path.read_text()) if not (ROOT / found).exists()]


def test_every_page_is_in_the_navigation_or_the_journals_index() -> None:
    pages = set(re.findall(r"[\w./-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    dated = {f"journal/{target}" for target in LINK.findall((JOURNAL / "index.md").read_text())}
    files = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert files <= pages | dated, "pages that nobody finds"
    assert pages <= files, "pages that aren't there"


def test_the_journal_has_no_tables_to_fill() -> None:
    assert not [path for path in JOURNAL.glob("*.md") if "<!-- table: " in path.read_text()]


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_names_that_are_gone_stay_gone(path: Path) -> None:
    assert not re.findall(rf"\b(?:{'|'.join(GONE)})\b", path.read_text())
