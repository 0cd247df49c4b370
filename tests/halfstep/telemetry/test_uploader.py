"""An uploader sends every byte of a watched run once, whatever fails."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import halfstep
from halfstep import process, protocol
from halfstep.api_client import credentials
from halfstep.api_client.credentials import Credentials
from halfstep.api_client.errors import ApiError
from halfstep.session import run_upload
from halfstep.sidecar.process import LOCK
from halfstep.telemetry import sender, uploader
from halfstep.telemetry.attempt_files import AttemptFiles
from halfstep.telemetry.folder_lock import FolderLock
from halfstep.telemetry.ingest import PIECE_BYTES, Ingest
from halfstep.telemetry.plain_json import clean
from halfstep.telemetry.run_folder import (
    configure,
    last_step,
    open_run,
    read_run,
    write_json,
    write_outcome,
)
from halfstep.telemetry.sender import RunSending
from halfstep.telemetry.spool import EVENT, STEP_DTYPE, SpoolWriter, frame, lost_bytes
from halfstep.telemetry.upload import TRIES, run_folders
from halfstep.telemetry.upload import upload as send_run
from tests import warm
from tests.halfstep.telemetry.ingest_made import Attempt, IngestServer, Run
from tests.halfstep.telemetry.uploader_made import Writer, uploaders
from tests.marks import extended
from tests.site import SECONDS, free_port, until
from tests.spool_made import event_of


@pytest.fixture
def site() -> Iterator[IngestServer]:
    with IngestServer() as site:
        yield site


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the pauses between retries."""
    monkeypatch.setattr(uploader, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(uploader, "LONGEST_SECONDS", 0.05)
    monkeypatch.setattr(uploader, "MENDING_SECONDS", 0.05)


def read_spooled(files: AttemptFiles) -> dict[int, bytes]:
    """Return the content of an attempt's spool, by sequence."""
    found = files.spool.glob(f"{files.attempt}-*.spool")
    return {int(path.stem.partition("-")[2]): path.read_bytes() for path in found}


def find_attempt(site: IngestServer, files: AttemptFiles) -> Attempt:
    """Return the server's data of an attempt."""
    return site.runs[read_run(files.folder).id].attempts[files.attempt]


def make_end(status: str, step: int) -> dict[str, Any]:
    """Return the request for an end without an error."""
    return {"status": status, "step": step, "error": None, "exit_code": None, "lost_bytes": 0}


def only_run(site: IngestServer) -> Run:
    [run] = site.runs.values()
    return run


def send(site: IngestServer, files: AttemptFiles, tries: int = 100, **named: Any) -> list[str]:
    """Send until there are no failures; return the messages."""
    said: list[str] = []
    with Ingest(site.server, patience_seconds=20) as ingest:
        sending = RunSending(files.folder, ingest, said.append, **named)
        for _ in range(tries):
            try:
                sending.send()
            except ApiError:
                continue
            return said
    raise AssertionError("it was never sent")


def upload(
    site: IngestServer, *words: str | Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run `halfstep upload`."""
    command = [sys.executable, "-m", "halfstep.cli.main", "upload", *map(str, words)]
    known = {"HALFSTEP_URL": site.url, "HALFSTEP_TOKEN": "token"}
    environment = {**os.environ, **known, **variables}
    return warm.run(command, env=environment)


def test_a_frame_larger_than_a_piece_is_sent(site: IngestServer, tmp_path: Path) -> None:
    """A frame larger than a piece is sent as one piece, and so are the frames after it."""
    writer = Writer(tmp_path).steps(1)
    names = ["m" * 1000] * (PIECE_BYTES // 1000)
    writer.spool.event(event_of({"event": "uncalled", "step": 1, "modules": names}))
    writer.steps(1).finish()
    assert send(site, writer.files) == []
    assert find_attempt(site, writer.files).spool == read_spooled(writer.files)


class Following:
    """The uploader's loop in a thread, with a sleeping process as the training."""

    def __init__(self, site: IngestServer, files: AttemptFiles, patience_seconds: float) -> None:
        self.script = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        self.said: list[str] = []
        self.pages: list[str] = []
        since = process.read_start_ticks(self.script.pid)
        self.training = uploader.Training(files, self.script.pid, since)

        def follow() -> None:
            with Ingest(site.server, patience_seconds=0.3) as ingest:
                uploader.follow(
                    RunSending(files.folder, ingest, self.said.append),
                    self.training,
                    self.said.append,
                    announce=self.pages.append,
                    patience_seconds=patience_seconds,
                )

        self.threads = [
            threading.Thread(target=follow),
            threading.Thread(target=self.training.await_death, args=[lambda: None]),
        ]
        for thread in self.threads:
            thread.start()

    def kill(self) -> None:
        """Kill the training."""
        self.script.kill()
        self.script.communicate()

    def end(self) -> None:
        """Wait for uploader and training to end."""
        for thread in self.threads:
            thread.join(60)
            assert not thread.is_alive()


@pytest.fixture
def following() -> Iterator[Any]:
    """Start an uploader; it is stopped after the test."""
    started: list[Following] = []

    def start(site: IngestServer, files: AttemptFiles, patience: float = 60) -> Following:
        started.append(Following(site, files, patience))
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.end()


# ---- What arrives -------------------------------------------------------------------------------


def test_a_changed_configuration_is_sent_again(site: IngestServer, tmp_path: Path) -> None:
    """A configuration that a script changes is sent again, without any of the spool."""
    written = Writer(tmp_path, config={"lr": 0.1}).steps(1)
    with Ingest(site.server) as ingest:
        sending = RunSending(written.files.folder, ingest, print)
        sending.send()
        configure(written.files.folder, {"lr": 0.2})
        sending.send()
        sending.send()
    begun = [request for request in site.requests if request == "POST /api/v1/ingest"]
    assert len(begun) == 2
    assert only_run(site).configs == [{"lr": 0.1}, {"lr": 0.2}]
    assert sum("PUT" in request for request in site.requests) == 1


def test_a_configuration_that_is_set_until_the_end_arrives(
    site: IngestServer, tmp_path: Path
) -> None:
    """A configuration set until the end arrives, even if the first data are still being sent."""
    site.creates_projects = True
    writer = Writer(tmp_path, project="p", config={"lr": 0.1}).steps(1)
    folder = writer.files.folder

    def end(_text: str) -> None:
        configure(folder, {"lr": 0.2})
        writer.finish()

    with Ingest(site.server) as ingest:
        sending = RunSending(folder, ingest, print, tell=end)
        while not (sending.send() or sending.is_over(1)):
            pass
    assert only_run(site).configs == [{"lr": 0.1}, {"lr": 0.2}]


def test_a_project_that_the_server_creates_is_named(site: IngestServer, tmp_path: Path) -> None:
    """A project that the upload creates is printed, so that a typo is noticed."""
    site.creates_projects = True
    writer = Writer(tmp_path, project="vison").steps().finish()
    assert send(site, writer.files) == ["created the project vison"]


def test_a_run_arrives_whole(site: IngestServer, tmp_path: Path) -> None:
    """A run arrives with its description, each spool file, artifacts and outcome."""
    writer = Writer(tmp_path, project="p", config={"lr": float("inf")}, tags=["a"])
    writer.steps(20).file(b"hello").steps().finish()
    assert send(site, writer.files) == []
    run, attempt = only_run(site), find_attempt(site, writer.files)
    described = {name: run.described[name] for name in ("name", "project", "config", "tags")}
    assert described == {"name": "it", "project": "p", "config": {"lr": "Infinity"}, "tags": ["a"]}
    assert len(attempt.spool) > 2
    assert attempt.spool == read_spooled(writer.files)
    assert attempt.files == {"artifacts/step-00000200/a.txt": b"hello"}
    assert attempt.outcome == make_end("finished", 300)


@pytest.mark.parametrize("failure_kind", ["500", "page", *extended(["cut", "cut after"])])
def test_every_byte_arrives_once_whatever_fails(
    site: IngestServer, tmp_path: Path, failure_kind: str
) -> None:
    """Every byte arrives once although each request fails before or after its effect."""
    writer = Writer(tmp_path).steps(20).file(b"x" * 5_000_000, "large.bin").steps(20).finish()
    site.faults = [failure_kind, ""] * 30 + [failure_kind] * 5
    assert send(site, writer.files) == []
    attempt = find_attempt(site, writer.files)
    assert attempt.spool == read_spooled(writer.files)
    assert attempt.stored == {"artifacts/step-00000200/large.bin"}
    assert attempt.outcome is not None


def test_a_long_spool_goes_in_pieces(site: IngestServer, tmp_path: Path) -> None:
    """A long spool is sent in pieces, each of which continues at the last complete frame."""
    files = open_run(tmp_path, name="it")
    with SpoolWriter(files.spool, 1) as spool:
        for step in range(1, 7):
            records = np.random.default_rng(step).bytes(30_000 * STEP_DTYPE.itemsize)
            steps = np.frombuffer(records, STEP_DTYPE).copy()
            steps["step"] = step
            spool.steps(steps)
    send(site, files)
    assert find_attempt(site, files).spool == read_spooled(files)
    assert len([each for each in site.requests if each.startswith("PUT")]) > 2


def test_long_descriptions_are_truncated(
    site: IngestServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Name, tags, command and traceback are truncated, the traceback at its start."""
    monkeypatch.setattr(sys, "argv", ["train.py", "\udcff", *["x" * 5000] * 2000])
    writer = Writer(tmp_path, "n" * 90, tags=["t" * 300] * 60, project="p" * 300).finish()
    write_outcome(writer.files, "failed", 0, "x" * 150_000 + "KeyError")
    send(site, writer.files)
    result = only_run(site).described
    assert [len(result["tags"]), len(result["tags"][0]), len(result["project"])] == [50, 200, 200]
    assert (result["command"][1:3], len(result["command"])) == (["train.py", "\\udcff"], 1000)
    assert (len(result["command"][-1]), result["folder"]) == (4096, str(Path.cwd()))
    outcome = find_attempt(site, writer.files).outcome
    assert outcome is not None
    assert len(outcome["error"]) == 100_000
    assert outcome["error"].endswith("KeyError")


def test_sent_twice_it_is_there_once(site: IngestServer, tmp_path: Path) -> None:
    """A second upload takes only two requests, with or without the remembered state."""
    writer = Writer(tmp_path).steps(20).file(b"hello").finish()
    for forget in (False, False, True):
        if forget:
            (writer.files.folder / sender.REMEMBERED).unlink()
        send(site, writer.files)
        attempt = find_attempt(site, writer.files)
        assert attempt.spool == read_spooled(writer.files)
        assert attempt.files == {"artifacts/step-00000200/a.txt": b"hello"}
    files = [each for each in site.requests if "/files/" in each]
    assert len(files) == 2  # once, and once more when it was forgotten


def test_an_unfinished_run_continues_at_its_offset(site: IngestServer, tmp_path: Path) -> None:
    """A second upload of an unfinished run sends later data only, and no end."""
    writer = Writer(tmp_path).steps(7)
    with Ingest(site.server) as ingest:
        run = RunSending(writer.files.folder, ingest, print)
        for _ in range(5):
            run.send()
            assert find_attempt(site, writer.files).spool == read_spooled(writer.files)
            writer.steps(13).file(b"x", f"{writer.step}.txt")
    assert find_attempt(site, writer.files).outcome is None
    send(site, writer.files)
    assert len(find_attempt(site, writer.files).stored) == 5


def test_a_frame_cut_short_stays_behind(site: IngestServer, tmp_path: Path) -> None:
    """An incomplete last frame is sent as it grows, and skipped once there is a next file."""
    writer = Writer(tmp_path).steps(2)
    path = writer.files.spool / "1-0.spool"
    whole = path.read_bytes()
    with path.open("ab") as file:
        file.write(frame(EVENT, b"{}" * 100)[:50])
    send(site, writer.files)
    assert find_attempt(site, writer.files).spool == {0: whole}
    SpoolWriter(writer.files.spool, 1, sequence=1).close()
    send(site, writer.files)
    assert find_attempt(site, writer.files).spool == {0: whole} | {1: read_spooled(writer.files)[1]}


def test_damage_without_a_following_frame_is_reported(site: IngestServer, tmp_path: Path) -> None:
    """The damaged bytes at a file's end are reported, and the next file is sent."""
    writer = Writer(tmp_path)
    writer.spool.event(event_of({"event": "length", "step": 0, "steps": 3}))
    path = writer.files.spool / "1-0.spool"
    whole = path.stat().st_size
    with path.open("ab") as file:
        file.write(b"\xff" * (PIECE_BYTES + 1))
    SpoolWriter(writer.files.spool, 1, sequence=1).close()
    writer.finish()
    [said] = send(site, writer.files)
    assert f"1-0.spool is damaged from byte {whole} on" in said
    assert lost_bytes(path) == PIECE_BYTES + 1
    assert find_attempt(site, writer.files).spool == {
        0: read_spooled(writer.files)[0][:whole],
        1: read_spooled(writer.files)[1],
    }


def test_a_server_that_was_set_back_gets_all_again(site: IngestServer, tmp_path: Path) -> None:
    """A server restored from a backup gets spool and files again: its own state counts."""
    writer = Writer(tmp_path).steps(20).file(b"hello").finish()
    send(site, writer.files)
    find_attempt(site, writer.files).__init__()  # type: ignore[misc]
    send(site, writer.files)
    attempt = find_attempt(site, writer.files)
    assert attempt.spool == read_spooled(writer.files)
    assert attempt.stored


def test_checkpoints_are_sent_on_request(site: IngestServer, tmp_path: Path) -> None:
    """`upload=True` sends one checkpoint, and a later command all of them, in pieces."""
    content = os.urandom(9_000_000)
    writer = Writer(tmp_path).steps().file(b"kept here", "no.pt", upload=False)
    writer.file(content, "yes.pt", upload=True).finish()
    send(site, writer.files)
    wished, other = (f"checkpoints/step-00000100/{name}.pt" for name in ("yes", "no"))
    assert find_attempt(site, writer.files).files == {wished: content}
    send(site, writer.files, with_checkpoints=True)
    assert find_attempt(site, writer.files).files == {wished: content, other: b"kept here"}


def test_a_file_of_another_kind_is_reported(site: IngestServer, tmp_path: Path) -> None:
    """A missing file, or one of another size or content, is reported; the others are sent."""
    writer = Writer(tmp_path).steps()
    folder = writer.files.folder / "artifacts" / "step-00000100"
    for name in ("gone", "longer", "other", "fine"):
        writer.file(b"12345", f"{name}.txt")
    (folder / "gone.txt").unlink()
    (folder / "longer.txt").write_bytes(b"123456")
    (folder / "other.txt").write_bytes(b"54321")
    writer.finish()
    said = send(site, writer.files)
    assert said == [
        f"{folder}/gone.txt is gone, and is not sent",
        f"{folder}/longer.txt has 6 bytes, not 5, and is not sent",
        f"{folder}/other.txt is rejected: It is invalid.",
    ]
    assert find_attempt(site, writer.files).stored == {"artifacts/step-00000100/fine.txt"}


def test_attempts_go_in_order(site: IngestServer, tmp_path: Path) -> None:
    """The first attempt is sent completely before the second; a second upload reports nothing."""
    first = Writer(tmp_path).steps()
    first.spool.close()  # killed
    second = Writer(tmp_path).steps().finish()
    for _ in range(2):
        assert send(site, second.files) == []
    run = only_run(site)
    assert [run.attempts[n].spool for n in (1, 2)] == [
        read_spooled(w.files) for w in (first, second)
    ]
    assert [run.attempts[n].outcome is None for n in (1, 2)] == [True, False]


# ---- While it is written ------------------------------------------------------------------------


def test_a_run_is_sent_while_it_is_written(
    site: IngestServer, tmp_path: Path, following: Any
) -> None:
    """A run is sent while it is written; the page is printed once, and the uploader exits."""
    writer = Writer(tmp_path)
    uploading = following(site, writer.files)
    for _ in range(5):
        writer.steps(7)
        until(
            lambda: (
                bool(site.runs)
                and find_attempt(site, writer.files).spool == read_spooled(writer.files)
            )
        )
    writer.finish()
    uploading.threads[0].join(60)
    assert find_attempt(site, writer.files).outcome is not None
    assert uploading.pages == [f"{site.url}/runs/7"]
    assert uploading.said == []
    assert uploading.script.poll() is None


def test_data_that_the_server_rejects_are_reported_and_given_up_at_the_end(
    site: IngestServer, tmp_path: Path, following: Any
) -> None:
    """A rejected configuration is reported, and sent again only once the script changes it."""
    site.faults = ["422"]
    writer = Writer(tmp_path).steps()
    uploading = following(site, writer.files)
    until(lambda: bool(uploading.pages))
    assert uploading.said == ["the server rejects the run (It is refused.); nothing is deleted"]
    site.faults = ["422"] * 100
    writer.steps().finish()
    uploading.threads[0].join(60)
    assert uploading.said[-1] == (
        f"It is refused.; `halfstep upload {writer.files.folder}` sends the rest"
    )
    assert site.faults


def test_a_silent_death_is_reported_after_all_data(
    site: IngestServer, tmp_path: Path, following: Any
) -> None:
    """A killed process is reported after all data, also by a failing server; the folder has the
    outcome, and another attempt may continue.
    """
    writer = Writer(tmp_path).steps()
    uploading = following(site, writer.files)
    until(lambda: bool(uploading.pages))
    site.faults = ["500"] * 10
    writer.steps(20)
    uploading.kill()
    uploading.end()
    assert find_attempt(site, writer.files).spool == read_spooled(writer.files)
    assert find_attempt(site, writer.files).outcome == make_end("vanished", 300)
    again = Writer(tmp_path)
    assert again.files.attempt == 2
    send(site, again.steps().finish().files)
    assert find_attempt(site, again.files).spool == read_spooled(again.files)


def test_a_death_after_the_last_word_is_none_of_its_own(
    site: IngestServer, tmp_path: Path, following: Any
) -> None:
    """The outcome that a process reported stays, even if it is killed afterwards."""
    writer = Writer(tmp_path).steps().finish()
    uploading = following(site, writer.files)
    uploading.kill()
    uploading.end()
    assert find_attempt(site, writer.files).outcome == make_end("finished", 100)


def test_a_server_that_comes_and_goes_gets_everything(
    site: IngestServer, tmp_path: Path, following: Any
) -> None:
    """A server that fails and stalls gets everything, and each outage is reported once."""
    site.stop()
    writer = Writer(tmp_path).steps()
    uploading = following(site, writer.files)
    until(lambda: bool(uploading.said))
    site.faults = ["", "stall", "500", "cut"]
    site.restart()
    assert site.has_stalled.wait(60)
    until(
        lambda: (
            bool(site.runs) and find_attempt(site, writer.files).spool == read_spooled(writer.files)
        )
    )
    site.stop()
    writer.steps().finish()
    site.restart()
    uploading.threads[0].join(60)
    assert find_attempt(site, writer.files).spool == read_spooled(writer.files)
    assert find_attempt(site, writer.files).outcome is not None
    retried = "; nothing is deleted, will retry; `halfstep upload "
    assert uploading.said[0].startswith("the server does not answer at")
    assert retried in uploading.said[0]


def test_a_server_that_stays_away_is_given_up_after_the_end(
    site: IngestServer, tmp_path: Path, following: Any
) -> None:
    """An unreachable server is retried until the training ends; then `halfstep upload` is
    printed.
    """
    site.stop()
    writer = Writer(tmp_path).steps()
    uploading = following(site, writer.files, 0.0)
    until(lambda: len(uploading.said) > 5)
    assert uploading.threads[0].is_alive()
    writer.finish()
    uploading.threads[0].join(60)
    assert uploading.said[-1].endswith(f"`halfstep upload {writer.files.folder}` sends the rest")
    site.restart()
    assert upload(site, tmp_path).returncode == 0
    assert find_attempt(site, writer.files).spool == read_spooled(writer.files)


def test_a_rejected_token_is_reported_and_can_be_replaced(
    site: IngestServer, tmp_path: Path, following: Any
) -> None:
    """A rejected token is reported and can be replaced by an admin or by `halfstep login`."""
    site.tokens = set()
    writer = Writer(tmp_path).steps()
    uploading = following(site, writer.files)
    until(lambda: bool(uploading.said))
    assert "the server rejects the token" in uploading.said[0]
    site.tokens = {"token"}
    until(lambda: bool(uploading.pages))
    site.tokens = {"mended"}
    writer.steps()
    credentials.store(Credentials(site.url, "mended"))
    until(lambda: find_attempt(site, writer.files).spool == read_spooled(writer.files))


@pytest.mark.parametrize("how", ["stale_attempt", "ended"])
def test_an_attempt_that_is_not_wanted_is_kept_and_sent_no_more(
    site: IngestServer, tmp_path: Path, following: Any, how: str
) -> None:
    """An attempt that the server refuses is reported once and kept; the training is unaffected."""
    writer = Writer(tmp_path).steps()
    uploading = following(site, writer.files)
    until(lambda: bool(uploading.pages))
    before = read_spooled(writer.files)
    if how == "stale_attempt":
        only_run(site).attempts[2] = Attempt()
    else:
        only_run(site).is_ended = True
    writer.steps()
    until(lambda: bool(uploading.said))
    asked = len(site.requests)
    writer.steps().finish()
    uploading.threads[0].join(60)
    kept = f"attempt 1 stays in {writer.files.folder}, and no more of it is sent"
    assert uploading.said == [f"It is {how}. {kept}"]
    assert len(site.requests) == asked
    assert only_run(site).attempts[1].spool == before


def test_a_later_attempt_takes_the_folder_over(
    site: IngestServer, tmp_path: Path, following: Any
) -> None:
    """A later attempt's uploader sends the rest of the earlier attempt, whose uploader stops."""
    site.stop()
    first = Writer(tmp_path).steps()
    earlier = following(site, first.files)
    until(lambda: bool(earlier.said))
    second = Writer(tmp_path).steps().finish()
    earlier.threads[0].join(60)
    site.restart()
    following(site, second.files).threads[0].join(60)
    run = only_run(site)
    assert [run.attempts[n].spool for n in (1, 2)] == [
        read_spooled(w.files) for w in (first, second)
    ]


# ---- Later, by hand -----------------------------------------------------------------------------


def test_upload_sends_all_runs_below_a_folder(site: IngestServer, tmp_path: Path) -> None:
    """`upload` sends each run below a folder, also a linked one, but none within a run's folder."""
    runs = [Writer(tmp_path / "deep", name).steps().finish().files for name in ("a", "b")]
    inside = runs[0].folder / "artifacts" / "x"
    inside.mkdir(parents=True)
    (inside / "run.json").write_text("{}")
    (tmp_path / "deep" / "up").symlink_to(tmp_path)
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "a").symlink_to(runs[0].folder)
    assert run_folders(tmp_path / "links") == [tmp_path / "links" / "a"]
    (tmp_path / "links" / "a").unlink()
    assert run_folders(tmp_path) == [files.folder for files in runs]
    done = upload(site, tmp_path)
    assert done.stdout == "".join(
        f"{files.folder}: {site.url}/runs/{number}\n" for number, files in enumerate(runs, 7)
    )
    assert all(find_attempt(site, files).spool == read_spooled(files) for files in runs)
    result = [json.loads(line) for line in upload(site, tmp_path, "--json").stdout.splitlines()]
    assert result[0] == {
        "folder": str(runs[0].folder),
        "page": f"{site.url}/runs/7",
        "is_over": True,
        "problems": [],
    }


def test_upload_names_active_and_locked_runs(site: IngestServer, tmp_path: Path) -> None:
    """`upload` sends the available part of an active run, and leaves one with an uploader to it."""
    files = Writer(tmp_path).steps().files
    assert upload(site, tmp_path).stdout.endswith("/runs/7; it has not ended yet\n")
    with uploader.upload_lock(files.folder):
        assert uploader.is_uploading(files.folder)
        assert "is already being sent by the uploader" in upload(site, tmp_path).stderr
    assert not uploader.is_uploading(files.folder)


def test_upload_deletes_ended_and_sent_runs_without_losing_a_step(
    site: IngestServer, tmp_path: Path
) -> None:
    """`upload --delete` deletes ended and sent runs, but not an active run's spool."""
    first = Writer(tmp_path).steps().finish()
    second = Writer(tmp_path).steps(20).finish()
    send(site, second.files)
    upload(site, tmp_path, "--delete")
    assert read_spooled(first.files) == read_spooled(second.files) == {}
    third = Writer(tmp_path)
    assert (third.files.attempt, last_step(third.files)) == (3, 200)
    third.steps()
    upload(site, tmp_path, "--delete")
    assert read_spooled(third.files)
    assert last_step(AttemptFiles(third.files.folder, 4)) == 100
    only_run(site).attempts[4] = Attempt()
    third.steps().finish()
    upload(site, tmp_path, "--delete")
    assert read_spooled(third.files), "it was never sent"


def test_upload_says_why_it_cannot(site: IngestServer, tmp_path: Path) -> None:
    """`upload` prints in a sentence why it fails, after a few tries, with an exit code."""
    for folder, said in ((tmp_path / "none", "none is no folder"), (tmp_path, "there is no run")):
        done = upload(site, folder)
        assert done.returncode == 2
        assert said in done.stderr
    files, waited = Writer(tmp_path).files, list[float]()
    away = Credentials(f"http://127.0.0.1:{free_port()}", "token")
    with Ingest(away) as ingest, pytest.raises(ApiError, match="the server does not answer"):
        send_run(files.folder, ingest, print, waited.append)
    assert len(waited) == TRIES - 1


def run_json(folder: Path) -> dict[str, Any]:
    """Return the content of run.json."""
    return dict(json.loads((folder / "run.json").read_text()))


def _replace(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[AttemptFiles], None]] = {
    "run.json is cut": lambda files: _replace(files.folder / "run.json", b'{"id": '),
    "run.json is empty": lambda files: _replace(files.folder / "run.json", b""),
    "run.json is a list": lambda files: _replace(files.folder / "run.json", b"[]"),
    "run.json lacks all": lambda files: _replace(files.folder / "run.json", b"{}"),
    "run.json is no UTF-8": lambda files: _replace(files.folder / "run.json", b"\xff\xfe"),
    "run.json is too deep": lambda files: _replace(files.folder / "run.json", b"[" * 10**5),
    "attempts are texts": lambda files: write_json(
        files.folder / "run.json", run_json(files.folder) | {"attempts": ["a"]}
    ),
    "attempts are missing": lambda files: write_json(files.folder / "run.json", {"id": "x"}),
    "outcome is cut": lambda files: _replace(files.outcome, b"{"),
    "outcome lacks all": lambda files: _replace(files.outcome, b"{}"),
    "spool is a folder": lambda files: (files.spool / "1-9.spool").mkdir(),
}


def test_upload_reports_each_folder_and_continues_after_damaged_ones(
    site: IngestServer, tmp_path: Path
) -> None:
    """`upload` prints a line for each folder, and its exit code reports damaged ones."""
    names = ["a first one", *DAMAGES, "z last one"]
    written = {name: Writer(tmp_path, name).steps().finish().files for name in names}
    for name, damage in DAMAGES.items():
        damage(written[name])
    done = upload(site, tmp_path)
    lines = [line.partition(": ") for line in done.stdout.splitlines()]
    assert (done.returncode, len(lines)) == (1, len(names)), done.stderr
    is_sent = {folder: not text.startswith("not sent; ") for folder, _, text in lines}
    assert is_sent == {str(written[name].folder): name not in DAMAGES for name in names}
    assert "Traceback" not in done.stderr
    for files in (written[name] for name in names if name not in DAMAGES):
        assert find_attempt(site, files).spool == read_spooled(files)
        assert find_attempt(site, files).outcome is not None


def test_upload_continues_after_a_run_that_the_server_rejects(
    site: IngestServer, tmp_path: Path
) -> None:
    """`upload` continues with other runs if the server rejects one."""
    files = [Writer(tmp_path, name).steps().finish().files for name in "ab"]
    site.faults = ["422"]
    done = upload(site, tmp_path)
    assert done.returncode == 1
    assert done.stdout.splitlines()[0].startswith(f"{files[0].folder}: not sent; ")
    assert find_attempt(site, files[1]).spool == read_spooled(files[1])


@pytest.mark.parametrize(
    "text",
    ["caf\udce9", *extended(["nul\0", "\ud83d", "\udc80" * 3])],
    ids=["latin", "nul", "high", "low"],
)
def test_lone_surrogates_are_escaped_wherever_they_stand(
    site: IngestServer, tmp_path: Path, text: str
) -> None:
    """Lone surrogates in names, tags, configurations and texts are escaped and sent."""
    with halfstep.watch(
        folder=tmp_path,
        name=f"a{text}",
        project=f"p{text}",
        tags=[f"t{text}"],
        config={text: text, "list": [{text: text}]},
        mode="offline",
    ) as watch:
        watch.log({f"m{text}": 1.0, f"n{text}": f"said {text}"})
    Writer(tmp_path, "z").steps().finish()
    done = upload(site, tmp_path)
    assert done.returncode == 0, done.stderr
    escaped = clean(text)
    run = next(run for run in site.runs.values() if run.described["name"].startswith("a"))
    assert run.described["name"] == f"a{escaped}"
    assert run.described["tags"] == [f"t{escaped}"]
    assert run.described["config"] == {escaped: escaped, "list": [{escaped: escaped}]}
    assert len(site.runs) == 2


def test_a_folder_whose_name_is_not_utf8_is_reported_in_its_line(
    site: IngestServer, tmp_path: Path
) -> None:
    """A folder whose name is not UTF-8 is reported in an escaped line, and each run is sent."""
    folder = tmp_path / "caf\udce9"
    for name in "ab":
        Writer(folder, name).steps().finish()
    done = upload(site, folder, PYTHONIOENCODING="utf-8:strict")
    assert done.returncode == 0, done.stderr
    assert [line.partition(": ")[0] for line in done.stdout.splitlines()] == [
        f"{tmp_path}/caf\\udce9/{name}" for name in "ab"
    ]
    assert len(site.runs) == 2


def test_a_run_whose_process_is_dead_has_failed_when_it_is_sent(
    site: IngestServer, tmp_path: Path
) -> None:
    """A dead process's run has failed when it is sent, unless its machine is unknown."""
    writer = Writer(tmp_path).steps()
    described = run_json(writer.files.folder)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        attempt = described["attempts"][0] | {
            "pid": other.pid,
            "pid_started": process.read_start_ticks(other.pid),
        }
        write_json(writer.files.folder / "run.json", described | {"attempts": [attempt]})
        assert "it has not ended yet" in upload(site, tmp_path).stdout  # it lives
        other.kill()
    for elsewhere in ({"pid_space": "another"}, {"pid_space": None}, {"pid_started": None}):
        away = described | {"attempts": [attempt | elsewhere]}
        write_json(writer.files.folder / "run.json", away)
        assert "it has not ended yet" in upload(site, tmp_path).stdout
    assert find_attempt(site, writer.files).outcome is None
    write_json(writer.files.folder / "run.json", described | {"attempts": [attempt]})
    assert upload(site, tmp_path).stdout.endswith("/runs/7\n")
    outcome = find_attempt(site, writer.files).outcome
    assert outcome is not None
    assert (outcome["status"], outcome["step"]) == ("vanished", 100)


def _flip(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 0x55]) + content[at + 1 :]


