"""Shared helpers of the tests of machines."""

from itertools import pairwise

from db.queue import workers
from db.runs import runs
from tests.site import Site


def worker_of(site: Site, run_id: int, number: int) -> str:
    with site.database.reading() as session:
        return workers.of_nodes(session, runs.get(session, run_id))[number]


def assert_never_two_at_once(site: Site, run_id: int) -> None:
    """Assert that attempts requested their batches in separate periods, by this machine's clock."""
    times: dict[int, list[float]] = {}
    for line in (site.data / "trace").read_text().splitlines():
        run, attempt, moment = line.split()
        if int(run) == run_id:
            times.setdefault(int(attempt), []).append(float(moment))
    spans = [(min(each), max(each)) for _attempt, each in sorted(times.items())]
    assert len(spans) > 1
    assert all(before[1] < after[0] for before, after in pairwise(spans))
