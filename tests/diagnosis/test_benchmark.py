"""Tests of how benchmarks.diagnosis parses the output of other tools."""

import json

import pytest

from benchmarks.diagnosis import (
    named_by_anomaly,
    named_by_debug,
    named_by_messages,
    named_by_wandb,
)
from tests.marks import looped

NAN = "RuntimeError: Function '{}' returned nan values in its 0th output."


@looped(
    "text, causes",
    [
        ("", set()),
        ("ValueError: Attempting to unscale FP16 gradients.", {"fp16_gradients"}),
        ("AssertionError: No inf checks were recorded prior to update.", {"no_inf_checks"}),
        (
            "UserWarning: Detected call of `lr_scheduler.step()` before `optimizer.step()`. In",
            {"schedule_in_skipped_steps"},
        ),
        (NAN.format("SqrtBackward0"), set()),
    ],
)
def test_messages_name_what_they_state(text: str, causes: set[str]) -> None:
    assert named_by_messages(text) == causes


@pytest.mark.parametrize(
    ("function", "causes"),
    [
        ("SqrtBackward0", {"singular_gradient"}),
        ("AddmmBackward0", {"backward_overflow"}),
        ("ToCopyBackward0", {"backward_overflow"}),
    ],
)
def test_anomaly_mode_names_by_the_function(function: str, causes: set[str]) -> None:
    """Anomaly mode names an overflow for a product or a cast, and else a singularity."""
    assert named_by_anomaly(NAN.format(function)) == causes


@looped(
    "printed, causes",
    [
        ("", set()),
        ("input[0] has nans\noutput has nans\n", {"nonfinite_inputs"}),
        ("output has infs\ninput[0] has infs\n", {"forward_overflow", "nonfinite_without_scaler"}),
        ("weight has nans\ninput[0] has nans\n", set()),
    ],
)
def test_the_first_number_that_is_not_finite_names(printed: str, causes: set[str]) -> None:
    assert named_by_debug(printed) == causes


@pytest.mark.parametrize(
    ("charts", "causes"),
    [
        ({"a": [-1.0, 1.0], "b": [0.0, 0.0]}, set()),
        ({"a": [-1.0, 1.0], "b": None}, {"no_gradient"}),
        ({"a": [0.0, 0.0], "b": [0.0, 0.0]}, {"zero_gradients"}),
    ],
)
def test_histograms_name_by_what_they_lack(charts: object, causes: set[str]) -> None:
    assert named_by_wandb(json.dumps(charts)) == causes