def assert_reported(site: IngestServer, folder: Path, writer: "Writer", lost: int) -> None:
    """Assert that damaged bytes are in the run's line, the exit code and the server's data."""
    done = upload(site, folder)
    assert done.returncode == 1
    assert done.stdout.endswith(f"; {lost:,} damaged bytes in the spool of attempt 1 are lost\n")
    outcome = find_attempt(site, writer.files).outcome
    assert outcome is not None
    assert outcome["lost_bytes"] == lost


@pytest.mark.parametrize("place", ["first", "last", *extended(["header", "length"])])
def test_damaged_bytes_of_a_spool_are_reported(
    site: IngestServer, tmp_path: Path, place: str
) -> None:
    """Damaged bytes are reported in the run's line, by the exit code and to the server."""
    writer = Writer(tmp_path).steps(2).finish()
    path = writer.files.spool / "1-0.spool"
    content = path.read_bytes()
    half = (len(content) - 16) // 2
    at = {"first": 40, "last": 16 + half + 40, "header": 0, "length": 16 + 3}[place]
    path.write_bytes(_flip(content, at))
    lost = 16 if place == "header" else half
    if place == "header":
        assert lost_bytes(path) == lost
        return
    assert_reported(site, tmp_path, writer, lost)


def test_a_last_frame_that_is_cut_is_no_damage(site: IngestServer, tmp_path: Path) -> None:
    """A last frame cut by a kill is not reported as damage."""
    writer = Writer(tmp_path).steps(2)
    writer.spool.close()
    path = writer.files.spool / "1-0.spool"
    content = path.read_bytes()
    for size in range(len(content) - 300, len(content) + 1, 7):
        path.write_bytes(content[:size])
        assert lost_bytes(path) == 0
    path.write_bytes(content[:-7])
    write_outcome(writer.files, "vanished", 10)
    assert upload(site, tmp_path).returncode == 0


