import numpy as np
import pytest
import torch

from halfstep.recipe import RecipeError
from tests.trainer.conftest import Regression, assert_same_bits
from tests.trainer.no_sync_made import attempt_steps
from trainer.logged_values import MOST_NAMES

FP16 = {"precision": "fp16"}
SKIPPING = FP16 | {"scaler": {"init_scale": 2.0**24, "growth_interval": 5}}


class Telling(Regression):
    """A recipe that logs twice its loss, and a host counter of micro-batches."""

    batches = 0

    def training_step(self, batch):
        for loss in super().training_step(batch):
            self.batches += 1
            self.log({"train/double": 2 * loss.value, "train/batches": self.batches})
            self.log({"train/one": torch.ones(1, 1), "train/array": np.ones(1)})
            yield loss

    def evaluate(self):
        self.log({"train/double": torch.zeros(())})
        return super().evaluate()


def read_reported(run, name):
    """Return steps and values of a metric."""
    events = [event for event in run.of("metric") if event["name"] == name]
    return [event["step"] for event in events], [event["value"] for event in events]


def test_a_number_of_each_step_is_reported_once(run_loop):
    """A number logged in each step is a metric with its time; an evaluation logs none."""
    values = {"training": {"steps": 12}, "evaluation": {"every_steps": 3, "at_start": True}}
    run = run_loop(Telling, values)
    steps, doubles = read_reported(run, "train/double")
    assert steps == list(range(1, 13))
    assert doubles == [2 * loss for loss in run.records["loss"].tolist()]
    times = [event["elapsed_ms"] for event in run.of("metric") if event["name"] == "train/double"]
    assert times == sorted(times)


def test_the_mean_of_micro_batches_is_recorded(run_loop):
    """The mean over micro-batches is recorded, also of a number on the host."""
    run = run_loop(Telling, {"training": {"steps": 3, "accumulation_steps": 4, "batch_size": 4}})
    assert read_reported(run, "train/batches") == ([1, 2, 3], [2.5, 6.5, 10.5])


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_tensor_or_an_array_of_one_number_is_that(run_loop, accumulation):
    """A tensor or array with one element is logged as a number."""
    run = run_loop(Telling, {"training": {"steps": 2, "accumulation_steps": accumulation}})
    assert (
        read_reported(run, "train/one") == read_reported(run, "train/array") == ([1, 2], [1.0, 1.0])
    )


class Showing(Regression):
    """A recipe that logs an image, a table and a text in each micro-batch of its second step."""

    steps = 0

    def training_step(self, batch):
        self.steps += 1
        if self.steps in (3, 4):
            pixels = torch.full((2, 2), 0.2 * (self.steps - 2))
            rows = [{"micro-batch": self.steps}]
            self.log({"val/image": pixels, "rows": rows, "words": "a € b", "train/one": 1})
        yield from super().training_step(batch)


def test_other_values_become_files_of_their_step(run_loop, tmp_path):
    """The last micro-batch's file is kept; numbers are logged as usual."""
    values = {"training": {"steps": 3, "accumulation_steps": 2}}
    run = run_loop(Showing, values, folder=tmp_path / "checkpoints")
    files = {e["name"]: (tmp_path / e["path"]).read_bytes() for e in run.of("artifact")}
    assert {event["step"] for event in run.of("artifact")} == {2}
    assert files["rows.csv"].splitlines() == [b"micro-batch", b"4"]
    assert files["words.txt"].decode() == "a € b"
    assert files["val-image.png"].startswith(b"\x89PNG")
    assert read_reported(run, "train/one") == ([2], [1.0])


def test_a_place_that_takes_no_file_ends_no_run(run_loop, tmp_path):
    """A folder that cannot be written is reported once, and the training continues."""
    (tmp_path / "artifacts").write_text("a file where a folder would be")
    run = run_loop(Showing, {"training": {"steps": 6}}, folder=tmp_path / "checkpoints")
    assert run.outcome.step == 6
    [failed] = run.of("failed_diagnosis")
    assert failed["diagnosis"] == "saving of logged values"
    assert failed["step"] == 3
    assert str(tmp_path / "artifacts") in failed["error"]


def test_a_picture_is_kept_although_its_step_raises_later(run_loop, tmp_path):
    """An image is on the disk at the run's end, even if its step raises."""

    class Broken(Showing):
        def after_step(self):
            if self.steps == 5:
                raise ArithmeticError("enough")

    with pytest.raises(ArithmeticError):
        run_loop(Broken, {"training": {"steps": 6}}, folder=tmp_path / "checkpoints")
    assert len(list(tmp_path.glob("artifacts/step-*/val-image.png"))) == 2


@pytest.mark.slow
def test_replays_and_retries_are_not_recorded(run_loop):
    """A step that is replayed or retried is logged once."""
    scaler = {"init_scale": 2.0**24, "growth_interval": 30, "retry_in_fp32": True}
    run = run_loop(Telling, FP16 | {"training": {"steps": 80}, "scaler": scaler})
    assert run.of("replay")
    assert run.of("retry")
    assert read_reported(run, "train/double")[0] == list(range(1, 81))


def test_no_bit_of_training_is_different(run_loop):
    """Logging values changes no bit, also with skipped steps."""
    values = SKIPPING | {"training": {"steps": 30}}
    run = run_loop(Telling, values)
    assert run.list_skipped()
    assert_same_bits(run.weights(), run_loop(Regression, values).weights())


@pytest.mark.usefixtures("nothing_compiled")
def test_it_never_waits_for_the_device(monkeypatch):
    """Logging numbers of device and host never waits for the device, also with micro-batches."""
    values = {"training": {"accumulation_steps": 2}}
    recipe = attempt_steps(monkeypatch, Telling, values)
    assert recipe.batches == 6


@pytest.mark.parametrize("name", ["x" * 400, "", "a\0b", 7], ids=["long", "empty", "NUL", "7"])
def test_an_unrecordable_name_is_left_out(run_loop, name):
    """A metric name that cannot be recorded is reported once; other values are recorded."""

    class Wrong(Regression):
        def training_step(self, batch):
            self.log({name: 2.0, "good": 1.0})
            yield from super().training_step(batch)

    run = run_loop(Wrong, {"training": {"steps": 3}})
    assert read_reported(run, "good") == ([1, 2, 3], [1.0] * 3)
    assert read_reported(run, name) == ([], [])
    [failed] = run.of("failed_diagnosis")
    assert (failed["diagnosis"], failed["step"]) == ("logging of a number", 1)
    assert "of 1 to 200 characters" in failed["error"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"a": object()}, '"a" cannot be saved: a value of type object cannot be logged; allowed'),
        (
            {"a": torch.zeros(3)},
            r'"a" cannot be saved: a tensor of shape \(3,\) cannot be logged; allowed: a number, ',
        ),
        (
            {f"n{i}": i for i in range(MOST_NAMES + 1)},
            f"allowed: at most {MOST_NAMES} names per step",
        ),
    ],
)
def test_what_cannot_be_shown_ends_the_run_by_name(run_loop, values, message):
    """A value that cannot be shown ends the run before the step, with the name of the value."""

    class Wrong(Regression):
        def training_step(self, batch):
            self.log(values)
            yield from super().training_step(batch)

    with pytest.raises(RecipeError, match=message):
        run_loop(Wrong, {"training": {"steps": 2}})
