"""Output of runs: all of it in files, and a bounded part in the database."""

import gzip
import re
import sys
from pathlib import Path

import pytest

from db.database import Database
from db.files import artifacts
from db.files.object_store import open_store
from db.files.storage import mismatches
from db.runs import runs
from db.settings import Settings
from db.tables import LogLine, Status
from db.telemetry import series, telemetry
from halfstep.sidecar import log_file
from halfstep.sidecar.lines import LINE_BYTES
from halfstep.sidecar.log_file import LogFile, compress, forget_part
from tests.db.conftest import submit_command
from tests.site import Site, until
from worker.attempts.child import Child
from worker.sandbox import run_environment

#: More lines at once than the database keeps.
FAST = """
for i in range(80_000): print(f"line {i}")
print("日本語" * 20_000)
"""
GAP = re.compile(r"\[lines ([\d,]+) to ([\d,]+) are in the file of the log only\]")


def read_printed(settings: Settings, database: Database, run_id: int) -> str:
    """Return the complete content of a run's log files."""
    with database.reading() as session:
        rows = artifacts.log_files(session, run_id)
    return b"".join(
        gzip.decompress((settings.data / row.key).read_bytes()) for row in rows
    ).decode()


def check_numbers(lines: list[LogLine]) -> int:
    """Check that each missing line is in a gap that names it; return how many are missing."""
    missing = 0
    for line, following in zip(lines, [*lines[1:], None], strict=True):
        match = GAP.fullmatch(line.text)
        first, last = (int(each.replace(",", "")) for each in match.groups()) if match else (0, 0)
        if match and first == line.number:  # a gap before which lines are kept
            missing += last - first + 1
        elif match:  # the mark of what went for its age stands at its end
            assert last == line.number
            missing += last - first + 1
        if following is not None:
            assert following.number == (last if match else line.number) + 1
    return missing


def test_a_log_printed_quickly_is_kept_whole(site: Site, tmp_path: Path) -> None:
    """Every line of a command is in its file, no character is cut, and gaps are counted."""
    script = tmp_path / "fast.py"
    script.write_text(FAST)
    settings = Settings(data=site.data, database_url=site.url)
    with site.database.writing() as session:
        run_id = submit_command(session, site.owner, f"python {script}").id
    with site.worker(HALFSTEP_ALLOW_COMMANDS="yes"):
        assert site.wait(run_id).status == Status.FINISHED
    text = read_printed(settings, site.database, run_id)
    remark, _, rest = text.partition("\n")
    assert remark.startswith("$ python ")
    assert rest == "".join(f"line {i}\n" for i in range(80_000)) + "日本語" * 20_000 + "\n"
    with site.database.reading() as session:
        lines = series.log_lines(session, run_id, most=300_000)
        run = runs.get(session, run_id)
        [file] = artifacts.log_files(session, run_id)
        assert artifacts.count(session, run_id) == 0
        assert mismatches(session, open_store(settings), deep=True) == []
    assert run.stored_bytes == file.size_bytes > 0
    assert check_numbers(lines) > 0
    assert len(lines) <= telemetry.MOST_LINES + telemetry.FIRST_LINES + telemetry.LINES_PER_CHECK
    assert not any("\ufffd" in line.text for line in lines)
    assert not list((settings.run_folder(run_id) / "log").glob("*.txt"))


@pytest.mark.only_on("sqlite")
def test_a_recipe_has_a_file_of_its_log_too(site: Site) -> None:
    """A recipe's log file contains the training's output as the page shows it."""
    settings = Settings(data=site.data, database_url=site.url)
    run_id = site.submit(steps=3)
    with site.worker():
        assert site.wait(run_id).status == Status.FINISHED
    assert (
        read_printed(settings, site.database, run_id).splitlines() == site.log(run_id).splitlines()
    )


