"""Response times of dashboards: Halfstep, MLflow, Aim and TensorBoard, on the same data.

    python -m benchmarks.dashboards [--runs 400] [--steps 1000] [--rounds 9] [--save]

Each tool writes its runs in its own format, in the environment that benchmarks.peers makes, and has
its own server; the servers are asked in turns. The requests are those of the tool's own pages, and
the time ends with the last answer. A "–" marks what a server cannot do: Aim sorts nothing.
TensorBoard's list with a filter and an order is its table of hyperparameters.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import httpx2
import numpy as np
from sqlalchemy import update

from benchmarks import databases
from benchmarks.peers import PEERS, python_of
from benchmarks.report import report
from benchmarks.site import serving_from
from db.access import accounts
from db.database import Database
from db.runs import config_values
from db.tables import Run, Status
from db.telemetry import telemetry
from halfstep.config_groups import RecipeConfig
from halfstep.run_config import config_model
from halfstep.telemetry.events import Metric
from halfstep.telemetry.spool import STEP_DTYPE

LISTED, COMPARED = 50, 20
LEAST_RATE, MOST_RATE = 1e-5, 1e-1
HIGH = 0.75  # the filter matches what is above: a quarter of the runs
BAR = 0.25
PATIENCE_SECONDS = 300
CELLS = ("list", "filter", "sort", "run", "comparison")

#: A function for each cell that makes its requests once.
Requests = Mapping[str, Callable[[httpx2.Client], list[httpx2.Response]]]
#: A running tool: the client of its server, and its requests.
Tool: TypeAlias = tuple[httpx2.Client, Requests]


class Synthetic:
    """A recipe with the common settings only."""

    name: ClassVar[str] = "synthetic"
    Config: ClassVar[type[RecipeConfig]] = RecipeConfig
    defaults: ClassVar[dict[str, Any]] = {}


def make_runs(count: int, steps: int) -> list[dict[str, Any]]:
    """Return the same data for every tool."""
    rng = np.random.default_rng(0)
    falling = 2 * np.exp(-np.arange(steps) / steps * 3)
    return [
        {
            "name": f"run-{number:05}",
            "params": {
                "learning_rate": float(np.exp(rng.uniform(np.log(LEAST_RATE), np.log(MOST_RATE)))),
                "batch_size": int(2 ** rng.integers(3, 9)),
            },
            "accuracy": float(rng.random()),
            "losses": (falling + rng.lognormal(-2, 0.5, steps)).tolist(),
        }
        for number in range(1, count + 1)
    ]


# ---- Ours -------------------------------------------------------------------------------------


def fill(database: Database, made_runs: list[dict[str, Any]]) -> None:
    """Record the runs as supervisors do."""
    whole = config_model(Synthetic)(recipe=RecipeConfig()).model_dump(mode="json")
    with database.writing() as session:
        owner = accounts.user_named(session, "bench").id
    for number, each in enumerate(made_runs, 1):
        with database.writing() as session:
            run = _run(number, each, whole, owner)
            session.add(run)
            session.flush()
            config_values.note(session, run)
            telemetry.record(session, run.id, 1, _flush(each))
    with database.writing() as session:
        session.execute(update(Run).values(status=Status.FINISHED, ended_at=time.time()))


def _run(number: int, each: dict[str, Any], whole: dict[str, Any], owner: int) -> Run:
    steps = len(each["losses"])
    config = whole | {"precision": "fp16"}
    size, rate = each["params"]["batch_size"], each["params"]["learning_rate"]
    config["training"] = whole["training"] | {"batch_size": size, "steps": steps}
    config["recipe"] = whole["recipe"] | {"learning_rate": rate}
    return Run(
        id=number,
        name=each["name"],
        recipe="synthetic",
        config=config,
        precision="fp16",
        owner_id=owner,
        status=Status.RUNNING,
        attempt=1,
        created_at=time.time(),
        started_at=time.time(),
        steps_total=steps,
    )


def _flush(each: dict[str, Any]) -> telemetry.Flush:
    steps = np.zeros(len(each["losses"]), STEP_DTYPE)
    steps["step"] = np.arange(1, len(steps) + 1)
    steps["elapsed_ms"], steps["step_us"] = steps["step"] * 5, 5000
    steps["loss"], steps["scale"] = each["losses"], 65536.0
    accuracy = Metric(step=len(steps), name="val/accuracy", value=each["accuracy"], elapsed_ms=1)
    return telemetry.Flush(steps=[steps], events=[accuracy])


@contextmanager
def ours(made_runs: list[dict[str, Any]]) -> Iterator[Tool]:
    """Serve the runs with Halfstep on SQLite."""
    ids = [str(number) for number in range(1, COMPARED + 1)]

    def list_runs(**query: Any) -> Callable[[httpx2.Client], list[httpx2.Response]]:
        return lambda client: [client.get("/api/v1/runs", params={"limit": LISTED, **query})]

    requests: Requests = {
        "list": list_runs(),
        "filter": list_runs(filter=f"val/accuracy>{HIGH}"),
        "sort": list_runs(sort="-val/accuracy"),
        "run": lambda client: [
            client.get("/api/v1/runs/7"),
            client.get("/api/v1/runs/7/series"),
        ],
        "comparison": lambda client: [
            client.get(
                "/api/v1/comparison/series",
                params={"runs": ",".join(ids), "series": "loss", "points": 1000},
            )
        ],
    }
    with tempfile.TemporaryDirectory() as folder, databases.sqlite() as database:
        fill(database, made_runs)
        with (
            serving_from(database, folder, 0) as site,
            httpx2.Client(
                base_url=site.address,
                headers={"Authorization": f"Bearer {site.token()}"},
                timeout=PATIENCE_SECONDS,
            ) as client,
        ):
            high = client.get("/api/v1/runs", params={"filter": f"val/accuracy>{HIGH}"}).json()[
                "total"
            ]
            assert high == sum(each["accuracy"] > HIGH for each in made_runs)
            yield client, requests


# ---- The others -------------------------------------------------------------------------------


def mlflow(ids: list[str]) -> Requests:
    """Return the requests of MLflow's pages."""

    def search(**query: Any) -> Callable[[httpx2.Client], list[httpx2.Response]]:
        wanted = {"experiment_ids": ["1"], "max_results": LISTED, **query}
        return lambda client: [client.post("/ajax-api/2.0/mlflow/runs/search", json=wanted)]

    def curves(client: httpx2.Client, *ids: str) -> httpx2.Response:
        query: dict[str, Any] = {"run_ids": ids, "metric_key": "loss", "max_results": 320}
        path = "/ajax-api/2.0/mlflow/metrics/get-history-bulk-interval"
        return client.get(path, params=query)

    return {
        "list": search(order_by=["attributes.start_time DESC"]),
        "filter": search(filter=f"metrics.accuracy > {HIGH}"),
        "sort": search(order_by=["metrics.accuracy DESC"]),
        "run": lambda client: [
            client.get("/ajax-api/2.0/mlflow/runs/get", params={"run_id": ids[6]}),
            curves(client, ids[6]),
        ],
        "comparison": lambda client: [curves(client, *ids[:COMPARED])],
    }


