"""Commands of the server, added to `halfstep` by entry points (pyproject.toml)."""

import gc
import io
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from sqlalchemy import make_url
from sqlalchemy.orm import Session

from app.command_classes import ServiceCommand, command, server_command
from app.server_address import explain_local, publish_address, running_address, url_of
from app.trash.disk import disk
from db.access import accounts, audit
from db.database import Database, open_database, revisions
from db.errors import Conflict, Invalid, NotFound
from db.files import pruning, run_damage
from db.files.backup import back_up
from db.files.backup import restore as restore_backup
from db.files.object_store import check_store, open_store
from db.files.step_files import STEPS
from db.files.storage import mend as mend_storage
from db.files.storage import mismatches
from db.runs import runs, trash
from db.settings import Settings
from db.tables import Artifact, CheckpointFile, User
from db.telemetry import damage_search, metric_block_writer, step_block_writer
from db.telemetry.step_conversion import convert as convert_steps
from db.upgrade_estimate import Estimate, NotMeasured, estimate, measure_free_bytes
from halfstep.cli import logs
from halfstep.cli.application import App
from halfstep.cli.options import AsJson, RunId
from halfstep.cli.output import print_notes, print_result
from halfstep.number_formats import duration, number, quantity
from halfstep.number_formats import size as size_text
from halfstep.process import close_to_others, loading_modules, on_signals

if TYPE_CHECKING:
    from app.serve import Server

OPERATOR = "operator"
#: Interval at which Python switches between threads.
SWITCH_SECONDS = 0.001


class Installation(NamedTuple):
    """A migrated installation, for the server of this process."""

    settings: Settings
    database: Database
    listening: socket.socket


@server_command
def server() -> None:
    """Start only the server."""
    close_to_others()
    installation = prepare()
    server = make_server(installation.settings, installation.database)
    handle_signals(server)
    serve(server, installation)


@command
def link(
    user: Annotated[str, typer.Argument(metavar="NAME", help="Name of the user")],
    as_json: AsJson = False,
) -> None:
    """Print a link that signs a user in once, within a day."""
    with open_installation() as (settings, database):
        _print_link(settings, database, user, as_json=as_json)


