"""`halfstep cluster check`: reports what is missing for runs over several machines.

Checks this machine, and if HALFSTEP_PLACEMENT names a cluster, the cluster and its nodes.
"""

import importlib.metadata
import json
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Annotated

import obstore
import typer
from obstore.store import LocalStore
from sqlalchemy import make_url
from sqlalchemy.exc import DBAPIError

from db.database import open_database
from db.errors import HalfstepError
from db.files.object_store import open_store, why
from db.queue import workers
from db.settings import Settings
from halfstep.cli.application import App
from halfstep.cli.options import AsJson
from halfstep.cli.output import say
from worker.attempts.node_group import interface
from worker.clusters.cluster_check import Finding
from worker.clusters.placement import open_placement

STORE_SECONDS = 10.0
LOCAL = {None, "", "localhost", "127.0.0.1", "::1"}


def findings(settings: Settings) -> Iterator[Finding]:
    """Check the requirements of a node on this machine."""
    for what, ask in LOOKS.items():
        try:
            yield from ask(settings)
        except Exception as error:  # a failing check is a finding
            yield Finding(what, why(error), is_fine=False)


def _database(settings: Settings) -> Iterator[Finding]:
    url = make_url(settings.database_url)
    shown = url.render_as_string(hide_password=True)
    if url.get_backend_name() == "sqlite":
        text = f"{shown} is a file on one machine; allowed for several: postgresql://…"
        yield Finding("database", text, is_fine=False)
        return
    database = open_database(settings)
    try:
        database.check()
    finally:
        database.dispose()
    if url.host in LOCAL:
        text = f"{shown} answers here, and under that name on no other machine: name its host"
        yield Finding("database", text, is_fine=False)
    else:
        yield Finding("database", f"{shown} answers")


def _storage(settings: Settings) -> Iterator[Finding]:
    store = open_store(settings, retry_seconds=STORE_SECONDS)
    key, content = f"checks/{uuid.uuid4()}", b"halfstep"
    obstore.put(store, key, content)
    read = bytes(obstore.get(store, key).bytes())
    obstore.delete(store, key)
    if read != content:
        yield Finding("storage", "a file was read back with different content", is_fine=False)
    elif isinstance(store, LocalStore):
        text = f"{store.prefix} is writable; every node must have this same folder"
        yield Finding("storage", text)
    else:
        yield Finding("storage", f"{settings.storage_url} can be written, read and deleted")


def _interface(settings: Settings) -> Iterator[Finding]:
    name, address = interface(settings)
    if address.startswith("127."):
        text = (
            f"{name} ({address}) is a loopback interface, not reachable from other machines: set "
            "HALFSTEP_NETWORK_INTERFACE"
        )
        yield Finding("interface", text, is_fine=False)
    else:
        yield Finding("interface", f"other nodes reach this machine at {address} ({name})")


def _versions(settings: Settings) -> Iterator[Finding]:
    try:
        own = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        yield Finding(
            "torch", "is not installed in this environment, in which recipes train", is_fine=False
        )
        return
    database = open_database(settings)
    try:
        with database.reading() as session:
            others = {
                worker.name: str(worker.versions.get("torch")) for worker in workers.alive(session)
            }
    except DBAPIError:  # the database does not respond, which is reported, or it has no tables yet
        others = {}
    finally:
        database.dispose()
    differing = [f"{name} has {torch}" for name, torch in others.items() if torch != own]
    text = f"{own} here" + (
        f", but {', '.join(differing)}: a run's nodes need one" if differing else ""
    )
    yield Finding("torch", text, is_fine=not differing)


LOOKS: dict[str, Callable[[Settings], Iterator[Finding]]] = {
    "database": _database,
    "storage": _storage,
    "interface": _interface,
    "torch": _versions,
}


def of_placement(settings: Settings) -> Iterator[Finding]:
    """Check the cluster that starts workers, and the requirements of one of its nodes."""
    try:
        yield from open_placement(settings).check()
    except Exception as error:  # a failing check is a finding
        yield Finding(settings.placement, why(error), is_fine=False)


def _all(settings: Settings, *, is_here_alone: bool) -> Iterator[Finding]:
    yield from findings(settings)
    if settings.placement != "boxes" and not is_here_alone:
        yield from of_placement(settings)


main = App("Check the requirements of multi-node runs.")


@main.callback()
def _group() -> None:
    """Check the requirements of multi-node runs."""


@main.command()
def check(
    here: Annotated[bool, typer.Option("--here", help="Check only this machine")] = False,
    as_json: AsJson = False,
) -> None:
    """Check this machine, and the cluster that HALFSTEP_PLACEMENT names.

    The exit code is 1 if anything is missing.
    """
    try:
        settings = Settings.read()
    except HalfstepError as error:
        sys.exit(f"cluster: {error}")
    is_fine = True
    for finding in _all(settings, is_here_alone=here):
        say(json.dumps(asdict(finding)) if as_json else str(finding))
        is_fine &= finding.is_fine
    sys.exit(not is_fine)


if __name__ == "__main__":
    main()