@pytest.mark.only_on("sqlite")
def test_files_of_a_killed_supervisor_are_published(site: Site, tmp_path: Path) -> None:
    """The worker publishes the log part that a killed supervisor was writing."""
    settings = Settings(data=site.data, database_url=site.url)
    run_id = site.submit()
    worker = site.idle_worker()
    attempt = site.lost_attempt(worker, run_id)
    folder = settings.run_folder(run_id)
    (folder / "log").mkdir(parents=True)
    (folder / "log" / "attempt-0001-000001.txt").write_text("left\n")
    worker._reap()
    assert attempt not in worker.running.nodes
    assert read_printed(settings, site.database, run_id) == "left\n"


@pytest.mark.parametrize("before", range(4))
def test_characters_are_cut_nowhere(before: int, tmp_path: Path) -> None:
    """A line longer than a piece, with a secret in it, is cut between characters."""
    said = f"print('x' * {before} + '日本語é😀' * 3000 + 'sesame' + '語')"
    log = LogFile(tmp_path, 1)
    environment = run_environment.of_commands() | {"PYTHONIOENCODING": "utf-8"}
    child = Child([sys.executable, "-c", said], environment, ["sesame"], log)
    until(lambda: child.exit_code() is not None)
    child.finish_listening()
    log.close()
    lines = child.take_lines()
    expected = "x" * before + "日本語é😀" * 3000 + "***語"
    assert "".join(line.text for line in lines) == expected
    assert all(len(line.text.encode()) <= LINE_BYTES + 16 for line in lines)
    [part] = log.complete_parts()
    assert part.read_text() == f"{expected}\n"


def test_bytes_that_are_no_characters_are_kept(tmp_path: Path) -> None:
    """Bytes that are no UTF-8 are kept in the file, and marked on the page."""
    said = r"import sys; sys.stdout.buffer.write(b'a\xff\xc3(b\xe6\x97')"
    log = LogFile(tmp_path, 1)
    child = Child([sys.executable, "-c", said], run_environment.of_commands(), (), log)
    until(lambda: child.exit_code() is not None)
    child.finish_listening()
    log.close()
    [part] = log.complete_parts()
    assert part.read_bytes() == b"a\xff\xc3(b\xe6\x97"
    assert "".join(line.text for line in child.take_lines()) == "a\ufffd\ufffd(b\ufffd"


def test_a_part_is_complete_past_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts follow each other, also after another process, and compressed ones stay whole."""
    monkeypatch.setattr(log_file, "PART_BYTES", 10)
    log = LogFile(tmp_path, 1)
    log.append_log("$ it")
    assert not (tmp_path / "log").exists()  # nothing was printed
    for number in range(5):
        log.write(f"line {number}\n".encode())
    log.flush()
    assert [part.read_text() for part in log.complete_parts()] == [
        "$ it\nline 0\n",
        "line 1\nline 2\n",
        "line 3\nline 4\n",
    ]
    log.write(b"open")
    log.close()
    left = LogFile(tmp_path, 2)
    for part in left.complete_parts():
        event = compress(part, tmp_path)
        left.take(part)
        forget_part(event.path, tmp_path)
    assert left.complete_parts() == []
    files = sorted((tmp_path / "log").iterdir())
    assert [each.suffix for each in files] == [".gz"] * 4
    text = b"".join(gzip.decompress(each.read_bytes()) for each in files).decode()
    assert text == "$ it\n" + "".join(f"line {number}\n" for number in range(5)) + "open"


def test_output_lost_by_a_full_disk_is_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After output was lost on a full disk, the file says how many bytes are missing."""
    log = LogFile(tmp_path, 1)
    (tmp_path / "log").touch()  # in the way of the folder, as a disk that takes nothing is
    log.write(b"lost\n")
    (tmp_path / "log").unlink()
    log.write(b"kept\n")
    log.close()
    [part] = log.complete_parts()
    mark, kept = part.read_text().splitlines()
    assert mark.startswith("[halfstep: 5 bytes are missing: ")
    assert kept == "kept"