@command
def migrate(
    sql: Annotated[bool, typer.Option("--sql", help="Print the SQL without executing it")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Print what a start would migrate; change nothing")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Create the database, or migrate it to this version."""
    if check:
        _print_due_migrations(as_json=as_json)
        return
    if sql:
        from alembic.command import upgrade

        printed, database = io.StringIO(), Database(Settings.read().database_url)
        if database.engine.dialect.name == "sqlite":
            # Some migrations on SQLite copy a table as it exists.
            allowed = "use PostgreSQL (HALFSTEP_DATABASE_URL)"
            raise Invalid({"--sql": f"{database.name} has no SQL to print; {allowed}"})
        upgrade(database.migrations(printed), "head", sql=True)
        print_result({"sql": printed.getvalue()}, printed.getvalue().rstrip(), as_json=as_json)
        return
    _settings, database = _open()
    print_result({"database": database.name}, f"{database.name} is up to date.", as_json=as_json)


def _print_due_migrations(*, as_json: bool) -> None:
    """Print the migrations that are due, and about the time and the space that they take."""
    with open_installation(migrates=False) as (settings, database):
        known, revision = revisions(), database.read_known_revision()
        due = [other for other in known if revision is not None and other > revision]
        found, problem = Estimate(), ""
        if revision is not None:
            try:
                found = estimate(database, revision, settings.data, is_due=bool(due))
            except NotMeasured as error:
                problem = str(error)
        needed, free = found.copy_bytes + found.conversion_bytes, measure_free_bytes(database)
    lines = [f"{database.name} has revision {revision}; this version needs {known[-1]}."]
    lines.append(
        f"{len(due)} migrations are due: {', '.join(due)}." if due else "No migration is due."
    )
    if problem:
        lines.append(f"Time and space could not be measured: {problem}.")
    elif due or found.runs:
        lines += _describe_upgrade(found, is_due=bool(due))
        space = "of an unknown size" if free is None else f"{size_text(free)} free"
        lines.append(f"Disk of the database: about {size_text(needed)} needed, {space}.")
    is_short = free is not None and free < needed
    if is_short:
        lines.append("Free space on it before the upgrade.")
    fields = {"database": database.name, "revision": revision, "due": due, "problem": problem}
    fields |= asdict(found) | {"needed_bytes": needed, "free_bytes": free}
    print_result(fields, "\n".join(lines), as_json=as_json)
    if is_short:
        raise typer.Exit(1)


def _describe_upgrade(found: Estimate, *, is_due: bool) -> list[str]:
    """Describe the parts of an upgrade."""
    lines = ["Measured on a sample of this database:"]
    if found.copy_bytes:
        size = size_text(found.copy_bytes)
        lines.append(f"- copy of the database: {_format_estimate(found.copy_seconds)}, {size}")
    if is_due:
        taken = _format_estimate(found.migration_seconds)
        lines.append(f"- migrations: {taken}; servers and workers start after them")
    if found.runs:
        parts = f"about {found.steps:,} steps and {found.points:,} points of metrics"
        taken, size = _format_estimate(found.conversion_seconds), size_text(found.conversion_bytes)
        lines.append(
            f"- conversion of {parts} of {quantity(found.runs, 'run')} into blocks, by a server in "
            f"the background: {taken}, up to {size} until the earlier rows are deleted"
        )
    return lines


def _format_estimate(seconds: float) -> str:
    """Format an estimate, which has no parts of a second."""
    return "less than a second" if seconds < 1 else f"about {duration(round(seconds))}"


storage = App(
    "Manage storage: list runs by size, delete old files, check files.", cls=ServiceCommand
)


@storage.command("runs")
def _list_storage(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Maximum number of runs")] = 20,
    as_json: AsJson = False,
) -> None:
    """List runs by the size of their checkpoints and artifacts, the largest first."""

    with open_installation() as (settings, database):
        with database.reading() as session:
            largest = runs.newest(session, sort="-stored_bytes", limit=limit)
            count, total = runs.count(session), runs.sum_stored_bytes(session)
            contents = trash.contents(session)
        for run, owner in largest:
            fields = {"run": run.id, "name": run.name, "status": run.status, "owner": owner}
            size = size_text(run.stored_bytes)
            text = f"{size:>8}  {run.id:>6}  {run.status:<10} {run.name}  {owner}"
            print_result(fields | {"stored_bytes": run.stored_bytes}, text, as_json=as_json)
        space = disk(settings)
        text = (
            f"{size_text(total)} of {count:,} runs, those shown included\n"
            f"{size_text(contents.stored_bytes)} of {contents.runs:,} deleted ones in the trash"
        )
        if space:
            free, whole = (
                size_text(space.free_bytes),
                size_text(space.total_bytes),
            )
            text += f"\n{free} of {whole} free on the disk of {settings.data}"
        summed = {"runs": count, "stored_bytes": total, "trash": asdict(contents)}
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
        int, typer.Option(min=1, max=1000, help="Maximum number of runs to list")
    ] = 20,
    as_json: AsJson = False,
) -> None:
    """List old files of ended runs, and delete them after confirmation.

    Never deleted: a run's last checkpoint, its best one by checkpoints.keep_best, and files of runs
    that another run started from, or that are tagged `pinned`.
    """

    if checkpoints is None and logs is None:
        raise Invalid({"--checkpoints, --logs": "not given; use at least one of them"})
    if as_json and not (dry_run or yes):
        raise Invalid(
            {"--json": "cannot ask for confirmation without a terminal; add --dry-run or --yes"}
        )
    with open_installation() as (settings, database):
        rules = pruning.Rules(checkpoint_days=checkpoints, log_days=logs)
        with database.reading() as session:
            plan = list(pruning.plan(session, rules))
        by_size = sorted(plan, key=lambda row: row.stored_bytes, reverse=True)
        for row in by_size[:limit]:
            size = size_text(row.stored_bytes)
            text = f"{size:>8}  {row.run_id:>6}  {row.name}: {row.in_words}"
            fields = {"run": row.run_id, "name": row.name, "stored_bytes": row.stored_bytes}
            print_result(fields | {"goes": row.in_words}, text, as_json=as_json)
        total = sum(row.stored_bytes for row in plan)
        text = f"and {len(plan) - limit:,} more runs\n" if len(plan) > limit else ""
        text += f"{len(plan):,} runs, {size_text(total)} of files"
        print_result({"runs": len(plan), "stored_bytes": total}, text, as_json=as_json)
        if dry_run or not plan or not (yes or typer.confirm("Delete this permanently?")):
            return
        store = open_store(settings)
        pruned = [pruning.prune(database, store, row.run_id, rules) for row in plan]
        count, freed = sum(map(bool, pruned)), sum(row.stored_bytes for row in pruned)
        ages = {"checkpoints": checkpoints, "logs": logs}
        days = [f"{name} {number(age)}" for name, age in ages.items() if age is not None]
        with database.writing() as session:
            audit.note_typed(session, "storage prune", *days, f"of {count} runs")
        text = f"{count:,} runs pruned, {size_text(freed)} freed"
        print_result({"pruned": count, "freed_bytes": freed}, text, as_json=as_json)


