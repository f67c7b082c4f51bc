"""Every link between the pages of this project points to an existing page and heading."""

import pytest

from tests.documentation import PAGES, PROJECT, anchors, languages, links, spans


@pytest.mark.parametrize("page", PAGES)
def test_links_point_to_existing_pages_and_headings(page: str) -> None:
    for link in links(page):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (PROJECT / page).parent / path if path else PROJECT / page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(str(target.resolve().relative_to(PROJECT))), link


@pytest.mark.parametrize("page", PAGES)
def test_every_page_is_linked_from_another(page: str) -> None:
    if page == "README.md":
        return
    linking = {
        str(((PROJECT / other).parent / link.partition("#")[0]).resolve().relative_to(PROJECT))
        for other in PAGES
        if other != page
        for link in links(other)
        if "://" not in link
    }
    assert {page, str((PROJECT / page).parent.relative_to(PROJECT))} & linking


@pytest.mark.parametrize("page", PAGES)
def test_named_files_exist(page: str) -> None:
    """A path in the text is relative to the project or to its package."""
    for span in spans(page):
        if "/" not in span.strip("/") or not span.endswith((".py", ".md")) or " " in span:
            continue
        package = PROJECT / "budget_recovery_dagster"
        assert (PROJECT / span).exists() or (package / span).exists(), span


@pytest.mark.parametrize("page", PAGES)
def test_every_code_block_names_its_language(page: str) -> None:
    """The language distinguishes commands from output."""
    known = {"sh", "text", "sql", "python", "json", "yaml", "conf"}
    assert languages(page) <= known
