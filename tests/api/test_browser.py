"""What a real browser makes of the API: a Chromium that reaches this host alone. Skipped where none is installed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, Route, sync_playwright

from tests.api.conftest import DEADLINE_SECONDS

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (Debian: apt install chromium)")


# For this file alone: while it is open, an event loop runs in this thread, and others want theirs.
@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        # Its own sandbox can't be had as root, as in a container.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(chromium: Browser) -> Iterator[Page]:
    context = chromium.new_context()
    context.set_default_timeout(DEADLINE_SECONDS * 1000)
    yield context.new_page()
    context.close()


@pytest.mark.parametrize(
    ("path", "operation"),
    [
        pytest.param("/docs", ".opblock-summary-description", id="swagger-ui"),
        pytest.param("/redoc", "h2", id="redoc"),
    ],
)
@needs_chromium
def test_the_pages_of_the_api_are_drawn_without_a_way_to_any_other_host(live, page, path, operation):
    elsewhere, complaints = [], []

    def only_ours(route: Route) -> None:
        if urlsplit(route.request.url).netloc in {urlsplit(live.url).netloc, ""}:
            route.continue_()
        else:
            elsewhere.append(route.request.url)
            route.abort()

    page.route("**/*", only_ours)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(f"{live.url}{path}")
    page.locator(operation).filter(has_text="Submit a job").first.wait_for()
    assert elsewhere == []
    assert complaints == []
