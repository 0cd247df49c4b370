"""Databases built by the migrations: SQLite and PostgreSQL run the same tests."""

import gc
import os
import pwd
import re
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any
from zlib import crc32

import psutil
import pytest
from hypothesis import settings
from pwdlib import PasswordHash
from pwdlib.hashers.argon2 import Argon2Hasher
from sqlalchemy import event

from db.access import accounts
from db.database import Database
from db.tables import User
from tests import compiled, swept
from tests.buckets import SERVERS, Bucket
from tests.site import Site

# Some containers set it. Each of the suite's hundreds of processes would compile all it imports.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# torch reads it as it is loaded. Threads spin while they wait for their piece of a tiny product:
# where several processes share two cores, a small loop takes four times as much of them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Few tests need the sidecar of a watched script; those turn it on.
os.environ.setdefault("HALFSTEP_CONSOLE", "no")
os.environ.setdefault("HALFSTEP_SYSTEM", "no")
os.environ.setdefault("HALFSTEP_GIT", "no")
#: Variables of the tests and of `make`.
OWN = "TEST_*,GATE,COLD,FAULTS,CLUSTERS,DIAGNOSIS*,FUZZ_ROUNDS,GPU_TESTS_DEVICE"
os.environ["HALFSTEP_OTHER_VARIABLES"] = ",".join(f"HALFSTEP_{each}" for each in OWN.split(","))

settings.register_profile("all", deadline=None)  # a busy machine is no fault
settings.register_profile("halfstep", deadline=None, max_examples=6)
settings.load_profile("halfstep")

ID_LENGTH = 200  # of a parametrized value
FIRST_TESTS = pytest.StashKey[dict[Any, str]]()  # of each module, the first that uses a database


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--database", choices=("sqlite", "postgresql", "both"), default="both")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "database_url" in metafunc.fixturenames:
        chosen = metafunc.config.getoption("--database")
        kinds = ["sqlite", "postgresql"] if chosen == "both" else [chosen]
        if only := metafunc.definition.get_closest_marker("only_on"):
            kinds = [kind for kind in kinds if kind in only.args]
        if os.environ.get("HALFSTEP_FAULTS") != "full":
            kinds = _shorten(kinds, metafunc)
        metafunc.parametrize("database_url", _databases(kinds, metafunc), indirect=True)


def _databases(kinds: list[str], metafunc: pytest.Metafunc) -> list[Any]:
    """Mark the second database as extended, unless the test's subject is SQL.

    A test with a bucket is about the bucket.
    """
    has_marker = metafunc.definition.get_closest_marker
    is_sample = has_marker("sql_sample") and _is_first_with_database(metafunc)
    is_about_sql = (has_marker("sql") or is_sample) and not has_marker("one_database")
    if len(kinds) < 2 or (is_about_sql and "bucket" not in metafunc.fixturenames):
        return kinds
    return [kinds[0], *(pytest.param(kind, marks=pytest.mark.extended) for kind in kinds[1:])]


def _is_first_with_database(metafunc: pytest.Metafunc) -> bool:
    """Return whether a test is its module's first with a database of any kind."""
    first: dict[Any, str] = metafunc.config.stash.setdefault(FIRST_TESTS, {})
    return first.setdefault(metafunc.module, metafunc.definition.name) == metafunc.definition.name


def pytest_make_parametrize_id(val: object) -> str | None:
    """Abbreviate long values in test ids, which each process receives and each report repeats.

    An id of 16 MB, of a file that is too large, took seconds in all of them.
    """
    is_long = isinstance(val, str | bytes) and len(val) > ID_LENGTH
    return f"{val[:20]!a}...{len(val)}" if is_long else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Turn garbage collection off while modules load, since it would take half of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(50_000, 20, 100)  # by default it takes a tenth of the tests' time
        gc.enable()


