"""What an operator types: joins the `halfstep` command by its entry points (pyproject.toml)."""

import gc
import io
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from alembic.command import upgrade
from sqlalchemy import make_url
from sqlalchemy.orm import Session

from app.html import formats
from app.server_address import telling, where
from app.trash.disk import disk
from db.access import accounts, audit
from db.database import Database, open_database
from db.errors import Conflict, HalfstepError, Invalid, NotFound
from db.files import pruning
from db.files.backup import back_up
from db.files.backup import restore as restore_backup
from db.files.storage import check_store, mismatches, open_store
from db.files.storage import mend as mend_storage
from db.runs import runs, trash
from db.settings import Settings
from db.tables import User
from db.telemetry import metric_pyramids, pyramid
from halfstep.cli.application import App, Command, ServingCommand, single
from halfstep.cli.options import AsJson, RunId
from halfstep.cli.output import print_result, say
from halfstep.process import close_to_others, end_with_parent

if TYPE_CHECKING:
    from app.serve import Server

OPERATOR = "operator"
#: After which a thread of the server that computes gives way to the others.
SWITCH_SECONDS = 0.001


class ServiceCommand(Command):
    """A command of the service: a mistake of the user ends in one sentence."""

    expected_errors: ClassVar[tuple[type[Exception], ...]] = (HalfstepError,)


class ServerCommand(ServingCommand):
    """A command that serves until it is ended; settings that are wrong end in one sentence."""

    expected_errors: ClassVar[tuple[type[Exception], ...]] = (HalfstepError,)


command = single(ServiceCommand)
server_command = single(ServerCommand)


@server_command
def up() -> None:
    """Start server and worker on this machine, and print a sign-in link."""
    close_to_others()
    settings, database = _open()
    check_store(settings)
    listening = _listen(settings)
    server = _server(settings, database)
    _heed_signals(server)  # before there is a worker that could be left behind
    # A session of its own, so that a Ctrl-C reaches the worker once: from us. It is killed with us,
    # lest it keep its name from the next one, which finds what it trained, and that goes on.
    worker = subprocess.Popen(
        [sys.executable, "-m", "halfstep.cli.main", "worker"],
        start_new_session=True,
        preexec_fn=end_with_parent,
    )
    watcher = threading.Thread(target=_stop_with, args=(worker, server), daemon=True)
    watcher.start()
    try:
        _serve(server, listening, settings, database)
    finally:
        if worker.poll() is None:
            worker.terminate()
            say("Stopping: runs leave a checkpoint and will go on from it at the next start.")
        worker.wait()
    # One that we stopped before it was ready has died of our signal, and had no runs yet.
    if worker.returncode not in (0, -signal.SIGTERM):
        raise typer.Exit(1)


@server_command
def server() -> None:
    """Start only the server."""
    close_to_others()
    settings, database = _open()
    check_store(settings)
    listening = _listen(settings)
    server = _server(settings, database)
    _heed_signals(server)
    _serve(server, listening, settings, database)


@command
def link(
    user: Annotated[str, typer.Argument(metavar="NAME", help="Name of the user")],
    as_json: AsJson = False,
) -> None:
    """Print a link that signs a user in once, within a day."""
    with installed() as (settings, database):
        _print_link(settings, database, user, as_json=as_json)


@command
def migrate(
    sql: Annotated[bool, typer.Option("--sql", help="Print the SQL, and change nothing")] = False,
    as_json: AsJson = False,
) -> None:
    """Create the database, or migrate it to this version."""
    if sql:
        printed, database = io.StringIO(), Database(Settings.read().database_url)
        if database.engine.dialect.name == "sqlite":
            # Some changes there copy a table as it is found.
            allowed = "allowed: with PostgreSQL, by HALFSTEP_DATABASE_URL"
            raise Invalid({"--sql": f"{database.name} has no SQL that can be printed; {allowed}"})
        upgrade(database.migrations(printed), "head", sql=True)
        print_result({"sql": printed.getvalue()}, printed.getvalue().rstrip(), as_json=as_json)
        return
    _settings, database = _open()
    print_result({"database": database.name}, f"{database.name} is up to date.", as_json=as_json)


storage = App(
    "Manage storage: list what runs take, delete old files, check files.", cls=ServiceCommand
)


