"""Precision diffs of a training on request."""

from typing import Any

import pytest
import torch

from halfstep.run_config import parse_config
from halfstep.telemetry.events import FailedDiagnosis, PrecisionDiff, RequestDone
from trainer.distributed.ranks import Control, Request
from trainer.loop import train
from trainer.recipes.digits import Digits
from trainer.setup import prepare_run

VALUES = {"training": {"steps": 6, "batch_size": 16}, "evaluation": {"every_steps": None}}


def train_with(requests: dict[int, Request], **values: Any) -> tuple[list[Any], list[Any]]:
    """Train with requests by step boundary; return the events and the bytes of the steps."""
    events: list[Any] = []
    steps: list[Any] = []
    boundary = 0

    def control() -> Control:
        nonlocal boundary
        boundary += 1
        return Control(request=requests.get(boundary))

    train(
        prepare_run(
            Digits,
            parse_config(Digits, VALUES | values),
            device=torch.device("cpu"),
            on_steps=lambda records: steps.extend(
                (float(r["loss"]), float(r["grad_norm"]), float(r["scale"])) for r in records
            ),
            on_event=events.append,
        ),
        control=control,
    )
    return events, steps


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_requested_diff_changes_no_step(precision: str) -> None:
    """A requested diff is acknowledged, names modules like the configuration, and changes no
    step.
    """
    request = Request(id=7, kind="precision_diff", value=0.0)
    events, steps = train_with({2: request, 4: request}, precision=precision)
    plain_events, plain_steps = train_with({}, precision=precision)
    assert repr(steps) == repr(plain_steps)  # with NaN
    assert [e.request for e in events if isinstance(e, RequestDone)] == [7, 7]
    diffs = [e for e in events if isinstance(e, PrecisionDiff)]
    assert [diff.step for diff in diffs] == [2, 4]
    assert {row.name.split(".")[0] for row in diffs[0].rows} <= {"(loss)", *_names(precision)}
    assert diffs[0].suggested == []  # a scale that overflows is no reason for fp32
    assert not [e for e in plain_events if isinstance(e, PrecisionDiff)]
    assert not [e for e in events if isinstance(e, FailedDiagnosis)]


def test_run_in_fp32_has_none() -> None:
    """A diff requested from a run in fp32 is acknowledged without a result."""
    request = Request(id=7, kind="precision_diff", value=0.0)
    events, steps = train_with({2: request}, precision="fp32")
    assert [e.request for e in events if isinstance(e, RequestDone)] == [7]
    [failed] = [e for e in events if isinstance(e, FailedDiagnosis)]
    assert "needs a run in fp16 or bf16" in failed.error
    assert len(steps) == VALUES["training"]["steps"]  # type: ignore[index]


def _names(precision: str) -> set[str]:
    config = parse_config(Digits, VALUES | {"precision": precision})
    return set(Digits(config, torch.device("cpu")).modules)
