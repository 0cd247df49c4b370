"""`halfstep.watch` in a script that a worker started for a queued run."""

import errno
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import halfstep
from halfstep.clock import clock
from halfstep.session import active_run
from halfstep.session.queued_run import QueuedRun
from tests.halfstep.watching.watch_made import Script, Written

SCRIPT = Script()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A queued run's folder; nothing stays watched after the test."""
    folder = tmp_path / "runs" / "7"
    folder.mkdir(parents=True)
    attempt(folder, 1, monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HALFSTEP_MODE", raising=False)
    yield folder
    if active_run.active is not None:
        active_run.active.finish()


def attempt(folder: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the worker start an attempt."""
    job = {"started_at": clock() - 1000.0 * number}
    (folder / f"job-{number}.json").write_text(json.dumps(job))
    monkeypatch.setenv("HALFSTEP_RUN_FOLDER", str(folder))
    monkeypatch.setenv("HALFSTEP_ATTEMPT", str(number))
    monkeypatch.setenv("HALFSTEP_RUN", "7")


def train(**named: str) -> None:
    SCRIPT.train(lambda net: halfstep.watch(net, **named))
    halfstep.watch().finish()


@pytest.mark.slow
def test_the_run_is_the_queues_whatever_the_script_calls_it(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Steps go to the queued run, whatever name the script gives, and no other run is created."""
    train(name="mine", run="other", url="http://127.0.0.1:9", token="t", folder="here")
    written = Written(folder)
    assert written.truth().scales == SCRIPT.train().scales
    assert written.steps["elapsed_ms"].min() >= 1_000_000  # from the run's first start
    assert "this is run 7 of the queue" in capfd.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs"]
    assert json.loads((folder / "outcome-1.json").read_text())["status"] == "finished"


def test_a_wandb_script_logs_to_the_queued_run(folder: Path) -> None:
    """A W&B script's own configuration is shown next to the submitted one."""
    run = halfstep.init(name="mine", config={"lr": 0.1})
    run.config.update({"more": 1})
    halfstep.log({"accuracy": 0.5})
    halfstep.finish()
    written = Written(folder)
    assert [(each["name"], each["value"]) for each in written.of("metric")] == [("accuracy", 0.5)]
    result = [each["config"] for each in written.of("configured")]
    assert result == [{"lr": 0.1}, {"lr": 0.1, "more": 1}]
    assert (run.id, run.name) == ("7", "run 7")
    assert not (folder / "run.json").exists()


def test_the_configuration_of_a_script_is_recorded_without_secrets(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Secrets that the queue passed to a script are hidden, and long texts are cut."""
    monkeypatch.setenv("HALFSTEP_SECRETS", "API_KEY,GONE")
    monkeypatch.setenv("API_KEY", "open-sesame")
    config = {"lr": 0.1, "key": "open-sesame", "data": {"path": Path("/data"), "sizes": (1, 2)}}
    watch = halfstep.watch(config=config)
    watch.configure({"text": "a" * 100_000})
    watch.configure("a text")
    watch.finish()
    result, cut = Written(folder).of("configured")
    assert cut["config"]["text"].startswith("a" * 1000)
    assert result["config"] == {"lr": 0.1, "key": "***", "data": {"path": "/data", "sizes": [1, 2]}}
    assert "text is cut to 2,000 of 100,000 characters" in capfd.readouterr().err


@pytest.mark.slow
def test_several_trainings_of_one_script_continue_each_other(folder: Path) -> None:
    """A second training in one script continues the steps of the first, in its own file."""
    train()
    train()
    steps = Written(folder).steps["step"].tolist()
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) == 2 * len(SCRIPT.train().scales)
    assert sorted(path.name for path in (folder / "spool").iterdir()) == ["1-0.spool", "1-1.spool"]


def test_a_killed_one_is_continued(folder: Path) -> None:
    """The position of a killed process is read from its spool by the next one."""
    SCRIPT.train(halfstep.watch)
    halfstep.watch()._loop.drain(60.0)
    watch = halfstep.watch()
    watch._run.outcome.disarm()
    assert watch._run.queued is not None
    watch._run.spool.close()  # as the kernel does
    watch._run.queued.lock.close()
    found = QueuedRun.take()
    assert found is not None
    assert (found.step, found.sequence) == (watch.step, 1)
    found.leave(found.step)


@pytest.mark.slow
def test_the_next_attempt_starts_over_unless_it_resumes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next attempt starts at step 0, because only the script knows from where it resumes."""
    train()
    attempt(folder, 2, monkeypatch)
    train()
    attempt(folder, 3, monkeypatch)
    SCRIPT.train(lambda net: halfstep.watch(net).resume(400), steps=3)
    halfstep.watch().finish()
    written = Written(folder)
    assert [event["step"] for event in written.of("resumed")] == [400]
    assert written.steps["step"].tolist()[-3:] == [401, 402, 403]
    assert written.steps["step"].tolist().count(1) == 2


@pytest.mark.slow
def test_a_second_process_at_once_trains_unwatched(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A second concurrent process trains unwatched, and prints this."""
    holds = (
        "from halfstep.session.queued_run import QueuedRun as Q; q = Q.take(); print(flush=True)"
    )
    command = [sys.executable, "-c", f"{holds}; input()"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert halfstep.watch().folder is None
        other.communicate(b"\n")
    assert "another process of this run is already watched" in capfd.readouterr().err
    assert not (folder / "spool").exists()
    train()
    assert len(Written(folder).steps) > 0


def test_without_locks_a_second_process_is_rejected_as_well(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without file locks a second process is still rejected, and other lock errors are named."""

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("halfstep.session.queued_run.fcntl.lockf", no_locks)
    first = QueuedRun.take()
    assert first is not None
    assert halfstep.watch().folder is None
    assert "another process of this run is already watched" in capfd.readouterr().err
    first.leave(0)
    train()
    assert len(Written(folder).steps) > 0
    assert not [*folder.glob("*.owner")]
    monkeypatch.setattr("halfstep.telemetry.folder_lock.OwnerFile.acquire", no_locks)
    assert halfstep.watch().folder is None
    said = capfd.readouterr().err
    assert "OSError: [Errno 37] No locks available" in said
    assert "another process" not in said


def test_a_checkpoint_is_a_copy(folder: Path, tmp_path: Path) -> None:
    """A queued run's checkpoint is copied, because the script may overwrite it before the
    upload.
    """
    path = tmp_path / "last.pt"
    path.write_bytes(b"first")
    watch = halfstep.watch()
    watch.checkpoint(path)
    path.write_bytes(b"later")
    watch.finish()
    [event] = Written(folder).of("checkpoint")
    assert (folder / event["files"][0]["path"]).read_bytes() == b"first"
