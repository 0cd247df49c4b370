"""Supervisors launched once, found again, and told from others."""

import signal
import sys
from pathlib import Path

import pytest

from tests.site import until
from worker.engine import AlreadyLaunched, SubprocessEngine

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


def test_an_attempt_is_launched_once_and_found_again(tmp_path: Path) -> None:
    """The same attempt is refused, alive or dead; a worker that comes back finds what there is."""
    first, second = SubprocessEngine(), SubprocessEngine()
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
    """After a restart of the machine, or when pids come round, nobody is taken for a supervisor."""
    engine, after = SubprocessEngine(), SubprocessEngine()
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
    """A worker that finds nonsense in a run's folder at its start goes on without it."""
    (tmp_path / "supervisor-1.json").write_text(content)
    engine = SubprocessEngine()
    assert not engine.is_alive(engine.adopt(tmp_path, 1))
