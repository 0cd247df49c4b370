"""Back up database and checkpoints while everything runs, and restore them, into either database.

<folder>/tables/<table>.jsonl.gz    one row a line, all tables as they were at one moment
<folder>/files/<key>                the store's files: checkpoints, artifacts and uploaded weights
                                    that runs start from
<folder>/backup.json                written last: a folder without it is not a backup
"""

import gzip
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from obstore.store import ObjectStore
from sqlalchemy import Integer, Table, func, insert, select
from sqlalchemy.orm import Session

from db import pyramid, uploads
from db.database import Database
from db.errors import Conflict, Invalid
from db.storage import get_file, is_plain, put_file
from db.tables import Artifact, Checkpoint, MetricBucket, Run, StepBucket
from db.tables import Table as Base

FORMAT = 1
ROWS = 1000
#: What can be derived is left out, and built anew from the steps.
WITH_FILES = (Checkpoint.__table__, Artifact.__table__)
DERIVED = (StepBucket.__table__, MetricBucket.__table__)
TABLES = [table for table in Base.metadata.sorted_tables if table not in DERIVED]


def back_up(database: Database, store: ObjectStore, folder: Path) -> dict[str, Any]:
    """Write a backup into a new folder; return how many rows and files it has, and what it lacks.

    left_out: keys of files that are missing or damaged, or would lead out of the folder; `restore`
    leaves their rows out.

    Raises Conflict if the folder is there already.
    """
    if folder.exists():
        raise Conflict(f"{folder} is there already: name a folder that is not.")
    (folder / "tables").mkdir(parents=True)
    rows = 0
    with database.reading() as session:
        for table in TABLES:
            rows += _write_table(session, table, folder)
        saved: list[Checkpoint | Artifact] = [
            *session.scalars(select(Checkpoint)),
            *session.scalars(select(Artifact)),
        ]
        sha256_of = {row.key: row.sha256 for row in saved if row.is_stored}
        for upload in uploads.named(session):
            sha256_of[uploads.key(upload)] = upload.partition("/")[0]
    left_out = []
    for key, sha256 in sha256_of.items():
        path = folder / "files" / key
        if not is_plain(folder / "files", key):
            left_out.append(key)
            continue
        try:
            get_file(store, key, path, sha256=sha256)
        except (FileNotFoundError, ValueError):  # retired in the meantime, or damaged
            path.unlink(missing_ok=True)
            left_out.append(key)
    content = {"format": FORMAT, "rows": rows, "files": len(sha256_of) - len(left_out)}
    (folder / "backup.json").write_text(json.dumps(content))
    return {**content, "left_out": left_out}


def restore(database: Database, store: ObjectStore, folder: Path) -> dict[str, int]:
    """Fill an empty, migrated database and the store from a backup; return what was restored.

    Raises Invalid if it is no backup, Conflict if the database has runs.
    """
    try:
        content = json.loads((folder / "backup.json").read_text())
    except FileNotFoundError as error:
        raise Invalid({"folder": f"{folder} has no backup.json: it is not a backup"}) from error
    if content["format"] != FORMAT:
        raise Invalid({"folder": f"{folder} has format {content['format']}; known is {FORMAT}"})
    files = [path for path in (folder / "files").rglob("*") if path.is_file()]
    keys = {path.relative_to(folder / "files").as_posix(): path for path in files}
    rows, there = 0, {*keys, ""}  # without a key: a file that never was here
    with database.reading() as session:
        _check_empty(session, database)
    for key, path in keys.items():  # before the rows that name them, and with nothing held
        put_file(store, key, path)
    with database.writing() as session:
        _check_empty(session, database)
        for table in (*DERIVED, *reversed(TABLES)):
            session.execute(table.delete())
        for table in TABLES:
            stored = _read_table(table, folder)
            while batch := list(islice(stored, ROWS)):
                kept = [row for row in batch if table not in WITH_FILES or row["key"] in there]
                if kept:
                    session.execute(insert(table), kept)
                rows += len(kept)
            _reset_sequence(session, table)
        for run_id in session.scalars(select(Run.id)).all():
            pyramid.rebuild(session, run_id)
    return {"rows": rows, "files": len(keys)}


def _check_empty(session: Session, database: Database) -> None:
    """See that no run would be lost. Raises Conflict."""
    if session.scalar(select(Run.id).limit(1)) is not None:
        raise Conflict(f"{database.name} has runs already: restore into an empty database.")


def _write_table(session: Session, table: Table, folder: Path) -> int:
    count = 0
    with gzip.open(folder / "tables" / f"{table.name}.jsonl.gz", "wt") as file:
        query = select(table).order_by(*table.primary_key)
        for row in session.execute(query.execution_options(yield_per=ROWS)).mappings():
            file.write(json.dumps(dict(row)) + "\n")
            count += 1
    return count


def _read_table(table: Table, folder: Path) -> Iterator[dict[str, Any]]:
    path = folder / "tables" / f"{table.name}.jsonl.gz"
    if path.exists():
        with gzip.open(path, "rt") as file:
            yield from map(json.loads, file)


def _reset_sequence(session: Session, table: Table) -> None:
    """Let PostgreSQL number new rows on from the restored ones."""
    key = table.primary_key.columns.values()
    numbered = len(key) == 1 and isinstance(key[0].type, Integer)
    if numbered and session.connection().dialect.name == "postgresql":
        sequence = func.pg_get_serial_sequence(table.name, key[0].name)
        highest = select(func.max(key[0])).scalar_subquery()
        session.execute(select(func.setval(sequence, func.coalesce(highest, 1))))
