"""`import halfstep as trackio`, in scripts written like Trackio's documentation."""

import json
import math
import random
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as PILImage

import halfstep
import halfstep as trackio
from halfstep.session import active_run, watched_run
from halfstep.telemetry.run_folder import read_run
from halfstep.wandb_compat import unsupported
from tests.halfstep.watching.watch_made import Written


@pytest.fixture(autouse=True)
def beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Provide an empty folder with the wheel only, and end the run of the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(unsupported._messages, "_printed", {})
    monkeypatch.setattr(watched_run, "find_spec", lambda name: None)
    monkeypatch.setenv("HALFSTEP_MODE", "offline")
    yield tmp_path
    trackio.finish()
    if active_run.active is not None:
        active_run.active.finish()


def runs() -> list[Path]:
    return sorted(Path("halfstep-runs").iterdir())


def read_logged(place: Path) -> dict[str, list[tuple[int, Any]]]:
    """Return the numbers of a run, by name."""
    found: dict[str, list[tuple[int, Any]]] = {}
    for event in Written(place).of("metric"):
        found.setdefault(event["name"], []).append((event["step"], event["value"]))
    return found


def test_the_quickstart() -> None:
    """In Trackio's quickstart each `init` is a run, although only the last one is finished."""
    epochs = 8
    for _run in range(3):
        trackio.init(
            project="my-project",
            config={"epochs": epochs, "learning_rate": 0.001, "batch_size": 64},
        )
        for epoch in range(epochs):
            train_loss = random.uniform(0.2, 1.0)
            trackio.log({"epoch": epoch, "train_loss": train_loss, "val_loss": train_loss - 0.05})
    trackio.finish()
    assert len(runs()) == 3
    for place in runs():
        described = read_run(place)
        assert (described.project, (described.config or {})["batch_size"]) == ("my-project", 64)
        assert [value for _, value in read_logged(place)["epoch"]] == list(range(epochs))
        assert json.loads((place / "outcome-1.json").read_text())["status"] == "finished"


def test_names_groups_and_positions() -> None:
    """Calls of Trackio's guide work also with positional arguments, which differ from W&B's."""
    trackio.init("my_project", "baseline_run_1", "baseline")
    trackio.log({"loss": 0.05})
    trackio.log(metrics={"loss": 0.04, "accuracy": 0.95})
    trackio.finish()
    described = read_run(Path("halfstep-runs") / "baseline_run_1")
    assert (described.project, described.name) == ("my_project", "baseline_run_1")
    assert (described.config or {})["group"] == "baseline"


def test_the_kitchen_sink(capsys: pytest.CaptureFixture[str]) -> None:
    """A script with alerts, files, media, tables, system values, reports and the dashboard runs."""
    Path("config1.yml").write_text("a: 1\n")
    trackio.init(project="demo", name="run-0", config={"mode": "local-only"}, auto_log_gpu=False)
    trackio.alert(title="Run started", text="Project: demo", level=trackio.AlertLevel.INFO)
    trackio.save(Path("config1.yml"), project="demo")
    for step in range(4):
        wave_ = np.sin(np.linspace(0, 100, 1600))
        trackio.log(
            {
                "train/accuracy": 1 - math.exp(-0.35 * step),
                "media/image": trackio.Image(PILImage.new("RGB", (8, 8)), caption="a caption"),
                "media/audio": trackio.Audio(
                    (0.4 * wave_ * 32767).astype(np.int16), sample_rate=16000, format="wav"
                ),
                "tables/predictions": trackio.Table(
                    columns=["sample", "prediction"], data=[["a", "cat"], ["b", "dog"]]
                ),
            },
            step=step,
        )
        trackio.log_system({"cpu_percent": 25 + step})
        assert trackio.log_gpu() == {}
    trackio.log({"reports/summary": trackio.Markdown("# Report")})
    trackio.finish()
    result = trackio.show(project="demo", open_browser=False, block_thread=False)
    assert (len(result), result[3]) == (4, "")
    [place] = runs()
    found = read_logged(place)
    assert [step for step, _ in found["train/accuracy"]] == [0, 1, 2, 3]
    assert [value for _, value in found["system/cpu_percent"]] == [25, 26, 27, 28]
    names = {path.name for path in (place / "artifacts").rglob("*") if path.is_file()}
    assert {"media-image.png", "media-audio.wav", "tables-predictions.csv"} <= names
    assert any(name.startswith("reports-summary") for name in names)
    [stored] = (place / "artifacts").rglob("config1.yml")
    assert stored.read_text() == "a: 1\n"
    assert "alert: Run started: Project: demo" in capsys.readouterr().err


def test_audio_of_floats_and_of_a_file(tmp_path: Path) -> None:
    """Audio with peaks above 1 is normalized, and a WAV file is read, as in Trackio's guide."""
    rate = 16000
    tone = 2 * np.sin(np.linspace(0, 100, rate, endpoint=False))
    shown = trackio.Audio(
        np.stack([tone, tone], axis=1), caption="A4", sample_rate=rate
    ).to_loggable()
    assert (shown.rate, shown.samples.shape) == (rate, (rate, 2))
    assert np.abs(shown.samples).max() == 1
    with wave.open("it.wav", "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(np.array([0, 16384], "<i2").tobytes())
    shown = trackio.Audio("it.wav").to_loggable()
    assert (shown.rate, shown.samples.ravel().tolist()) == (8000, [0.0, 0.5])


@pytest.mark.parametrize("resume", ["never", "allow", "must"])
def test_a_crash_and_a_restart(resume: str) -> None:
    """By `resume` the latest run of a name continues, or another one of the name begins."""
    ids = []
    trackio.init(project="other", name="trainer-job-42").finish()
    for phase, how in (("crash", "never"), ("restart", resume)):
        run = trackio.init(project="it", name="trainer-job-42", resume=how, config={"phase": phase})
        assert run.name == "trainer-job-42"
        for offset in range(5):
            trackio.log({"loss": 0.7 - offset / 10, "progress": offset}, step=None)
        trackio.finish()
        ids.append(run.id)
    assert (ids[0] == ids[1]) == (resume != "never")
    if resume != "never":
        steps = [step for step, _ in read_logged(runs()[1])["progress"]]
        assert len(set(steps)) == 10
    with pytest.raises(ValueError, match="does not exist in project 'it'"):
        trackio.init(project="it", name="none", resume="must")


def test_what_it_lacks_is_said_and_does_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """Trackio's traces, spaces and servers are reported as unsupported, and do nothing."""
    trackio.init(project="it", name="run", space_id="me/space", embed=False)
    trackio.log({"trace": trackio.Trace([]), "a": 1})
    trackio.sync(project="it")
    trackio.finish()
    assert list(read_logged(runs()[0])) == ["a"]
    err = capsys.readouterr().err
    for text in ("as trackio: init(space_id=…)", "Trace is not supported", "sync is not supported"):
        assert text in err


def test_only_the_name_decides() -> None:
    """Calls are Trackio's under the name `trackio` only, also if imported within a function."""

    def inner() -> Any:
        import halfstep as trackio

        return trackio.init

    def outer() -> Any:
        trackio = None
        return (trackio, halfstep.init)

    assert inner() is trackio.init
    assert outer()[1] is not trackio.init
    assert trackio.watch is not None