#: Tests of signed-in pages, and those that start servers, workers, browsers or clusters, or train
#: for long: not in `make check`. Nor are further variations of a parametrized test.
SLOW_FIXTURES = {"address", "browser", "bucket", "server", "site"}
SLOW_FOLDERS = {"clusters", "diagnosis", "e2e", "examples", "faults", "frameworks"}
SLOW_FOLDERS |= {"gpu", "images", "journeys"}
SLOW_MODULE = re.compile(r"^pytestmark = \[?pytest\.mark\.slow\b", re.M)
FOLDER = Path(__file__).parent
#: Not in `make test`: they have targets of their own, such as test-faults and test-clusters.
EXTENDED_FOLDERS = {"clusters", "examples", "faults", "frameworks", "gpu", "images", "journeys"}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import folders and modules that the marker expression excludes as a whole."""
    expression = config.option.markexpr
    folders = {"not slow": SLOW_FOLDERS, "not extended": EXTENDED_FOLDERS}
    left_out = set().union(*(folders[mark] for mark in folders if mark in expression))
    is_left_out = collection_path.parent == FOLDER and collection_path.name in left_out
    if collection_path.name.startswith("test_") and "not slow" in expression:
        is_left_out |= bool(SLOW_MODULE.search(collection_path.read_text()))
    return True if is_left_out else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the slow tests, and spread those that wait; see _spread.

    Of several values of a function `make test` runs the first on PostgreSQL.
    """
    functions: set[str] = set()
    on: dict[str, set[str]] = {"sqlite": set(), "postgresql": set()}  # functions by database
    for item in items:
        function = item.nodeid.partition("[")[0]
        kind = getattr(getattr(item, "callspec", None), "params", {}).get("database_url")
        if kind == "postgresql" and all(function in its for its in on.values()):
            item.add_marker("extended")
        if kind in on:  # not where no database is left, and the test is skipped
            on[kind].add(function)
        fixtures = SLOW_FIXTURES.intersection(getattr(item, "fixturenames", ()))
        if fixtures or SLOW_FOLDERS.intersection(item.path.parts) or function in functions:
            item.add_marker("slow")
        functions.add(function)
        if EXTENDED_FOLDERS.intersection(item.path.parts):
            item.add_marker("extended")
    _spread(items)


def _spread(items: list[pytest.Item]) -> None:
    """Spread tests that wait for processes among the others, which fill the waits.

    They are not spread to the end, where nothing would fill the waits.
    """
    waiting = [item for item in items if "site" in getattr(item, "fixturenames", ())]
    busy = [item for item in items if "site" not in getattr(item, "fixturenames", ())]
    placed = [*_place_items(waiting, end=0.8), *_place_items(busy, end=1.0)]
    items[:] = [item for _place, item in sorted(placed, key=itemgetter(0))]


def _place_items(items: list[pytest.Item], end: float) -> list[tuple[float, pytest.Item]]:
    return [(end * i / len(items), item) for i, item in enumerate(items)]


def _shorten(kinds: list[str], metafunc: pytest.Metafunc) -> list[str]:
    """Return the databases for long tests: one for each fault, browser test and test with workers.

    For a browser all databases are equal, and the queries of a worker's processes are tested on
    both by tests/db and tests/app. A fault that is marked `sql` is tested on both.
    """
    parts = metafunc.definition.path.parts
    if "faults" in parts:
        return kinds if metafunc.definition.get_closest_marker("sql") else kinds[-1:]
    if "e2e" in parts or "journeys" in parts or "site" in metafunc.fixturenames:
        return kinds and [kinds[crc32(metafunc.function.__name__.encode()) % len(kinds)]]
    return kinds


@pytest.fixture(scope="session")
def postgresql_server() -> Iterator[str]:
    """Run a PostgreSQL server for all tests of this process."""
    with running_postgresql() as server:
        yield server


@contextmanager
def running_postgresql() -> Iterator[str]:
    """Run a private PostgreSQL server on a Unix socket; yield its URL without a database."""
    folder = Path(tempfile.mkdtemp(prefix="halfstep-pg-", dir="/tmp"))
    if user := postgresql_user():
        os.chown(folder, pwd.getpwnam(user).pw_uid, -1)
    _postgresql("initdb", folder, "-U", "halfstep", "-A", "trust", "-N", "-E", "UTF8")
    postgresql_control(folder, "start")
    try:
        yield f"postgresql+psycopg://halfstep@/{{name}}?host={folder}"
    finally:
        postgresql_control(folder, "stop", "-m", "immediate")
        shutil.rmtree(folder)


def postgresql_control(folder: Path, action: str, *arguments: str) -> None:
    """Start or stop a folder's server, and wait for it."""
    arguments += ("-t", "600")  # a busy machine is no fault
    if action == "start":
        options = f"-k {folder} -c listen_addresses='' -c fsync=off -c max_connections=100"
        arguments += ("-o", options, "-l", f"{folder}/log")
    _postgresql("pg_ctl", folder, "-w", action, *arguments)


def _postgresql(program: str, folder: Path, *arguments: str) -> None:
    command = [f"{postgresql_binaries()}/{program}", "-D", str(folder / "data"), *arguments]
    subprocess.run(command, check=True, capture_output=True, user=postgresql_user(), cwd=folder)