def aim(ids: list[str]) -> Requests:
    """Return the requests of Aim's pages."""

    def search(what: str, **query: Any) -> Callable[[httpx2.Client], list[httpx2.Response]]:
        wanted = {"report_progress": False, **query}
        return lambda client: [client.get(f"/api/runs/search/{what}/", params=wanted)]

    return {
        "list": search("run", limit=LISTED),
        "filter": search("run", limit=LISTED, q=f"run.accuracy > {HIGH}"),
        "run": lambda client: [
            client.get(f"/api/runs/{ids[6]}/info/"),
            client.post(
                f"/api/runs/{ids[6]}/metric/get-batch/", json=[{"name": "loss", "context": {}}]
            ),
        ],
        "comparison": search(
            "metric", q=f'metric.name == "loss" and run.hash in {ids[:COMPARED]}', p=1000
        ),
    }


def tensorboard(ids: list[str]) -> Requests:
    """Return the requests of TensorBoard's pages."""

    def groups(**accuracy: Any) -> Callable[[httpx2.Client], list[httpx2.Response]]:
        wanted = {
            "allowedStatuses": ["STATUS_UNKNOWN", "STATUS_SUCCESS"],
            "colParams": [
                {"hparam": "learning_rate"},
                {"metric": {"tag": "accuracy", "group": ""}, **accuracy},
            ],
            "startIndex": 0,
            "sliceSize": LISTED,
        }
        return lambda client: [client.post("/data/plugin/hparams/session_groups", json=wanted)]

    def curves(client: httpx2.Client, *names: str) -> list[httpx2.Response]:
        form = {"tag": "loss", "runs": names}
        return [client.post("/data/plugin/scalars/scalars_multirun", data=form)]

    return {
        "list": groups(),
        "filter": groups(filterInterval={"minValue": HIGH, "maxValue": 1}),
        "sort": groups(order="ORDER_DESC"),
        "run": lambda client: curves(client, ids[6]),
        "comparison": lambda client: curves(client, *ids[:COMPARED]),
    }


#: How each tool serves a folder at a port, and the request that shows that it has read all of it.
SERVERS: dict[str, tuple[Callable[[str, str], list[str]], Callable[[list[str]], Requests]]] = {
    "mlflow": (
        lambda folder, port: [
            *("mlflow", "server", "--backend-store-uri", f"sqlite:///{folder}/mlflow.db"),
            *("--default-artifact-root", f"file://{folder}/files"),
            *("--port", port, "--workers", "1"),
        ],
        mlflow,
    ),
    "aim": (lambda folder, port: ["aim", "up", "--repo", folder, "--port", port], aim),
    "tensorboard": (
        lambda folder, port: [
            *("tensorboard", "--logdir", folder, "--port", port, "--bind_all"),
            *("--samples_per_plugin", "scalars=1000"),
        ],
        tensorboard,
    ),
}


