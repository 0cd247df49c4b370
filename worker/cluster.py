"""`halfstep cluster check`: what is missing for runs over several machines, in words.

Said of this machine, and where HALFSTEP_PLACEMENT names a cluster, of one of its nodes too.
"""

import importlib.metadata
import json
import shlex
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import obstore
from obstore.store import LocalStore
from sqlalchemy import make_url
from sqlalchemy.exc import DBAPIError

from db import workers
from db.database import open_database
from db.errors import HalfstepError
from db.settings import Settings
from db.storage import open_store, why
from halfstep.output import say
from halfstep.typed import Parser
from worker.gang import interface

STORE_SECONDS = 10.0
NODE_SECONDS = 300.0
LOCAL = {None, "", "localhost", "127.0.0.1", "::1"}


@dataclass(frozen=True)
class Finding:
    """What was looked at, and what was found. is_fine: nothing has to be done."""

    what: str
    text: str
    is_fine: bool = True

    def __str__(self) -> str:
        return f"{'ok ' if self.is_fine else 'NO '} {self.what}: {self.text}"


def look(settings: Settings) -> Iterator[Finding]:
    """Look at what a node needs, from this machine."""
    for what, ask in LOOKS.items():
        try:
            yield from ask(settings)
        except Exception as error:  # one that fails is what was asked for
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
        yield Finding("storage", "what was written there was read otherwise", is_fine=False)
    elif isinstance(store, LocalStore):
        text = f"{store.prefix} can be written: fine if every node has this very folder"
        yield Finding("storage", text)
    else:
        yield Finding("storage", f"{settings.storage_url} can be written, read and deleted")


def _interface(settings: Settings) -> Iterator[Finding]:
    name, address = interface(settings)
    if address.startswith("127."):
        text = f"{name} ({address}) leads to no other machine: set HALFSTEP_INTERFACE"
        yield Finding("interface", text, is_fine=False)
    else:
        yield Finding("interface", f"other nodes reach this machine at {address} ({name})")


def _versions(settings: Settings) -> Iterator[Finding]:
    try:
        own = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        yield Finding("torch", "is not installed here, where recipes train", is_fine=False)
        return
    database = open_database(settings)
    try:
        with database.reading() as session:
            others = {each.name: str(each.versions.get("torch")) for each in workers.alive(session)}
    except DBAPIError:  # it does not answer, which is told, or no server has been there yet
        others = {}
    finally:
        database.dispose()
    unlike = [f"{name} has {torch}" for name, torch in others.items() if torch != own]
    text = f"{own} here" + (f", but {', '.join(unlike)}: a run's nodes need one" if unlike else "")
    yield Finding("torch", text, is_fine=not unlike)


LOOKS: dict[str, Callable[[Settings], Iterator[Finding]]] = {
    "database": _database,
    "storage": _storage,
    "interface": _interface,
    "torch": _versions,
}


def on_a_node(settings: Settings) -> Iterator[Finding]:
    """Have Slurm run the same check on a node, as it would a worker; yield what that finds."""
    options = shlex.split(settings.slurm_options.replace("{devices}", "1"))
    here = [sys.executable, "-m", "worker.cluster", "check", "--here", "--json"]
    try:
        done = subprocess.run(
            ["srun", "--quiet", "--nodes=1", "--ntasks=1", *options, *here],
            capture_output=True,
            text=True,
            timeout=NODE_SECONDS,
            check=False,
        )
    except FileNotFoundError:
        yield Finding("slurm", "there is no srun on this machine", is_fine=False)
        return
    except subprocess.TimeoutExpired:
        text = f"no node was given within {NODE_SECONDS:.0f} s: squeue says why"
        yield Finding("slurm", text, is_fine=False)
        return
    found = [json.loads(line) for line in done.stdout.splitlines()]
    yield from (Finding(each["what"], each["text"], each["is_fine"]) for each in found)
    if done.returncode and all(each["is_fine"] for each in found):
        yield Finding("slurm", done.stderr.strip(), is_fine=False)


def main(words: list[str] | None = None) -> None:
    """Say what is missing; exit with 1 if anything is."""
    parser = Parser(
        prog="halfstep cluster",
        description="Say what is missing for runs over several machines: of this one, and of a "
        "node of the cluster that HALFSTEP_PLACEMENT names.",
    )
    parser.add_argument("action", choices=["check"])
    parser.add_argument("--here", action="store_true", help="look at this machine alone")
    parser.add_argument("--json", action="store_true", help="one JSON object a line, for machines")
    asked = parser.parse_args(words)
    try:
        settings = Settings.read()
    except HalfstepError as error:
        sys.exit(f"cluster: {error}")
    found = list(look(settings))
    for each in found:
        say(_printed(each, "here", as_json=asked.json))
    if settings.placement == "slurm" and not asked.here:
        for each in on_a_node(settings):
            say(_printed(each, "on a node", as_json=asked.json))
            found.append(each)
    sys.exit(not all(each.is_fine for each in found))


def _printed(finding: Finding, where: str, *, as_json: bool) -> str:
    if as_json:
        return json.dumps(asdict(finding) | {"where": where})
    return str(finding) if where == "here" else f"{finding} ({where})"


if __name__ == "__main__":
    main()