def postgresql_user() -> str | None:
    """Return the user for PostgreSQL, which does not run as root; Debian's package adds one."""
    return "postgres" if os.geteuid() == 0 else None


def postgresql_binaries() -> str:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if found:
        return str(found[-1].parent)
    if path := shutil.which("initdb"):
        return str(Path(path).parent)
    raise pytest.UsageError("PostgreSQL's server is missing: apt-get install postgresql")


@pytest.fixture(scope="session")
def postgresql_template(postgresql_server: str) -> str:
    """Migrate one database, from which every test's own is copied."""
    swept.execute(postgresql_server, "CREATE DATABASE template_halfstep")
    database = Database(postgresql_server.format(name="template_halfstep"))
    database.migrate()
    database.dispose()
    return "template_halfstep"


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Migrate one file, from which every test's own is copied."""
    path = tmp_path_factory.mktemp("template") / "halfstep.db"
    database = Database(f"sqlite:///{path}")
    database.migrate()
    database.dispose()  # the last connection to close leaves one file without a journal
    return path


@pytest.fixture
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Yield the URL of a fresh, migrated database of this test's kind."""
    if request.param == "sqlite":
        path = tmp_path / "halfstep.db"
        shutil.copy(request.getfixturevalue("sqlite_template"), path)
        yield f"sqlite:///{path}"
        return
    server = request.getfixturevalue("postgresql_server")
    template = request.getfixturevalue("postgresql_template")
    if "site" in request.fixturenames:  # processes that may be late to end: a database of its own
        with swept.fresh(server, template) as name:
            yield server.format(name=name)
        return
    with request.getfixturevalue("postgresql_swept").using() as name:
        yield server.format(name=name)


@pytest.fixture(scope="session")
def postgresql_swept(postgresql_server: str, postgresql_template: str) -> Iterator[swept.Swept]:
    """A database for many tests that is emptied for each."""
    database = swept.Swept(postgresql_server, postgresql_template)
    yield database
    database.drop()


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """Yield a connection to the test's own database."""
    database = Database(database_url)
    compiled.share(database)
    if database.engine.dialect.name == "sqlite":
        event.listen(database.engine, "connect", _sync_nothing)
    yield database
    database.dispose()


def _sync_nothing(connection: Any, _record: Any) -> None:
    # As PostgreSQL's server here with fsync=off: what is thrown away need outlive no power cut.
    connection.execute("PRAGMA synchronous=OFF")


#: With what the product hashes passwords.
PASSWORDS = accounts._passwords


@pytest.fixture(scope="session", autouse=True)
def own_state(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Hide the user's own `halfstep up` from watched scripts."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(scope="session", autouse=True)
def cheap_passwords() -> None:
    """Use cheap hashes, because a secure one takes a tenth of a second and tests make hundreds."""
    accounts._passwords = PasswordHash((Argon2Hasher(time_cost=1, memory_cost=8, parallelism=1),))


@pytest.fixture
def ada(database: Database) -> User:
    """A user named Ada."""
    with database.writing() as session:
        return accounts.user_named(session, "ada")


@pytest.fixture
def token(database: Database, ada: User) -> str:
    """Return an API token of Ada's."""
    with database.writing() as session:
        made, _row = accounts.make_api_token(session, ada, "script")
    return made


@pytest.fixture
def site(tmp_path: Path, database: Database, database_url: str, ada: User) -> Iterator[Site]:
    """A fresh data folder for real workers, all of which end with the test."""
    data = tmp_path / "data"
    data.mkdir()
    yield Site(data, database, database_url, ada)
    for process in psutil.process_iter(["cmdline"]):
        command = " ".join(process.info["cmdline"] or ())
        assert str(tmp_path) not in command, f"left running: {command}"


@pytest.fixture(scope="session", params=SERVERS)
def bucket_port(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[int]:
    """Yield the port of a server of buckets."""
    with SERVERS[request.param](tmp_path_factory.mktemp(request.param)) as port:
        yield port


@pytest.fixture
def bucket(bucket_port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """Yield an empty bucket that is set in the environment."""
    made = Bucket(bucket_port, f"test-{uuid.uuid4()}")
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    yield made
    made.proxy.close()


@pytest.fixture
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what torch.compile compiled for other tests in this process."""
    if frames := sys.modules.get("torch._dynamo.convert_frame"):
        monkeypatch.setattr(frames, "FRAME_COUNTER", 0)
