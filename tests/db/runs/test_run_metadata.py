"""Name, tags and note of a run."""

from typing import Any

import pytest

from db.database import Database
from db.errors import Changed, Invalid
from db.runs import run_metadata, runs
from db.tables import Run, User
from db.telemetry import ingest
from tests.db.runs.trash_made import WATCHED
from tests.marks import looped


def edit(database: Database, run_id: int, ada: User, **wanted: Any) -> Run:
    with database.writing() as session:
        return run_metadata.edit(session, run_id, ada, wanted)


def test_only_given_fields_change(database: Database, running: Run, ada: User) -> None:
    """Editing labels changes the given fields only, records a new name, and notifies viewers."""
    before = running.revision
    edit(database, running.id, ada, note="# Why\r\nbigger *batch* \n\n")
    run = edit(database, running.id, ada, name=" baseline ", tags=["a", " b", "a", ""])
    assert (run.name, run.tags, run.note) == ("baseline", "a, b", "# Why\nbigger *batch*")
    assert run.revision == before + 2
    assert edit(database, running.id, ada, name="baseline").revision == run.revision
    with database.reading() as session:
        last = runs.statuses(session, running.id)[-1]
    assert last.reason == "renamed by ada, from digits-fp16"


@looped(
    "wanted, field, message",
    [
        ({"name": "  "}, "name", "it is empty; allowed: 1 to 100 characters"),
        ({"name": "x" * 101}, "name", "101 characters; allowed: at most 100"),
        ({"tags": ["x" * 201]}, "tags", "201 characters; allowed: at most 200"),
        ({"tags": ["a,b"]}, "tags", "'a,b' has a comma; allowed: texts without"),
        ({"note": "x" * 20_001}, "note", "20,001 characters; allowed: at most 20,000"),
    ],
)
def test_bad_values_are_named(
    database: Database, running: Run, ada: User, wanted: dict[str, Any], field: str, message: str
) -> None:
    """The error for an invalid label has field, value and allowed values; nothing is written."""
    with pytest.raises(Invalid) as refused:
        edit(database, running.id, ada, **{"note": "fine", **wanted})
    assert refused.value.errors == {field: message}
    with database.reading() as session:
        assert runs.get(session, running.id).note == ""


def test_the_second_of_two_conflicting_edits_is_rejected(
    database: Database, running: Run, ada: User
) -> None:
    """An edit of an outdated value is an error; edits of other fields do not conflict."""
    edit(database, running.id, ada, note="theirs", tags=["x"])
    for wanted, seen in (({"note": "mine"}, {"note": ""}), ({"tags": ["y"]}, {"tags": []})):
        with (
            pytest.raises(Changed, match="has changed in the meantime"),
            database.writing() as session,
        ):
            run_metadata.edit(session, running.id, ada, wanted, seen)
    with database.writing() as session:
        run_metadata.edit(session, running.id, ada, {"note": "theirs"}, {"note": ""})  # the same
        run_metadata.edit(
            session, running.id, ada, {"name": "n"}, {"name": "digits-fp16", "note": ""}
        )
        run = run_metadata.edit(session, running.id, ada, {"note": "both"}, {"note": "theirs"})
        assert (run.name, run.tags, run.note) == ("n", "x", "both")


def test_tags_are_added_and_removed_one_by_one(database: Database, running: Run, ada: User) -> None:
    """Adding a tag twice has no effect, and other tags stay."""
    with database.writing() as session:
        for tag in ("a", "b", "a "):
            run_metadata.add_tag(session, running.id, ada, tag)
        assert run_metadata.tags_of(runs.get(session, running.id)) == ["a", "b"]
        for tag in ("a", "c"):
            run_metadata.remove_tag(session, running.id, ada, tag)
        assert run_metadata.tags_of(runs.get(session, running.id)) == ["b"]
        for wrong in ("", "a,b", "x" * 200):
            with pytest.raises(Invalid, match="tag: "):
                run_metadata.add_tag(session, running.id, ada, wrong)


def test_a_script_does_not_overwrite_edits_of_users(database: Database, ada: User) -> None:
    """A script's name and tags apply until a user edits them."""
    with database.writing() as session:
        run_id = ingest.begin(session, ada, "b" * 32, 1, **(WATCHED | {"tags": "old"})).run_id
    edit(database, run_id, ada, name="mine", tags=["new"], note="kept")
    with database.writing() as session:
        for attempt in (1, 2):
            ingest.begin(session, ada, "b" * 32, attempt, **(WATCHED | {"tags": "old"}))
        run = runs.get(session, run_id)
        assert (run.name, run.tags, run.note) == ("mine", "new", "kept")