@pytest.mark.parametrize("rest", ["cut", *extended(["empty", "no file"])])
def test_a_spool_shorter_than_the_script_left_it_is_reported(
    site: IngestServer, tmp_path: Path, rest: str
) -> None:
    """A spool that lost bytes since its script ended is reported; a deleted one is not."""
    writer = Writer(tmp_path).steps(2).finish()
    path = writer.files.spool / "1-0.spool"
    content = path.read_bytes()
    lost = (len(content) - 16) // 2 if rest == "cut" else len(content)
    path.write_bytes(content[:-7] if rest == "cut" else b"")
    if rest == "no file":
        path.unlink()
    assert_reported(site, tmp_path, writer, lost)
    whole = Writer(tmp_path / "whole").steps(2).finish()
    for _ in range(2):
        done = upload(site, whole.files.folder, "--delete")
        assert done.returncode == 0, done.stdout


def test_upload_with_a_rejected_token_ends_at_once(site: IngestServer, tmp_path: Path) -> None:
    """`upload` with a rejected token ends at once instead of waiting for a new one."""
    Writer(tmp_path).steps()
    site.tokens = set()
    done = upload(site, tmp_path)
    assert (done.returncode, done.stderr) == (
        1,
        "halfstep: It is unauthorized. The token is that of HALFSTEP_TOKEN.\n",
    )


