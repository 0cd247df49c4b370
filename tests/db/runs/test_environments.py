"""Stored environments of attempts."""

from db.database import Database
from db.runs import environments
from db.runs.environments import LONGEST_BYTES, Texts
from db.tables import Run


def test_the_latest_attempt_is_returned_with_truncated_texts(
    database: Database, running: Run
) -> None:
    """Truncated between characters; a second write replaces the first."""
    with database.writing() as session:
        for attempt, source in ((1, "one"), (2, "two"), (2, "é" * LONGEST_BYTES)):
            texts = Texts(source, None)
            environments.record(session, running.id, attempt, {"host": source[:3]}, texts)
    with database.reading() as session:
        found = environments.newest(session, running.id)
        assert found is not None
        assert (found.attempt, found.content) == (2, {"host": "ééé"})
        assert environments.texts(found) == Texts("é" * (LONGEST_BYTES // 2), None)
        assert environments.newest(session, running.id + 1) is None
