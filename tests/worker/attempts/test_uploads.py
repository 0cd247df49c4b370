from threading import Event

import pytest

from halfstep.telemetry.spool import Position
from tests.spool_made import artifact_of
from worker.attempts.uploads import Uploads

SINCE = Position(1, 0, 0)


def artifact(name):
    return artifact_of({"step": 1, "name": name, "path": name, "size_bytes": 0, "sha256": ""})


def test_completed_uploads_are_not_repeated_after_a_failure():
    """After a failed upload only the remaining files are sent, once and in order."""
    sent, is_broken = [], Event()

    def send(file):
        if is_broken.is_set() and file.path == "b":
            raise OSError("the bucket is away")
        sent.append(file.path)

    uploads, result = Uploads(send, lambda _keys: None), [artifact("a"), artifact("b")]
    uploads.add(result, SINCE)
    is_broken.set()
    uploads.begin()
    with pytest.raises(OSError, match="away"):
        uploads.wait()
    is_broken.clear()
    uploads.begin()
    uploads.wait()
    assert uploads.collect() == result
    assert sent == ["a", "b"]
    assert not uploads
