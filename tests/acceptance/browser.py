"""A real headless browser."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Page, ViewportSize, expect, sync_playwright

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

# As root, Chromium needs --no-sandbox; the other options prevent it from calling home.
_ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
]

# On narrower windows the pages hide their right column.
_SIZE: ViewportSize = {"width": 1600, "height": 1000}

# The first page of a new browser takes long on a busy machine.
_PATIENCE_MS = 60_000


@contextmanager
def opened_page() -> Iterator[Page]:
    """Open a page in English; skip the test without a browser."""
    installed = next(filter(None, map(shutil.which, _NAMES)), None)
    if installed is None:
        pytest.skip(f"no browser is installed, none of {', '.join(_NAMES)}: apt install chromium")
    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=installed, args=_ARGUMENTS) as browser,
        browser.new_context(
            viewport=_SIZE, locale="en-US", timezone_id="UTC", reduced_motion="reduce"
        ) as context,
    ):
        page = context.new_page()
        page.set_default_timeout(_PATIENCE_MS)
        expect.set_options(timeout=_PATIENCE_MS)
        yield page