@contextmanager
def theirs(name: str, folder: Path) -> Iterator[Tool]:
    """Serve the runs of runs.json with another tool from its own folder."""
    python = python_of(name)
    if python is None:
        raise SystemExit(f"{name} {PEERS[name]} cannot be installed here.")
    folder.mkdir()
    writing = [str(python), str(Path(__file__).with_name("dashboard_peer.py")), name, str(folder)]
    written = subprocess.run(writing, capture_output=True, text=True)
    if written.returncode:
        raise SystemExit(f"{name} wrote no runs: {written.stderr[-2000:]}")
    ids = json.loads(written.stdout.splitlines()[-1])
    command, requests = SERVERS[name]
    with (
        serving(python, command, folder) as address,
        httpx2.Client(base_url=address, timeout=PATIENCE_SECONDS) as client,
    ):
        asked = requests(ids)
        wait_until(lambda: says(asked["list"], client))
        if name == "tensorboard":  # reads its files behind its first answers
            wait_until(lambda: len(client.get("/data/runs").json()) == len(ids))
        yield client, asked


@contextmanager
def serving(python: Path, command: Callable[[str, str], list[str]], folder: Path) -> Iterator[str]:
    """Start a tool's server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    program, *arguments = command(str(folder), port)
    process = subprocess.Popen(
        [str(python.with_name(program)), *arguments],
        env={**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, 15)  # some start processes of their own
        process.wait()


def says(asked: Callable[[httpx2.Client], list[httpx2.Response]], client: httpx2.Client) -> bool:
    """Return whether a server responds."""
    try:
        return all(answer.status_code == 200 for answer in asked(client))
    except httpx2.TransportError:
        return False


def wait_until(is_so: Callable[[], bool]) -> None:
    """Poll until a condition is true. Raises TimeoutError."""
    until = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        if time.monotonic() > until:
            raise TimeoutError("The tool's server does not answer.")
        time.sleep(0.5)


# ---- Times ------------------------------------------------------------------------------------


def time_tools(tools: Mapping[str, Tool]) -> dict[str, dict[str, float]]:
    """Return the median seconds of each request of each tool, after a first round."""
    found: dict[str, dict[str, list[float]]] = {
        name: {cell: [] for cell in requests} for name, (_client, requests) in tools.items()
    }
    for _ in range(options().rounds + 1):
        for name, (client, requests) in tools.items():
            for cell, ask in requests.items():
                found[name][cell].append(seconds_of(client, ask))
    return {
        name: {cell: statistics.median(seconds[1:]) for cell, seconds in cells.items()}
        for name, cells in found.items()
    }


def seconds_of(
    client: httpx2.Client, ask: Callable[[httpx2.Client], list[httpx2.Response]]
) -> float:
    """Return the time of a request."""
    started = time.perf_counter()
    answers = ask(client)
    seconds = time.perf_counter() - started
    for answer in answers:
        assert answer.status_code == 200, answer.text[:1000]
    return seconds


def options() -> argparse.Namespace:
    """Return the requested sizes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=400)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=9)
    return parser.parse_known_args()[0]


def main() -> None:
    """Serve the runs with all tools, and measure these in turns."""
    sizes = options()
    made_runs = make_runs(sizes.runs, sizes.steps)
    with tempfile.TemporaryDirectory(prefix="halfstep-bench-") as folder, ExitStack() as stack:
        (Path(folder) / "runs.json").write_text(json.dumps(made_runs))
        tools = {name: stack.enter_context(theirs(name, Path(folder) / name)) for name in SERVERS}
        tools["halfstep"] = stack.enter_context(ours(made_runs))
        found = time_tools(tools)
    ratios, rows = {}, []
    for cell in CELLS:
        quickest = min((t[cell] for tool, t in found.items() if tool != "halfstep" and cell in t))
        ratios[cell] = found["halfstep"][cell] / quickest
        told_ms = [_ms(found.get(tool, {}).get(cell)) for tool in ("halfstep", *SERVERS)]
        rows.append((cell, *told_ms, f"{ratios[cell]:.2f}"))
    report(
        "dashboards",
        f"≤ {BAR:g} of the quickest peer, in each row",
        (
            f"ms, median of {sizes.rounds}; {sizes.runs} runs of {sizes.steps} steps",
            "halfstep",
            *(f"{name} {PEERS[name]}" for name in SERVERS),
            "ours / the quickest of theirs",
        ),
        rows,
        measured=", ".join(f"{cell} {ratio:.2f}" for cell, ratio in ratios.items()),
        passed=max(ratios.values()) <= BAR,
    )


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1000:.1f}"


if __name__ == "__main__":
    main()
