"""Runs whose folder is removed or cannot be written: nothing is lost, and one line is printed."""

import errno
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

import halfstep
from db.database import Database
from db.tables import Run
from halfstep.session import active_run, run_start
from halfstep.telemetry import patient_spool, refuge, run_folder
from halfstep.telemetry.attempt_files import AttemptFiles
from halfstep.telemetry.run_folder import last_logged
from halfstep.telemetry.spool import SpoolWriter
from halfstep.telemetry.uploader import Training
from tests.db.telemetry.telemetry_made import read_logged_points
from tests.site import until


@pytest.fixture(autouse=True)
def own_refuge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Use a test's working directory and TMPDIR, and a spool that checks the disk at once."""
    (tmp_path / "work").mkdir()
    (tmp_path / "tmp").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(refuge, "IN_MEMORY", tmp_path / "memory")
    monkeypatch.setattr(patient_spool, "LOOK_SECONDS", 0.0)
    yield tmp_path / "tmp"
    if active_run.active:
        active_run.active.finish()


@pytest.fixture
def recorded(
    database: Database, server: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> Callable[[], tuple[list[float], list[str]]]:
    """Return a function that returns the values and states on the server."""
    for name, value in server.items():
        monkeypatch.setenv(name, value)

    def read() -> tuple[list[float], list[str]]:
        with database.reading() as session:
            values = [point.value for point in read_logged_points(session)]
            return values, list(session.scalars(select(Run.status)))  # type: ignore[arg-type]

    return read


@pytest.fixture
def full(own_refuge: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Return a function that fills the disk except for half a frame."""
    write, is_full = SpoolWriter._write, False

    def fill(_folder: Path) -> None:
        nonlocal is_full
        is_full = True

    def write_piece(writer: SpoolWriter, data: bytes) -> None:
        if is_full and own_refuge not in writer._folder.parents:
            write(writer, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        write(writer, data)

    monkeypatch.setattr(SpoolWriter, "_write", write_piece)
    return fill


def train(during: Callable[[Path], Any] = lambda folder: None, **named: Any) -> Path:
    """Log ten numbers, and call a function after five."""
    options: dict[str, Any] = {"name": "run", "console": False, "system": False}
    watch = halfstep.watch(**options | named)
    assert watch.folder
    for step in range(10):
        if step == 5:
            watch._guard(watch._run._flush)  # type: ignore[union-attr]
            during(watch.folder)
        watch.log({"acc": step}, step=step)
    watch.finish()
    return watch.folder


EXPECTED = [float(step) for step in range(10)], ["finished"]


def test_a_folder_that_is_removed_is_written_again(
    recorded: Callable[[], Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """If a run's folder is removed, the server receives what came before and after."""
    train(shutil.rmtree)
    until(lambda: recorded() == EXPECTED)
    said = capfd.readouterr().err
    assert said.count("was removed; its newest data are written again") == 1
    assert "has failed" not in said


def test_without_a_server_a_removed_folder_is_written_again() -> None:
    """Without a server a removed folder is written again with its description, for an upload."""
    folder = train(shutil.rmtree, mode="offline", config={"lr": 0.1})
    watch = halfstep.watch(run="run", mode="offline", console=False, system=False)
    assert watch.folder == folder
    assert watch.config == {"lr": 0.1}
    assert watch.files
    assert last_logged(watch.files) == 9


def test_a_full_disk_costs_nothing(
    recorded: Callable[[], Any],
    full: Callable[[Path], None],
    own_refuge: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """On a full disk the spool continues in TMPDIR, and is sent from there."""
    train(full)
    until(lambda: recorded() == EXPECTED)
    assert capfd.readouterr().err.count(f"continues in {own_refuge}") == 1


def test_a_later_attempt_has_what_the_refuge_holds(
    full: Callable[[Path], None], own_refuge: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once there is space, a later attempt copies the files from TMPDIR into the run's folder."""
    train(full, mode="offline")
    assert list(own_refuge.rglob("*.spool"))
    monkeypatch.undo()
    monkeypatch.chdir(own_refuge.parent / "work")
    monkeypatch.setenv("TMPDIR", str(own_refuge))
    watch = halfstep.watch(run="run", mode="offline", console=False, system=False)
    assert watch.files
    assert last_logged(watch.files) == 9


def test_a_folder_that_cannot_be_created_is_one_in_tmpdir(
    recorded: Callable[[], Any],
    own_refuge: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A run whose folder cannot be created is written to TMPDIR, with one folder per run folder."""
    opened = run_start.open_run

    def refusing(folder: Path, **named: Any) -> Any:
        if own_refuge not in folder.parents:
            raise OSError(30, "Read-only file system", str(folder))
        return opened(folder, **named)

    monkeypatch.setattr(run_start, "open_run", refusing)
    assert own_refuge in train().parents
    until(lambda: recorded() == EXPECTED)
    assert "cannot be written, and the run is in" in capfd.readouterr().err


def test_a_refuge_of_another_user_is_not_used(
    tmp_path: Path, own_refuge: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A temporary folder that is another user's or a link is not used, and the next location is
    tried.
    """
    place = refuge.open_refuge(tmp_path)
    place.rmdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret").touch()
    place.symlink_to(tmp_path / "elsewhere")
    assert refuge.within(tmp_path, "secret") == tmp_path / "secret"
    assert refuge.open_refuge(tmp_path).parent == tmp_path / "memory"


def test_a_refuge_that_cannot_be_written_leaves_no_folder(
    tmp_path: Path, own_refuge: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the temporary location cannot be written either, no folder is left."""

    def failing(_path: Path, _data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", failing)
    with pytest.raises(OSError, match="No space left"):
        refuge.open_refuge(tmp_path)
    assert not list(own_refuge.iterdir())
    assert not list((tmp_path / "memory").iterdir())


def _log_in_rank(number: int) -> None:
    os.environ["RANK"] = str(number)
    watch = halfstep.watch(mode="offline", console=False, system=False)
    for _ in range(3):
        watch.log({"loss": 1.0})
        watch.loss(1.0)


def test_what_a_further_rank_logs_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """If several ranks cannot log to the run, one of them reports it."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    watch = halfstep.watch(mode="offline", console=False, system=False)
    monkeypatch.setattr("halfstep.session.ranks.meeting_file", lambda _: watch._run._meeting)  # type: ignore[union-attr]
    context = multiprocessing.get_context("fork")
    for number in (1, 2):
        process = context.Process(target=_log_in_rank, args=(number,))
        process.start()
        process.join()
    assert capfd.readouterr().err.count("log is ignored in ranks other than 0") == 1
    watch.finish()


@pytest.mark.parametrize("error", [None, "x" * 10_000 + "the cause"])
def test_an_outcome_has_reserved_space(
    own_refuge: Path, monkeypatch: pytest.MonkeyPatch, error: str | None
) -> None:
    """A run ends with its true status on a full disk, because space is reserved for it."""
    watch = halfstep.watch(name="run", mode="offline", console=False, system=False)
    assert watch.files
    reserved = next(watch.files.folder.glob(".outcome-*"))
    size = reserved.stat().st_size

    def refuse(*_arguments: Any, **_named: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_folder, "write_json", refuse)
    monkeypatch.setattr(refuge, "open_refuge", refuse)
    assert watch._run
    watch._run.outcome.end("failed" if error else "finished", error)
    outcome = run_folder.read_outcome(watch.files)
    assert outcome
    assert outcome.status == ("failed" if error else "finished")
    assert (outcome.error or "").endswith("the cause" if error else "")
    assert watch.files.outcome.stat().st_size <= size
    assert not list(watch.files.folder.glob(".outcome-*"))


def test_a_killed_run_gets_its_outcome_once_there_is_space(
    own_refuge: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed run's uploader retries to write the outcome until there is space."""
    files = run_folder.open_run(own_refuge, name="run")
    tries: list[str] = []
    write = run_folder.write_outcome

    def refuse_once(files: AttemptFiles, status: Any, *rest: Any) -> None:
        tries.append(status)
        if len(tries) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(files, status, *rest)

    monkeypatch.setattr(run_folder, "write_outcome", refuse_once)
    training = Training(files, pid=2**22, since=1)
    for _ in range(3):
        training.close()
    outcome = run_folder.read_outcome(files)
    assert outcome
    assert (outcome.status, tries) == ("vanished", ["vanished"] * 2)