# ---- The process --------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def none_left(tmp_path: Path) -> Iterator[None]:
    """Assert that a test leaves no process and no file open."""
    yield
    while Writer.opened:
        Writer.opened.pop().close()
    for each in uploaders(tmp_path):
        each.kill()


SCRIPT = """
import os, sys, torch, halfstep
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
watch = halfstep.watch(net, folder=sys.argv[1], name="it")
print("watching", flush=True)
for line in sys.stdin:
    for _ in range(int(line)):
        net(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    watch.log({"text": "some"})
    print("stepped", flush=True)
try:
    os.wait()
except ChildProcessError:
    print("no child", flush=True)
"""


class Script:
    """A script that watches, and takes the requested number of steps."""

    def __init__(self, site: IngestServer, folder: Path) -> None:
        known = {"HALFSTEP_URL": site.url, "HALFSTEP_TOKEN": "token"}
        self.process = warm.Popen(
            [sys.executable, "-c", SCRIPT, str(folder)],
            env={**os.environ, **known},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.receives() == "watching"

    def receives(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def step(self, count: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()
        assert self.receives() == "stepped"

    def end(self) -> tuple[str, str]:
        return self.process.communicate(timeout=120)


def test_watch_starts_an_uploader_and_says_where_the_run_is(
    site: IngestServer, tmp_path: Path
) -> None:
    """`watch` prints the run's page; its detached uploader loads no torch and hides the token."""
    script = Script(site, tmp_path)
    [at_work] = uploaders(tmp_path)
    assert "token" not in " ".join(at_work.cmdline())
    assert os.getsid(at_work.pid) == os.getpgid(at_work.pid) != os.getsid(script.process.pid)
    assert not any("torch" in each.path for each in at_work.memory_maps())
    script.step(30)
    out, err = script.end()
    assert out == "no child\n"
    assert err.startswith("halfstep: watching; ")
    assert err.count(f"{site.url}/runs/7\n") == 1
    files = AttemptFiles(tmp_path / "it", 1)
    until(lambda: read_run(files.folder).id in site.runs)
    until(lambda: find_attempt(site, files).outcome is not None)
    assert find_attempt(site, files).spool == read_spooled(files)
    assert len(find_attempt(site, files).stored) == 1
    until(lambda: not uploaders(tmp_path))
    assert "token" not in (tmp_path / "it" / "run.json").read_text()


def test_the_page_is_updated_once_the_server_has_committed(
    site: IngestServer, tmp_path: Path
) -> None:
    """A caller that waits for the uploader gets the page's address once the server has the run."""
    writer = Writer(tmp_path).steps().finish()
    assert uploader.start(writer.files, site.server, SECONDS) == f"{site.url}/runs/7"
    until(lambda: not uploaders(tmp_path))
    assert find_attempt(site, writer.files).spool == read_spooled(writer.files)
    assert not (writer.files.folder / uploader.LOG).exists()


def test_a_killed_training_is_sent_to_its_last_byte(site: IngestServer, tmp_path: Path) -> None:
    """A killed training is sent to its last byte, even after kill -9 of its session."""
    script = Script(site, tmp_path)
    site.stop()
    script.step(30)
    os.kill(script.process.pid, signal.SIGKILL)
    script.end()
    site.restart()
    files = AttemptFiles(tmp_path / "it", 1)
    until(lambda: not uploaders(tmp_path))
    assert find_attempt(site, files).spool == read_spooled(files)
    outcome = find_attempt(site, files).outcome
    assert outcome is not None
    assert outcome["status"] == "vanished"


def test_a_killed_uploader_is_succeeded_at_the_end(site: IngestServer, tmp_path: Path) -> None:
    """A training whose uploader was killed starts another at its end, for missing data."""
    script = Script(site, tmp_path)
    for each in uploaders(tmp_path):
        each.kill()
        each.wait()  # a busy machine takes its time
    script.step(30)
    script.end()
    files = AttemptFiles(tmp_path / "it", 1)
    until(lambda: read_run(files.folder).id in site.runs)
    until(lambda: find_attempt(site, files).outcome is not None)
    assert find_attempt(site, files).spool == read_spooled(files)


def test_a_server_that_is_slow_to_answer_holds_no_training(
    site: IngestServer, tmp_path: Path
) -> None:
    """A slow server does not delay the training; the uploader prints the address later."""
    site.faults = ["stall"]
    script = Script(site, tmp_path)
    script.step(30)
    site.let_go.set()
    log = tmp_path / "it" / uploader.LOG
    until(lambda: log.exists() and "the run is at" in log.read_text())
    _, err = script.end()
    assert err.splitlines()[0] == (
        f"halfstep: watching; the run is in {tmp_path}/it, and uploaded to "
        f"{site.url} once that answers"
    )
    assert err.splitlines()[-1] == f"halfstep: the run is at {site.url}/runs/7"


@pytest.mark.parametrize("is_told", [True, False])
def test_a_rejection_is_a_response(
    site: IngestServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    is_told: bool,
) -> None:
    """A rejected token ends the wait for the page, and the message names where it came from."""
    monkeypatch.setattr(run_upload, "PAGE_SECONDS", SECONDS)
    site.tokens = set()
    result = {"url": site.url, "token": "token"} if is_told else {}
    if not is_told:
        credentials.store(site.server)
    halfstep.watch(folder=tmp_path, name="it", **result).finish()
    said = capfd.readouterr().err
    named = "" if is_told else f" The token is that of {credentials.place()}."
    refused, begun = said.splitlines()[:2]
    assert refused.startswith(
        f"halfstep: the server rejects the token (It is unauthorized.{named});"
    )
    assert begun == f"halfstep: watching; the run is in {tmp_path / 'it'}"


def test_offline_nothing_is_sent_before_upload(
    site: IngestServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An offline run is sent only by `halfstep upload`."""
    known = {"url": site.url, "token": "token", "folder": tmp_path}
    halfstep.watch(name="a", mode="offline", **known).finish()
    monkeypatch.setenv("HALFSTEP_MODE", "offline")
    halfstep.watch(name="b", **known).finish()
    assert not uploaders(tmp_path)
    assert site.requests == []
    upload(site, tmp_path)
    assert len(site.runs) == 2


@pytest.mark.slow
def test_a_folder_that_is_deleted_ends_the_uploader(tmp_path: Path) -> None:
    """If the folder is deleted, the uploader ends with one line in its log."""
    files = open_run(tmp_path, name="it")
    write_json(files.folder / "run.json", run_json(files.folder) | {"attempts": []})
    uploader.start(files, Credentials("http://127.0.0.1:1", "token"))
    log = files.folder / uploader.LOG
    until(lambda: log.exists() and "the uploader has failed" in log.read_text())


def test_uploaders_that_are_killed_lose_nothing_and_send_nothing_twice(
    site: IngestServer, tmp_path: Path
) -> None:
    """Uploaders killed at any moment lose nothing and send nothing twice."""
    writer = Writer(tmp_path)
    for number in range(8):
        writer.steps(30).file(b"x" * 100_000, f"{number}.bin")
        site.faults = ["", "cut after", "500"]
        enough = len(site.requests) + 1 + number % 4
        uploader.start(writer.files, site.server)
        until(lambda enough=enough: len(site.requests) >= enough)  # type: ignore[misc]
        for each in uploaders(tmp_path):
            each.kill()
        until(lambda: not uploader.is_uploading(writer.files.folder))
    writer.finish()
    uploader.start(writer.files, site.server)
    until(lambda: not uploaders(tmp_path))
    attempt = find_attempt(site, writer.files)
    assert attempt.spool == read_spooled(writer.files)
    assert len(attempt.stored) == 8
    assert attempt.outcome is not None


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[tuple[Writer, SpoolWriter, FolderLock]]:
    """A run that has ended, with a sidecar that is still writing."""
    writer = Writer(tmp_path).steps().finish()
    spool = SpoolWriter(writer.files.sidecar, writer.files.attempt)
    lock = FolderLock(writer.files.folder / LOCK)
    assert lock.acquire()
    yield writer, spool, lock
    spool.close()
    lock.release()


LINE = {"event": "line", "time": 1.0, "stream": "stdout", "text": "the last"}


def test_the_end_of_a_run_waits_for_its_sidecar(
    site: IngestServer, sidecar: tuple[Writer, SpoolWriter, FolderLock]
) -> None:
    """The end of a run is sent after the output that its sidecar still writes."""
    writer, spool, lock = sidecar
    with Ingest(site.server) as ingest:
        sending = RunSending(writer.files.folder, ingest, print, sidecar_seconds=math.inf)
        sending.send()
        assert find_attempt(site, writer.files).spool
        assert find_attempt(site, writer.files).outcome is None
        assert not sending.is_over(writer.files.attempt)
        spool.event(event_of(LINE))
        lock.release()
        sending.send()
        assert sending.is_over(writer.files.attempt)
    assert b"the last" in find_attempt(site, writer.files).sidecar.spooled
    assert find_attempt(site, writer.files).outcome is not None


def test_a_sidecar_that_does_not_end_is_not_waited_for_for_ever(
    site: IngestServer, sidecar: tuple[Writer, SpoolWriter, FolderLock]
) -> None:
    """`upload` waits only some seconds for a sidecar that does not end."""
    writer, spool, _lock = sidecar
    spool.event(event_of(LINE))
    waits: list[float] = []
    with Ingest(site.server) as ingest:
        sent = send_run(writer.files.folder, ingest, print, waits.append, delete=True)
    assert sum(waits) == pytest.approx(sender.SIDECAR_SECONDS)
    assert sent.is_over
    assert find_attempt(site, writer.files).outcome is not None
    assert b"the last" in find_attempt(site, writer.files).sidecar.spooled
    assert not list(writer.files.sidecar.iterdir())


@pytest.mark.parametrize("number", [None, 0])
def test_an_older_server_gets_no_run(
    site: IngestServer, tmp_path: Path, number: int | None
) -> None:
    """An older server gets no run, which would never end on it; the error names what to update."""
    writer = Writer(tmp_path).steps(3)
    writer.finish()
    files = writer.files
    site.protocol = number
    with Ingest(site.server) as ingest, pytest.raises(ApiError, match="update the server") as old:
        RunSending(files.folder, ingest, print).send()
    assert (old.value.status, old.value.code, site.runs) == (426, "older_server", {})
    site.protocol = protocol.PROTOCOL
    assert send(site, files) == []
    assert find_attempt(site, files).spool == read_spooled(files)
