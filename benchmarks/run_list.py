"""The list of 10,000 runs, of which 2,000 have steps and metrics: filters × orders, over HTTP.

    python -m benchmarks.run_list [--rounds 20] [--page]

Each query goes to a server in its own process, on both databases. It asks for a page of 50 rows
and the count of all matches, as the list's address does. With --page, it also asks for the page
itself, with its markup, sparklines and loss-scale health.
"""

import argparse
import statistics
import tempfile
import time
from typing import Any, ClassVar

import httpx2
import numpy as np
from numpy.typing import NDArray
from sqlalchemy import insert, text

from benchmarks import databases
from benchmarks.report import report
from benchmarks.site import serving_from
from db.access import accounts
from db.database import Database
from db.runs import config_values
from db.tables import LatestMetric, Run, RunConfigValue, Status
from db.telemetry import loss_curves, step_block_writer
from halfstep.config_groups import RecipeConfig
from halfstep.run_config import config_model
from halfstep.telemetry.spool import STEP_DTYPE

RUNS, STEPS, BATCH = 10_000, 50, 500
TRAINED_EVERY, WAITING = 5, 50
METRICS = ("val/loss", "val/accuracy", "run/seconds")
OWNERS = ("bench", "ada", "grace", "edsger")
STATUSES = (Status.FINISHED, Status.FINISHED, Status.FAILED, Status.CANCELLED)
BAR_MS = 50.0
FILTERS = (
    "",
    "sweep",
    "no-such-run",
    "status:failed",
    "status:active",
    "since:7d",
    "tag:lr",
    "owner:ada -precision:fp16",
    "skips>10",
    "loss<0.5 step>=40",
    "lr>0.005",
    "training.batch_size=64",
    "val/accuracy>0.9",
    "-val/accuracy>0.9 lr<=0.005 sweep owner:grace",
)
ORDERS = ("-id", "name", "-loss", "duration", "-val/accuracy", "lr")


class Synthetic:
    """A recipe with the common settings only."""

    name: ClassVar[str] = "synthetic"
    Config: ClassVar[type[RecipeConfig]] = RecipeConfig
    defaults: ClassVar[dict[str, Any]] = {}


def fill(database: Database, count: int = RUNS) -> None:
    """Create this many runs in order of submission."""
    rng = np.random.default_rng(0)
    whole = config_model(Synthetic)(recipe=RecipeConfig()).model_dump(mode="json")
    with database.writing() as session:
        owners = [accounts.user_named(session, name).id for name in OWNERS]
        for first in range(1, count + 1, BATCH):
            numbers = range(first, min(first + BATCH, count + 1))
            made = [_run(number, owners, whole, rng, count) for number in numbers]
            session.add_all(made)
            session.flush()
            settings = [row for run in made for row in config_values.rows_of(run)]
            session.execute(insert(RunConfigValue), settings)
            measured = [run.id for run in made if run.step]
            for each in measured:
                step_block_writer.write(session.connection(), each, steps := _steps(rng))
                loss_curves.add(session.connection(), each, steps)
            points = [row for each in measured for row in _points(each, rng)]
            latest = [point for point in points if point["step"] == STEPS]
            session.execute(insert(LatestMetric), latest)
            session.expunge_all()
    with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        if connection.dialect.name == "postgresql":  # as its autovacuum would within the minute
            connection.execute(text("VACUUM (ANALYZE)"))


def _run(
    number: int, owners: list[int], whole: dict[str, Any], rng: np.random.Generator, count: int
) -> Run:
    """Create one of `count` runs; every fifth has trained, and the last WAITING are queued."""
    size, rate = int(2 ** rng.integers(3, 9)), float(10 ** rng.uniform(-5, -1))
    config = whole | {"precision": ("fp16", "bf16", "fp32")[number % 3]}
    config["training"] = whole["training"] | {"batch_size": size, "steps": STEPS}
    config["recipe"] = whole["recipe"] | {"learning_rate": rate}
    has_steps, is_waiting = number % TRAINED_EVERY == 0, number > count - WAITING
    created = time.time() - (count - number) * 300
    return Run(
        id=number,
        name=f"{'sweep' if number % 7 == 0 else 'run'}-{number:05}",
        recipe="synthetic",
        config=config,
        precision=config["precision"],
        tags=", ".join(("lr", "baseline", "night")[: number % 4]),
        owner_id=owners[number % len(owners)],
        project=("", "alpha", "beta")[number % 3],
        status=Status.QUEUED if is_waiting else STATUSES[number % len(STATUSES)],
        created_at=created,
        started_at=None if is_waiting else created + 5,
        ended_at=None if is_waiting else created + 5 + float(rng.uniform(10, 7200)),
        position=float(number),
        step=STEPS if has_steps else 0,
        steps_total=STEPS,
        skipped=int(rng.integers(0, 20)) if has_steps else 0,
        loss=float(rng.lognormal()) if has_steps else None,
        last_elapsed_ms=STEPS * 5 if has_steps else None,
        scale=65536.0 if has_steps else None,
    )


def _steps(rng: np.random.Generator) -> NDArray[Any]:
    steps = np.zeros(STEPS, STEP_DTYPE)
    steps["step"] = np.arange(1, STEPS + 1)
    steps["elapsed_ms"], steps["step_us"] = steps["step"] * 5, 5000
    steps["loss"], steps["scale"] = rng.lognormal(size=STEPS), 65536.0
    return steps


def _points(run_id: int, rng: np.random.Generator) -> list[dict[str, Any]]:
    return [
        {"run_id": run_id, "name": name, "step": step, "value": float(rng.random())}
        for name in METRICS
        for step in range(10, STEPS + 1, 10)
    ]


def times(
    client: httpx2.Client, path: str, query: dict[str, str] | None, rounds: int
) -> list[float]:
    """Return each round's milliseconds, shortest first, without the first round."""
    found = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        answer = client.get(path, params=query)
        found.append((time.perf_counter() - started) * 1000)
        assert answer.status_code == 200, answer.text
    return sorted(found[1:])


def main() -> None:
    """Measure on both databases."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--limit", default="50")
    options = parser.parse_known_args()[0]
    rows: list[tuple[Any, ...]] = []
    worst = 0.0
    for name, opened in (("SQLite", databases.sqlite), ("PostgreSQL", databases.postgresql)):
        with tempfile.TemporaryDirectory() as folder, opened() as database:
            fill(database)
            with (
                serving_from(database, folder, 0) as site,
                httpx2.Client(
                    base_url=site.address, headers={"Authorization": f"Bearer {site.token()}"}
                ) as client,
            ):
                paths = ("/api/v1/runs", "/runs") if options.page else ("/api/v1/runs",)
                for path in paths:
                    for said in FILTERS:
                        for sort in ORDERS:
                            query = {"filter": said, "sort": sort, "limit": options.limit}
                            found = times(client, path, query, options.rounds)
                            p95 = found[int(len(found) * 0.95) - 1]
                            worst = max(worst, p95)
                            median = statistics.median(found)
                            shown = (f"{median:.1f}", f"{p95:.1f}")
                            rows.append((name, path, said or "(all)", sort, *shown))
    report(
        "run_list",
        f"p95 ≤ {BAR_MS:g} ms of every filter, order and count",
        ("database", "address", "filter", "order", "ms, p50", "ms, p95"),
        rows,
        measured=f"worst p95 {worst:.1f} ms",
        passed=worst <= BAR_MS,
    )


if __name__ == "__main__":
    main()
