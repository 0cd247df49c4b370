"""Installations of earlier versions, unpacked as before an upgrade."""

import json
import lzma
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from obstore.store import LocalStore
from sqlalchemy import MetaData, create_engine, select

from db.database import Database
from db.tables import StepConversion
from db.telemetry import step_rows
from db.telemetry.pyramid import END
from db.telemetry.step_rows import StepRow
from tests import swept
from tests.conftest import postgresql_binaries, postgresql_user
from tests.marks import sampled
from tests.upgrades.build import INSTALLATIONS

NAMES = sorted(path.name.partition(".")[0] for path in INSTALLATIONS.glob("*.tar.xz"))
Rows = dict[str, list[dict[str, Any]]]


class Old:
    """An installation of an earlier version."""

    def __init__(self, commit: str, root: Path, url: str) -> None:
        self.commit, self.root, self.url = commit, root, url
        self.data, self.offline = root / "data", root / "offline"
        self.readings: dict[str, Any] = json.loads((root / "readings.json").read_text())
        self.environment = {"HALFSTEP_DATA": str(self.data), "HALFSTEP_DATABASE_URL": url}

    def rows(self) -> Rows:
        """Return all rows by table."""
        engine = create_engine(self.url)
        tables = MetaData()
        tables.reflect(engine)
        with engine.connect() as connection:
            rows = {
                name: [dict(row) for row in connection.execute(table.select()).mappings()]
                for name, table in tables.tables.items()
            }
        engine.dispose()
        return rows

    @contextmanager
    def database(self) -> Iterator[Database]:
        """Yield the database for this version."""
        database = Database(self.url, lambda: LocalStore(self.data))
        yield database
        database.dispose()

    def migrate(self) -> None:
        """Migrate the database to this version."""
        with self.database() as database:
            database.migrate()

    def waits(self) -> bool:
        """Return whether a run waits for the conversion of its steps."""
        with self.database() as database, database.reading() as session:
            return session.scalar(select(StepConversion.run_id).limit(1)) is not None

    def steps(self, run_id: int) -> list[StepRow]:
        """Return a run's steps, as this version reads them."""
        with self.database() as database, database.reading() as session:
            return step_rows.read_rows(session, run_id, most=END)

    def replace_database(self, name: str) -> None:
        """Replace the SQLite database by another one in the folder of installations."""
        for end in ("-wal", "-shm"):
            (self.data / f"halfstep.db{end}").unlink(missing_ok=True)
        content = lzma.decompress((INSTALLATIONS / name).read_bytes())
        (self.data / "halfstep.db").write_bytes(content)


def upgrade_of(*names: str) -> pytest.MarkDecorator:
    """Upgrade these installations in `make test`, and others in `make test-all`."""
    return pytest.mark.parametrize("old", sampled(NAMES, names), indirect=True)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marks = metafunc.definition.iter_markers("parametrize")
    if "old" in metafunc.fixturenames and not any(mark.args[0] == "old" for mark in marks):
        chosen = metafunc.config.getoption("--database")
        kinds = ["sqlite", "postgresql"] if chosen == "both" else [chosen]
        metafunc.parametrize(
            "old", [each for each in NAMES if each.partition("-")[2] in kinds], indirect=True
        )


@pytest.fixture
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Old]:
    """Yield an installation of an earlier version, whose database is deleted afterwards."""
    commit, _, kind = request.param.partition("-")
    with tarfile.open(INSTALLATIONS / f"{request.param}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    if kind == "sqlite":
        yield Old(commit, tmp_path, f"sqlite:///{tmp_path / 'data' / 'halfstep.db'}")
        return
    server = request.getfixturevalue("postgresql_server")
    with swept.fresh(server, "template0") as name:
        folder = server.partition("host=")[2]
        command = [f"{postgresql_binaries()}/psql", "-h", folder, "-U", "halfstep", "-d", name]
        dump = (tmp_path / "dump.sql").read_bytes()
        subprocess.run(
            [*command, "-q", "-v", "ON_ERROR_STOP=1"],
            input=dump,
            user=postgresql_user(),
            check=True,
            capture_output=True,
            cwd="/",
        )
        yield Old(commit, tmp_path, server.format(name=name))
