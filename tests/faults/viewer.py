"""A client that follows a run, reconnects after failures, and collects events."""

import json
import threading
import time
from typing import Any

import httpx2

from db.runs import history
from db.tables import ENDED
from db.telemetry import series
from tests.site import Site


class Viewer(threading.Thread):
    """A client that reads a live stream like a browser, and reconnects with its last event's id."""

    def __init__(self, address: str, token: str) -> None:
        super().__init__(daemon=True)
        self.address = address
        self.headers = {"Authorization": f"Bearer {token}"}
        self.cursor = ""
        self.returns = -1  # the first time it comes it does not come back
        self.steps: dict[int, tuple[Any, ...]] = {}
        self.events: list[int] = []
        self.log: list[int] = []
        self.is_over = False

    def run(self) -> None:
        """Watch until the run has ended."""
        while not self.is_over:
            try:
                self._watch()
            except httpx2.TransportError:
                time.sleep(0.05)

    def _watch(self) -> None:
        headers = {**self.headers, "Last-Event-ID": self.cursor}
        with httpx2.stream("GET", self.address, headers=headers, timeout=None) as response:
            assert response.status_code == 200
            self.returns += 1
            data = ""
            for line in response.iter_lines():
                name, _, value = line.partition(": ")
                if name == "data":
                    data = value
                elif name == "id":
                    cursor = value
                elif not line and data:  # only a whole event counts
                    self._take(json.loads(data))
                    self.cursor, data = cursor, ""
                    if self.is_over:
                        return

    def _take(self, news: dict[str, Any]) -> None:
        if columns := news["steps"]:
            rows = list(zip(*columns.values(), strict=True))
            kept = {step: row for step, row in self.steps.items() if step < rows[0][0]}
            self.steps = kept | {row[0]: row for row in rows}
        self.events += [event["id"] for event in news["events"]]
        self.log += [line["number"] for line in news["log"]]
        self.is_over = news["run"]["status"] in ENDED

    def assert_missed_nothing(self, site: Site, run_id: int) -> None:
        """Assert that each event of the database was received once."""
        with site.database.reading() as session:
            columns = series.raw_steps(session, run_id)
            result = history.events(session, run_id, limit=len(self.events) + 1)
            events = [event.id for (event,) in result.rows]
            log = [line.number for line in series.log_lines(session, run_id)]
        assert list(self.steps.values()) == list(zip(*columns.values(), strict=True))
        assert (self.events, self.log) == (events, log)
