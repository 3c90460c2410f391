"""The pages of the project: links between them lead somewhere."""

import re
from pathlib import Path

import pytest

from tests.support.files import ROOT

PATTERNS = ("*.md", "llms.txt", "docs/**/*.md", "examples/**/*.md")
PAGES = sorted(page for pattern in PATTERNS for page in ROOT.glob(pattern))
LINK = re.compile(r"\]\(([^)#\s]+)(?:#([^)]*))?\)")


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_there_are_pages() -> None:
    assert {"README.md", "settings.md"} <= {page.name for page in PAGES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_a_page_and_a_heading_of_it(page: Path) -> None:
    for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        if target.startswith(("http:", "https:")):
            continue
        path = page.parent / target
        assert path.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(path), f"{target}#{anchor}"


def test_the_readme_is_read_in_a_few_minutes() -> None:
    assert (ROOT / "README.md").stat().st_size <= 14_000
