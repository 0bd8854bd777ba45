"""What `/metrics` shows Prometheus: requests, as this process saw them, and jobs by state, as the table has them."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from core.states import JobState

CONTENT_TYPE = CONTENT_TYPE_LATEST
METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})
"""Others are counted as one: a client may make up as many as it likes."""
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)


class Measures:
    """One application's, so that two of them in one process do not add up."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "trainshed_http_requests", "Requests answered.", ["method", "route", "status"], registry=self.registry
        )
        self.seconds = Histogram(
            "trainshed_http_request_seconds",
            "Time to the end of the answer.",
            ["method", "route"],
            buckets=BUCKETS,
            registry=self.registry,
        )
        self.jobs = Gauge("trainshed_jobs", "Jobs by state.", ["state"], registry=self.registry)

    def request(self, method: str, route: str, status: int, seconds: float) -> None:
        method = method if method in METHODS else "other"
        self.requests.labels(method, route, str(status)).inc()
        self.seconds.labels(method, route).observe(seconds)

    def render(self, jobs: Mapping[JobState, int]) -> bytes:
        """The text that Prometheus reads, with every state present."""
        for state in JobState:
            self.jobs.labels(state.value).set(jobs.get(state, 0))
        return generate_latest(self.registry)
