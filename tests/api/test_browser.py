"""What a real browser makes of the API: a Chromium that reaches this host alone. Skipped where none is installed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, Route, sync_playwright

from core.services import Services
from tests.api import driving
from tests.api.conftest import running

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRAWN_SECONDS = 90.0
"""For a page to be drawn; a busy machine takes its time over megabytes of scripts."""
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
    context.set_default_timeout(DRAWN_SECONDS * 1000)
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


LISTEN = """
([job, key]) => fetch("/v1/visits", {method: "POST", headers: {authorization: `Bearer ${key}`}}).then(answer => {
    window.heard = []
    window.status = answer.status
    window.source = new EventSource(`/v1/jobs/${job}/stream`)
    for (const name of ["state", "metrics", "log", "checkpoint", "warning", "done"])
        source.addEventListener(name, event => heard.push([name, event.lastEventId, JSON.parse(event.data).seq]))
    return answer.status
})
"""


@needs_chromium
def test_a_browser_that_signed_in_hears_every_event_once_also_when_the_api_is_started_anew(live, http, key, page):
    job = driving.submit(http)["id"]
    fence = driving.claim(live.services, job)
    driving.record(live.services, job, fence, driving.started(6))
    asked = []
    with Services(live.services.settings) as first, running(first) as url:
        # Any page of the same origin; this one brings nothing of its own.
        page.goto(f"{url}/healthz")
        page.on("request", lambda request: asked.append(request))
        assert page.evaluate(LISTEN, [job, key]) == 201
        driving.record(live.services, job, fence, *(driving.step(number) for number in (1, 2, 3)))
        page.wait_for_function("heard.length >= 5")
    # Nobody is there. What happens now is told by the next one.
    driving.record(live.services, job, fence, *(driving.step(number) for number in (4, 5, 6)))
    with Services(live.services.settings) as second, running(second, port=int(url.rpartition(":")[2])):
        driving.succeed(live.services, job, fence)
        page.wait_for_function("heard.some(([name]) => name == 'done')")
        # It comes back once more, is told that it has everything (204), and stays away.
        page.wait_for_function("source.readyState == EventSource.CLOSED")
    heard = page.evaluate("heard")
    assert [id_ for _, id_, _ in heard] == [*map(str, range(1, 13)), "12-done"]
    assert [seq for _, _, seq in heard[:-1]] == list(range(1, 13))
    assert {name for name, _, _ in heard} == {"state", "metrics", "log", "done"}
    streams = [request for request in asked if request.url.endswith("/stream")]
    assert len(streams) >= 3
    secret = key.rpartition("_")[2]
    assert not any(secret in request.url or "token" in request.url for request in asked)
    assert page.evaluate("document.cookie") == ""