@storage.command("runs")
def _list_storage(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Largest number of runs")] = 20,
    as_json: AsJson = False,
) -> None:
    """List runs by the size of their checkpoints and artifacts, the largest first."""
    with installed() as (settings, database):
        with database.reading() as session:
            largest = runs.newest(session, sort="-stored_bytes", limit=limit)
            count, total = runs.count(session), runs.stored_bytes(session)
            bin_ = trash.contents(session)
        for run, owner in largest:
            told = {"run": run.id, "name": run.name, "status": run.status, "owner": owner}
            size = formats.size(run.stored_bytes)
            text = f"{size:>8}  {run.id:>6}  {run.status:<10} {run.name}  {owner}"
            print_result(told | {"stored_bytes": run.stored_bytes}, text, as_json=as_json)
        space = disk(settings)
        text = (
            f"{formats.size(total)} of {count:,} runs, those shown included\n"
            f"{formats.size(bin_.stored_bytes)} of {bin_.runs:,} deleted ones in the trash"
        )
        if space:
            free, whole = formats.size(space.free_bytes), formats.size(space.total_bytes)
            text += f"\n{free} of {whole} free on the disk of {settings.data}"
        summed = {"runs": count, "stored_bytes": total, "bin": asdict(bin_)}
        print_result(summed | {"disk": asdict(space) if space else None}, text, as_json=as_json)


@storage.command("prune")
def _prune_storage(
    checkpoints: Annotated[
        float | None,
        typer.Option(
            min=0, metavar="DAYS", help="Delete checkpoints older than this, except best and last"
        ),
    ] = None,
    logs: Annotated[
        float | None,
        typer.Option(
            min=0, metavar="DAYS", help="Delete logs and samples of runs that ended earlier"
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only list what would be deleted")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation")] = False,
    limit: Annotated[
        int, typer.Option(min=1, max=1000, help="Largest number of runs to list")
    ] = 20,
    as_json: AsJson = False,
) -> None:
    """List what of ended runs is older than some days, and delete it after confirmation.

    Kept are a run's last checkpoint and its best by checkpoints.keep_best, and all of a run that
    another started from, or that is tagged `pinned`.
    """
    if checkpoints is None and logs is None:
        raise Invalid({"--checkpoints, --logs": "none is told; allowed: at least one of them"})
    if as_json and not (dry_run or yes):
        raise Invalid({"--json": "asks nobody; allowed: with --dry-run or --yes"})
    with installed() as (settings, database):
        rules = pruning.Rules(checkpoint_days=checkpoints, log_days=logs)
        with database.reading() as session:
            found = list(pruning.plan(session, rules))
        by_size = sorted(found, key=lambda each: each.stored_bytes, reverse=True)
        for each in by_size[:limit]:
            size = formats.size(each.stored_bytes)
            text = f"{size:>8}  {each.run_id:>6}  {each.name}: {each.in_words}"
            told = {"run": each.run_id, "name": each.name, "stored_bytes": each.stored_bytes}
            print_result(told | {"goes": each.in_words}, text, as_json=as_json)
        total = sum(each.stored_bytes for each in found)
        text = f"and {len(found) - limit:,} more runs\n" if len(found) > limit else ""
        text += f"{len(found):,} runs, {formats.size(total)} of files"
        print_result({"runs": len(found), "stored_bytes": total}, text, as_json=as_json)
        if dry_run or not found or not (yes or typer.confirm("Delete this for good?")):
            return
        store = open_store(settings)
        pruned = [pruning.prune(database, store, each.run_id, rules) for each in found]
        count, freed = sum(map(bool, pruned)), sum(each.stored_bytes for each in pruned)
        said = {"checkpoints": checkpoints, "logs": logs}
        days = [f"{name} {each:g}" for name, each in said.items() if each is not None]
        with database.writing() as session:
            audit.note_typed(session, "storage prune", *days, f"of {count} runs")
        text = f"{count:,} runs pruned, {formats.size(freed)} freed"
        print_result({"pruned": count, "freed_bytes": freed}, text, as_json=as_json)


