"""`halfstep workers COMMAND`."""

from typing import TYPE_CHECKING, Annotated

import typer

from halfstep.cli.application import App, ListingGroup
from halfstep.cli.connection import connect
from halfstep.cli.options import AsJson
from halfstep.cli.output import print_list, print_result
from halfstep.number_formats import quantity

if TYPE_CHECKING:
    from halfstep.api_client.response_types import WorkerState
    from halfstep.client import Client

WorkerName = Annotated[str, typer.Argument(metavar="NAME", help="Name of the worker")]

app = App("List workers; drain or undrain one.", group=ListingGroup)


@app.command("list")
def list_(as_json: AsJson = False) -> None:
    """List workers, in the order of their registration."""
    with connect() as client:
        workers = list(client.workers())
    print_list(workers, ("Worker", "Host", "Devices", "State"), _row, as_json=as_json)


def _row(worker: "WorkerState") -> tuple[str, ...]:
    return worker["name"], worker["host"], f"{len(worker['devices'])}", _state(worker)


@app.command()
def drain(
    name: WorkerName,
    stop: Annotated[
        bool, typer.Option("--stop", help="Also return its current runs to the queue")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Stop a worker from claiming runs."""
    with connect() as client:
        worker = client.drain_worker(_worker_id(client, name), stop=stop)
    _print_worker(worker, as_json=as_json)


@app.command()
def undrain(name: WorkerName, as_json: AsJson = False) -> None:
    """Let a drained worker claim runs again."""
    with connect() as client:
        worker = client.undrain_worker(_worker_id(client, name))
    _print_worker(worker, as_json=as_json)


def _worker_id(client: "Client", name: str) -> int:
    workers = {row["name"]: int(row["id"]) for row in client.workers()}
    if name not in workers:
        raise typer.BadParameter(f"name is {name!r}; allowed: {', '.join(workers) or 'none'}")
    return workers[name]


def _print_worker(worker: "WorkerState", *, as_json: bool) -> None:
    text = f"{worker['name']}: {quantity(len(worker['devices']), 'device')}, {_state(worker)}"
    print_result(worker, text, as_json=as_json)


def _state(worker: "WorkerState") -> str:
    stopped = "stopped" if worker["stopped_at"] else "no contact"
    state = "up" if worker["alive"] else stopped
    outdated = ", outdated" if worker.get("outdated") else ""  # servers of 0.1.0 lack it
    return state + outdated + (", drained" if worker["drained_at"] else "")
