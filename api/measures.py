"""What `/metrics` shows Prometheus: requests as this process saw them; jobs, slots and hosts as the table has them."""

from __future__ import annotations

from threading import Lock

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from core.health import Standing
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
        self.queue = Gauge("trainshed_queue_length", "Jobs that wait for slots.", registry=self.registry)
        self.slots = Gauge(
            "trainshed_slots", "Slots that a job holds, and free ones of hosts that take jobs.", ["state"],
            registry=self.registry,
        )  # fmt: skip
        self.heartbeats = Gauge(
            "trainshed_node_heartbeat_age_seconds", "Time since a host was heard of.", ["node"], registry=self.registry
        )
        self._one_at_a_time = Lock()

    def request(self, method: str, route: str, status: int, seconds: float) -> None:
        method = method if method in METHODS else "other"
        self.requests.labels(method, route, str(status)).inc()
        self.seconds.labels(method, route).observe(seconds)

    def render(self, standing: Standing) -> bytes:
        """The text that Prometheus reads, with every state present and no host that is gone."""
        with self._one_at_a_time:
            for state in JobState:
                self.jobs.labels(state.value).set(standing.jobs.get(state, 0))
            self.queue.set(standing.jobs.get(JobState.QUEUED, 0))
            self.slots.labels("held").set(standing.held_slots)
            self.slots.labels("free").set(standing.free_slots)
            self.heartbeats.clear()
            for node, age in standing.heartbeat_ages.items():
                self.heartbeats.labels(node).set(age)
            return generate_latest(self.registry)
