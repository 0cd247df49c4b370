"""Stored environments of attempts."""

from db.database import Database
from db.runs import environments
from db.runs.environments import Texts
from db.tables import Run
from halfstep.telemetry.events import SOURCE_BYTES


def test_the_latest_attempt_is_returned_with_truncated_texts(
    database: Database, running: Run
) -> None:
    """The latest attempt's environment is returned, with texts truncated between characters."""
    with database.writing() as session:
        for attempt, source in ((1, "one"), (2, "two"), (2, "é" * SOURCE_BYTES)):
            texts = Texts(source, None)
            environments.record(session, running.id, attempt, {"host": source[:3]}, texts)
    with database.reading() as session:
        found = environments.newest(session, running.id)
        assert found is not None
        assert (found.attempt, found.content) == (2, {"host": "ééé"})
        assert environments.texts(found) == Texts("é" * (SOURCE_BYTES // 2), None)
        assert environments.newest(session, running.id + 1) is None
