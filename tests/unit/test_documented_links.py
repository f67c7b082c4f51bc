"""Every link between the pages of this project leads somewhere."""

import re
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
PAGES = sorted(
    str(page.relative_to(PROJECT))
    for page in (*PROJECT.glob("*.md"), *PROJECT.rglob("docs/**/*.md"))
)


def anchors(page: Path) -> set[str]:
    """Return the names by which the headings of a page are linked."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_to_pages_and_headings(name: str) -> None:
    page = PROJECT / name
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link