@storage.command("check")
def _check_storage(
    deep: Annotated[
        bool, typer.Option("--deep", help="Also verify the SHA-256 of every file")
    ] = False,
    mend: Annotated[bool, typer.Option("--mend", help="Delete what does not match")] = False,
    as_json: AsJson = False,
) -> None:
    """List rows and files that do not match; exit with 1 if any is left."""
    with installed() as (settings, database):
        store = open_store(settings)
        with database.reading() as session:
            found = mismatches(session, store, deep=deep)
        if mend:
            mend_storage(database, store, found)
        for mismatch in found:
            text = f"{mismatch.key}: {mismatch.problem}{'; deleted' if mend else ''}"
            told = {"key": mismatch.key, "problem": mismatch.problem, "deleted": mend}
            print_result(told, text, as_json=as_json)
        print_result({"mismatches": len(found)}, f"{len(found)} do not match.", as_json=as_json)
        raise typer.Exit(1 if found and not mend else 0)


@command
def backup(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="New folder to write")],
    as_json: AsJson = False,
) -> None:
    """Back up database and checkpoints, while everything runs."""
    with installed(migrates=False) as (settings, database):
        if not database.is_current():  # what is backed up is what there is
            raise Conflict(
                f"{database.name} is not of this version: `halfstep migrate` changes that."
            )
        saved = back_up(database, open_store(settings), folder)
        with database.writing() as session:
            audit.note_typed(session, "backup", str(folder))
        kept_in = "the bucket" if settings.storage_url else "the data folder"
        lines = [f"left out, because it is missing or damaged: {key}" for key in saved["left_out"]]
        lines += [
            f"{folder}: {saved['rows']} rows, {saved['files']} files",
            f"not in it: all of {kept_in} that no run names; the key of secrets; settings, and",
            "what opens the bucket",
        ]
        print_result({"folder": str(folder)} | saved, "\n".join(lines), as_json=as_json)


