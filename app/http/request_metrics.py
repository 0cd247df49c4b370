"""Counts and durations of this server's requests, by group of routes, for /metrics."""

import time
from collections.abc import Iterator

from prometheus_client import Counter, Histogram
from prometheus_client.metrics_core import Metric
from starlette.types import ASGIApp, Message, Receive, Scope, Send

UNKNOWN = "unknown"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class RequestMetrics:
    """Counters of one application's requests.

    A group is the first part of the path, which is the same for all requests of a route: "runs",
    "api runs". The duration ends when the response starts, so that streams and downloads count as
    any request.
    """

    def __init__(self) -> None:
        labels = ["route_group"]
        self.count = Counter(
            *("halfstep_http_requests", "Requests by group of routes and status class"),
            [*labels, "status"],
            registry=None,
        )
        self.seconds = Histogram(
            *("halfstep_http_request_seconds", "Time until a response starts", labels),
            buckets=SECONDS,
            registry=None,
        )

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        yield from self.count.collect()
        yield from self.seconds.collect()

    def note(self, scope: Scope, status: int, seconds: float) -> None:
        """Count a request whose response has started."""
        group = group_of(scope["path"]) if scope.get("route") else UNKNOWN
        self.count.labels(group, f"{status // 100}xx").inc()
        self.seconds.labels(group).observe(seconds)


class RequestMetricsMiddleware:
    """Middleware that counts each request."""

    def __init__(self, app: ASGIApp, metrics: RequestMetrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start = time.perf_counter()

        async def send_and_count(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.metrics.note(scope, message["status"], time.perf_counter() - start)
            await send(message)

        await self.app(scope, receive, send_and_count)


def group_of(path: str) -> str:
    """Return the group of the path of a request that has a route."""
    parts = path.strip("/").split("/")
    if parts[:2] == ["api", "v1"]:
        return f"api {parts[2]}" if parts[2:] else "api"
    return parts[0] or "start"