@storage.command("check")
def _check_storage(
    deep: Annotated[
        bool, typer.Option("--deep", help="Also verify the SHA-256 of every file")
    ] = False,
    mend: Annotated[
        bool, typer.Option("--mend", help="Delete files and records that do not match")
    ] = False,
    lost: Annotated[
        bool,
        typer.Option("--lost", help="With --mend: proceed even if no file of steps exists"),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List rows and files that do not match; exit with 1 if any is left."""
    with open_installation() as (settings, database):
        store = open_store(settings)
        with database.reading() as session:
            mismatched = mismatches(session, store, deep=deep)
            damaged = list(damage_search.find_in_blocks(session.connection())) if deep else []
        if mend:
            mend_storage(database, store, mismatched, lost=lost)
        for mismatch in mismatched:
            text = f"{mismatch.key}: {mismatch.problem}{'; deleted' if mend else ''}"
            fields = {"key": mismatch.key, "problem": mismatch.problem, "deleted": mend}
            print_result(fields, text, as_json=as_json)
        for block in damaged:
            fields = {"run": block.run_id, "kind": block.kind, "name": block.name}
            fields |= {"first": block.first, "last": block.last, "problem": "damaged"}
            print_result(fields, f"{block}: damaged", as_json=as_json)
        rows = [mismatch.row for mismatch in mismatched]
        of_files = {row.run_id for row in rows if isinstance(row, CheckpointFile | Artifact)}
        run_damage.check_all(database, store, of_files | {block.run_id for block in damaged})
        count = len(mismatched)
        print_result({"mismatches": count}, f"{count} do not match.", as_json=as_json)
        raise typer.Exit(1 if damaged or (mismatched and not mend) else 0)


@command
def backup(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="New folder to write")],
    previous: Annotated[
        Path | None,
        typer.Option(
            "--previous", help="Earlier backup on the same disk, whose unchanged files are linked"
        ),
    ] = None,
    verifies: Annotated[
        bool, typer.Option("--verify", help="Restore it into a scratch database as a test")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Back up while everything runs; exit with 1 if steps are damaged or left out."""
    with open_installation(migrates=False) as (settings, database):
        if not database.is_current():  # a backup must not change the database
            raise Conflict(
                f"{database.name} has an older version of the tables: run `halfstep migrate` first."
            )
        saved = back_up(
            database, open_store(settings), folder, previous=previous, verifies=verifies
        )
        with database.writing() as session:
            audit.note_typed(session, "backup", str(folder))
        storage_name = "the bucket" if settings.storage_url else "the data folder"
        lines = [f"left out, because it is missing or damaged: {key}" for key in saved["left_out"]]
        text = "damaged, and so in this backup; an earlier one may have it"
        lines += [f"{text}: {block}" for block in saved["damaged"]]
        lines += [
            f"{folder}: {saved['rows']} rows, {saved['files']} files, "
            f"{saved['linked']} of them linked",
            f"not included: files of {storage_name} that no run names; the secrets' key; settings;",
            "credentials of the bucket",
        ]
        print_result({"folder": str(folder)} | saved, "\n".join(lines), as_json=as_json)
        if saved["damaged"] or any(key.startswith(f"{STEPS}/") for key in saved["left_out"]):
            raise typer.Exit(1)  # there is no other copy of these steps


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
        "All browsers are signed out; `halfstep link NAME` prints a sign-in link.",
        f"Pending alert deliveries that will not be sent: {restored['unsent']}",
        *_valid_secrets(restored),
    ]
    print_result({"folder": str(folder)} | restored, "\n".join(lines), as_json=as_json)


def _valid_secrets(restored: dict[str, Any]) -> list[str]:
    """Describe the tokens and links that are valid again, including those revoked since."""
    tokens, links = restored["tokens"], restored["shared_links"]
    if not tokens and not links:
        return ["No API token and no shared link works."]
    lines = [
        "These work again, including those revoked since the backup (restore --revoke removes "
        "them):"
    ]
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
def rebuild(
    run: RunId,
    lost: Annotated[
        bool,
        typer.Option("--lost", help="Proceed even if steps are missing, which then have no chart"),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Rebuild the summaries of a run's steps and metrics."""
    with open_installation() as (_settings, database):
        convert_steps(database, run)
        with database.writing() as session:
            row = runs.get(session, run, lock=True)  # blocks its recorder
            step_block_writer.rebuild(session.connection(), run, lost=lost)
            metric_block_writer.rebuild(session.connection(), run)
            audit.note_typed(session, "rebuild", f"run {run}")
            steps = f"{quantity(row.step, 'step')}, {row.skipped:,} of them skipped"
        text = f"run {run} ({row.name}): rebuilt the data of its charts: {steps}"
        fields = {"run": run, "name": row.name, "steps": row.step, "skipped": row.skipped}
        print_result(fields, text, as_json=as_json)


def _open() -> tuple[Settings, Database]:
    """Read the settings and migrate the database. Raises Invalid, DatabaseUnreachable."""
    settings = Settings.read()
    database = open_database(settings)
    database.migrate()
    return settings, database


@contextmanager
def open_installation(*, migrates: bool = True) -> Iterator[tuple[Settings, Database]]:
    """Open an existing installation, instead of creating an empty one. Raises NotFound."""
    settings = Settings.read()
    url = make_url(settings.database_url)
    if url.get_backend_name() == "sqlite" and not Path(url.database or "").exists():
        raise NotFound(
            f"There is no installation here: {url.database} does not exist. Run this in the folder "
            "where `halfstep up` was started, or set HALFSTEP_DATA."
        )
    database = open_database(settings)
    try:
        if migrates:
            database.migrate()
        yield settings, database
    finally:
        database.dispose()


def prepare() -> Installation:
    """Migrate the database, check the store and bind the port. Raises Invalid and others."""
    settings, database = _open()
    check_store(settings)
    return Installation(settings, database, _listen(settings))


def _listen(settings: Settings) -> socket.socket:
    """Bind the port before anything else starts. Raises Invalid."""
    listening = socket.socket(socket.AF_INET6 if ":" in settings.host else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((settings.host, settings.port))
        listening.listen()  # the link is printed before the server accepts connections
    except OSError as error:
        message = f"cannot listen on {settings.host}:{settings.port}: {error.strerror}"
        raise Invalid({"HALFSTEP_PORT": f"{message}; choose another port"}) from error
    return listening


def make_server(settings: Settings, database: Database) -> "Server":
    """Return the server, with its log configured."""
    with loading_modules():
        from app.serve import Server  # takes more than a second, which other commands save

    logs.configure("server", settings.log_level, settings.log_format, sys.stderr)
    server = Server(settings, database)
    gc.collect()
    gc.freeze()  # scanning the loaded modules took 0.15 s of one large page in ten
    # While a run uploads many points, one edit in ten took 0.13 s with Python's 5 ms, 0.08 s with
    # this.
    sys.setswitchinterval(SWITCH_SECONDS)
    return server


def handle_signals(server: "Server") -> None:
    """Stop the server on SIGINT, SIGTERM and SIGHUP.

    uvicorn raises the signal again when it has stopped, which would end this process with the
    default handler.
    """

    def stop(*_signal: object) -> None:
        server.should_exit = True

    on_signals(stop)


def serve(server: "Server", installation: Installation) -> None:
    """Print a sign-in link, and serve until the server is to exit."""
    settings, database, listening = installation
    with publish_address(settings):
        _print_link(settings, database)
        server.run(sockets=[listening])


def _print_link(
    settings: Settings, database: Database, name: str | None = None, *, as_json: bool = False
) -> None:
    """Print a sign-in link for a user, by default for the first admin."""
    with database.writing() as session:
        user = accounts.first_admin(session) if name is None else None
        user = user or named(session, name or OPERATOR)
        if user.deactivated_at is not None:
            text = f"{user.name} is deactivated: `halfstep user change {user.name} activate`."
            raise Conflict(text)
        token = accounts.make_link_token(session, user)
        audit.note_typed(session, "link", user.name)
    print_link(settings, user.name, token, is_for_others=name is not None, as_json=as_json)


def named(session: Session, name: str) -> User:
    """Return a user by name; the first user is created. Raises NotFound, Invalid."""
    if accounts.has_users(session) and accounts.find_user(session, name) is None:
        shown = name[: accounts.NAME_CHARACTERS]
        raise NotFound(f"There is no user {shown!r}: `halfstep user add NAME` creates one.")
    return accounts.user_named(session, name)


def local_address(settings: Settings) -> str:
    """Return the URL of the server on this machine."""
    return url_of(*running_address(settings))


def sign_in_link(settings: Settings, token: str) -> str:
    """Return a link with the public address if there is one."""
    return f"{settings.public_url.rstrip('/') or local_address(settings)}/?token={token}"


def print_link(
    settings: Settings, name: str, token: str, *, is_for_others: bool = True, as_json: bool = False
) -> None:
    """Print a one-time sign-in link."""
    link = sign_in_link(settings, token)
    reach = explain_local(link) if is_for_others else ""
    text = "The link signs you in once, within a day. `halfstep link NAME` prints another."
    print_result(
        {"name": name, "link": link}, f"\n  Halfstep: {link}\n\n  {text}\n", as_json=as_json
    )
    print_notes([reach] if reach else [], as_json=as_json)