@command
def restore(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder that `backup` wrote")],
    revoke: Annotated[
        bool, typer.Option("--revoke", help="Delete the backup's API tokens and shared links")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Restore a backup into an empty database and storage; the kind of database may differ."""
    settings, database = _open()
    restored = restore_backup(database, open_store(settings), folder, revoke=revoke)
    with database.writing() as session:
        audit.note_typed(session, "restore", str(folder), *(["--revoke"] if revoke else []))
    lines = [
        f"{folder}: {restored['rows']} rows, {restored['files']} files restored",
        "All browsers are signed out; `halfstep link NAME` makes a sign-in link.",
        f"Deliveries of alerts that were due, and are not sent: {restored['unsent']}",
        *_valid_secrets(restored),
    ]
    print_result({"folder": str(folder)} | restored, "\n".join(lines), as_json=as_json)


def _valid_secrets(restored: dict[str, Any]) -> list[str]:
    """Describe the tokens and links that work again, among them those revoked since the backup."""
    tokens, links = restored["tokens"], restored["shared_links"]
    if not tokens and not links:
        return ["No API token and no shared link works."]
    lines = ["These work again, also those revoked since the backup (restore --revoke: none):"]
    for token in tokens:
        reach = "all projects" if token["project"] is None else f"project {token['project']!r}"
        text = f"  API token {token['name']!r} of {token['user']}: {token['kind']}, {reach}"
        lines.append(f"{text}, {_expiry(token)}")
    lines += [f"  shared link {link['id']} of {link['user']}: {_expiry(link)}" for link in links]
    return lines


def _expiry(secret: dict[str, Any]) -> str:
    moment = secret["expires_at"]
    return f"expires {datetime.fromtimestamp(moment, UTC):%Y-%m-%d}" if moment else "never expires"


@command
def rebuild(run: RunId, as_json: AsJson = False) -> None:
    """Rebuild the summaries of a run's steps and metrics."""
    with installed() as (_settings, database):
        with database.writing() as session:
            row = runs.get(session, run, lock=True)  # its recorder waits meanwhile
            pyramid.rebuild(session, run)
            metric_pyramids.rebuild(session, run)
            audit.note_typed(session, "rebuild", f"run {run}")
            skipped = pyramid.count_skips(session.connection(), run)
            steps = f"{row.step:,} steps, {skipped:,} of them skipped"
        text = f"run {run} ({row.name}): rebuilt what its charts are drawn from: {steps}"
        told = {"run": run, "name": row.name, "steps": row.step, "skipped": skipped}
        print_result(told, text, as_json=as_json)


def _open() -> tuple[Settings, Database]:
    """Read the settings and bring the database up to date. Raises Invalid, DatabaseUnreachable."""
    settings = Settings.read()
    database = open_database(settings)
    database.migrate()
    return settings, database


@contextmanager
def installed(*, migrates: bool = True) -> Iterator[tuple[Settings, Database]]:
    """Do the same where an installation is already; elsewhere it would make a new one, and empty.

    Raises NotFound.
    """
    settings = Settings.read()
    url = make_url(settings.database_url)
    if url.get_backend_name() == "sqlite" and not Path(url.database or "").exists():
        raise NotFound(
            f"There is no installation here: {url.database} is not there. Go to the folder that "
            "`halfstep up` was started in, or name its data by HALFSTEP_DATA."
        )
    database = open_database(settings)
    try:
        if migrates:
            database.migrate()
        yield settings, database
    finally:
        database.dispose()


def _listen(settings: Settings) -> socket.socket:
    """Take the port before anything else starts. Raises Invalid."""
    listening = socket.socket(socket.AF_INET6 if ":" in settings.host else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((settings.host, settings.port))
    except OSError as error:
        message = f"cannot listen on {settings.host}:{settings.port}: {error.strerror}"
        raise Invalid({"HALFSTEP_PORT": f"{message}; choose another port"}) from error
    return listening


def _server(settings: Settings, database: Database) -> "Server":
    from app.serve import Server  # half a second that the other commands need not wait

    server = Server(settings, database)
    gc.collect()
    gc.freeze()  # what is loaded stays: to go through it took 0.15 s of one large page in ten
    # While a run sends many points, one edit in ten took 0.13 s at Python's 5 ms, 0.08 s at this.
    sys.setswitchinterval(SWITCH_SECONDS)
    return server


def _heed_signals(server: "Server") -> None:
    """Let each signal that means the end stop the server, and nothing else.

    When uvicorn has stopped it sends itself once more what it was stopped by, which by default
    would end this process there and then.
    """

    def stop(*_signal: Any) -> None:
        server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, stop)


def _serve(
    server: "Server", listening: socket.socket, settings: Settings, database: Database
) -> None:
    with telling(settings):
        _print_link(settings, database)
        server.run(sockets=[listening])


def _stop_with(worker: "subprocess.Popen[bytes]", server: "Server") -> None:
    """Stop the server when the worker ends: neither is of use alone."""
    code = worker.wait()
    if not server.should_exit:
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        say(f"The worker {how}, so that the server stops too. What trained goes on at a new start.")
    server.should_exit = True


def _print_link(
    settings: Settings, database: Database, name: str | None = None, *, as_json: bool = False
) -> None:
    """Print a link for somebody, or else for the first operator."""
    with database.writing() as session:
        who = accounts.first_admin(session) if name is None else None
        who = who or _named(session, name or OPERATOR)
        if who.deactivated_at is not None:
            raise Conflict(f"{who.name} was shut out: `halfstep user change {who.name} activate`.")
        token = accounts.make_link_token(session, who)
        audit.note_typed(session, "link", who.name)
    print_link(settings, who.name, token, as_json=as_json)


def _named(session: Session, name: str) -> User:
    """Return the user of that name; the very first is made. Raises NotFound, Invalid."""
    if accounts.has_users(session) and accounts.find_user(session, name) is None:
        called = name[: accounts.NAME_CHARACTERS]
        raise NotFound(f"There is no user {called!r}: `halfstep user add NAME` makes one.")
    return accounts.user_named(session, name)


def _local_address(settings: Settings) -> str:
    """Return the address of the server that runs on this machine."""
    host, port = where(settings)
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def print_link(settings: Settings, name: str, token: str, *, as_json: bool = False) -> None:
    """Print a link that signs a user in once, at the public address if there is one."""
    link = f"{settings.public_url.rstrip('/') or _local_address(settings)}/?token={token}"
    text = "The link signs you in once, within a day. `halfstep link NAME` makes another."
    print_result(
        {"name": name, "link": link}, f"\n  Halfstep: {link}\n\n  {text}\n", as_json=as_json
    )
