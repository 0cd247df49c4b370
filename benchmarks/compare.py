"""Comparison of twenty runs of 1,000,000 steps: time until the last curve's data arrive.

The requests are the page's own: five runs per answer, three answers at once, as many points of the
loss as it draws for twenty runs, and the figures of the table. The comparison is the time for which
TensorBoard reads the file of one such run's loss before its first answer, scaled from a twentieth
of its steps. Its later answers come from its memory, with 1,000 points per curve.
"""

import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2

from benchmarks import synthetic
from benchmarks.report import report
from benchmarks.site import serving_from

RUNS, STEPS, ROUNDS = 20, 1_000_000, 7
PEER_STEPS = 50_000
CHUNK, AT_ONCE, POINTS = 5, 3, 2000  # series_of_runs.js has the same
BAR_SECONDS = 1.0


def main() -> None:
    """Send the page's requests repeatedly."""
    with (
        tempfile.TemporaryDirectory(prefix="halfstep-bench-") as folder,
        serving_from(synthetic.many_runs(RUNS, STEPS), folder, STEPS) as site,
    ):
        headers = {"Authorization": f"Bearer {site.token()}", "Accept-Encoding": "gzip"}
        with httpx2.Client(base_url=site.address, headers=headers) as client:
            request_curves(client)
            rounds = [request_curves(client) for _ in range(ROUNDS)]
        points, sizes = rounds[0][1:]
        times = [seconds for seconds, *_ in rounds]
        peer = tensorboard_seconds(Path(folder))
    median = statistics.median(times)
    rows = [
        ("halfstep, 20 runs", points, f"{sizes / 1e6:.1f}", f"{median:.2f}", f"{max(times):.2f}"),
        ("TensorBoard, before its first answer, one run", 1000, "", f"{peer:.1f}", ""),
    ]
    report(
        "compare",
        f"≤ {BAR_SECONDS:g} s for 20 runs × 1,000,000 steps",
        ("reading", "points a curve", "MB", "s, median of 7", "s, worst"),
        rows,
        measured=f"{median:.2f} s",
        peer=f"TensorBoard {peer:.1f} s a run, once",
        passed=median <= BAR_SECONDS,
    )


def request_curves(client: httpx2.Client) -> tuple[float, int, int]:
    """Return the seconds until all data have arrived, the fewest points of a curve, and the
    bytes.
    """
    ids = [str(number) for number in range(1, RUNS + 1)]
    chunks = [",".join(ids[i : i + CHUNK]) for i in range(0, RUNS, CHUNK)]

    def series(chunk: str) -> httpx2.Response:
        query: dict[str, Any] = {"runs": chunk, "series": "loss", "points": POINTS}
        return client.get("/api/v1/comparison/series", params=query)

    started = time.perf_counter()
    with ThreadPoolExecutor(AT_ONCE + 1) as pool:
        figures = pool.submit(client.get, f"/api/v1/comparison?runs={','.join(ids)}")
        answers = list(pool.map(series, chunks))
        answers_all = [figures.result(), *answers]
    seconds = time.perf_counter() - started
    assert all(answer.status_code == 200 for answer in answers_all)
    curves = [run for answer in answers for run in answer.json()["runs"].values()]
    assert len(curves) == RUNS
    assert all(curve["total"] == STEPS for curve in curves)
    return (
        seconds,
        min(len(curve["x"]) for curve in curves),
        sum(len(answer.content) for answer in answers_all),
    )


def tensorboard_seconds(folder: Path) -> float:
    """Return TensorBoard's time to read and sample the loss of one such run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder / "events"))
    for flush in synthetic.flushes(PEER_STEPS):
        for row in flush.steps[0]:
            value = Summary.Value(tag="loss", simple_value=float(row["loss"]))
            writer.add_event(Event(step=int(row["step"]), summary=Summary(value=[value])))
    writer.close()
    started = time.perf_counter()
    reading = EventAccumulator(str(folder / "events"), size_guidance={"scalars": 1000})
    reading.Reload()
    assert len(reading.Scalars("loss")) == 1000
    return (time.perf_counter() - started) * STEPS / PEER_STEPS


if __name__ == "__main__":
    main()
