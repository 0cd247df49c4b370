"""Supervisors are started once, found again, and distinguished from other processes."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.site import until
from worker.engine import AlreadyLaunched, SubprocessEngine, key_in

KEY = b"of this worker"
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


def test_an_attempt_is_launched_once_and_found_again(tmp_path: Path) -> None:
    """An attempt is launched once; a restarted worker finds its process."""
    first, second = SubprocessEngine(KEY), SubprocessEngine(KEY)
    handle = first.launch(tmp_path, 1, SLEEP, {})
    with pytest.raises(AlreadyLaunched, match="attempt 1 was launched"):
        second.launch(tmp_path, 1, SLEEP, {})
    assert second.adopt(tmp_path, 1) == handle
    assert second.is_alive(handle)
    second.signal(handle, signal.SIGKILL)
    until(lambda: not second.is_alive(handle))
    assert not first.is_alive(handle)
    with pytest.raises(AlreadyLaunched):
        first.launch(tmp_path, 1, SLEEP, {})
    assert not second.is_alive(second.adopt(tmp_path, 2))  # it never came to a launch


def test_a_later_process_of_the_same_pid_is_another(tmp_path: Path) -> None:
    """A process with a supervisor's PID after a reboot, or a reused one, is not taken for it."""
    engine, after = SubprocessEngine(KEY), SubprocessEngine(KEY)
    handle = engine.launch(tmp_path, 1, SLEEP, {})
    path = tmp_path / "supervisor-1.json"
    for part in ("started_ticks", "boot_id"):
        altered = handle.as_dict() | {part: 0}
        path.write_text(str(altered).replace("'", '"'))
        assert not after.is_alive(after.adopt(tmp_path, 1))
    engine.signal(handle, signal.SIGKILL)
    until(lambda: not engine.is_alive(handle))


@pytest.mark.parametrize(
    "content", ["", "[]", "7", '{"pid": 1}', '{"pid": "x", "started_ticks": null, "boot_id": ""}']
)
def test_a_claim_that_a_recipe_wrote_over_is_a_supervisor_that_has_ended(
    tmp_path: Path, content: str
) -> None:
    """Invalid files in a run's folder count as a supervisor that has ended."""
    (tmp_path / "supervisor-1.json").write_text(content)
    engine = SubprocessEngine(KEY)
    assert not engine.is_alive(engine.adopt(tmp_path, 1))


def test_a_handle_that_a_run_wrote_names_no_supervisor(tmp_path: Path) -> None:
    """A handle written by a run, or signed for another attempt, names no supervisor."""
    engine, other = SubprocessEngine(KEY), tmp_path / "other"
    handle = engine.launch(tmp_path / "own", 1, SLEEP, {})
    try:
        own = tmp_path / "own" / "supervisor-1.json"
        signed = json.loads(own.read_text())
        other.mkdir()
        for path, content in (
            (own, handle.as_dict()),
            (own, signed | {"pid": os.getppid()}),
            (own, signed | {"signature": 7}),
            (own, signed | {"signature": "\N{SNOWMAN}"}),
            (tmp_path / "own" / "supervisor-2.json", signed),
            (other / "supervisor-1.json", signed),
        ):
            path.write_text(json.dumps(content))
            attempt = int(path.stem[-1])
            assert engine.adopt(path.parent, attempt).pid == 0, content
        own.write_text(json.dumps(signed))
        assert engine.adopt(own.parent, 1) == handle
        assert SubprocessEngine(b"of another").adopt(own.parent, 1).pid == 0
    finally:
        engine.signal(handle, signal.SIGKILL)
    until(lambda: not engine.is_alive(handle))


def test_a_log_that_a_run_linked_is_not_written_through(tmp_path: Path) -> None:
    """If a run links its log elsewhere, the launch fails, and the target is unchanged."""
    target = tmp_path / "target"
    target.write_text("kept")
    (tmp_path / "supervisor-2.log").symlink_to(target)
    with pytest.raises(OSError, match="symbolic links"):
        SubprocessEngine(KEY).launch(tmp_path, 2, SLEEP, {})
    assert target.read_text() == "kept"


def test_a_key_is_created_once_and_private(tmp_path: Path) -> None:
    """The signing key is private and created once, so a restarted worker finds its supervisors."""
    key = key_in(tmp_path)
    assert (len(key), key_in(tmp_path)) == (32, key)
    [file] = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
