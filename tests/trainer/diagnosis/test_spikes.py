"""Loss spikes: their detection, and rollbacks."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import to_builtins

from halfstep.config_groups import Spike
from halfstep.run_config import ConfigError, parse_config
from halfstep.telemetry import events
from halfstep.telemetry.flags import SKIPPED
from halfstep.telemetry.spool import STEP_DTYPE
from tests.trainer.conftest import Regression, assert_same_bits
from tests.trainer.diagnosis.spikes_made import VALUES, WINDOW, Poisoned
from trainer.checkpoints.resume import select_inherited_parts
from trainer.checkpoints.rollback import SpikeError
from trainer.diagnosis.spikes import Spikes, robust_z
from trainer.distributed.ranks import Control, Request


def records(losses, flags=()):
    made = np.zeros(len(losses), STEP_DTYPE)
    made["step"] = np.arange(1, len(losses) + 1)
    made["loss"] = losses
    for step in flags:
        made["flags"][step - 1] = SKIPPED
    return made


def noise(count, seed=0):
    return np.random.default_rng(seed).normal(1.0, 0.1, count)


def report(made, *cuts, **settings):
    """Return the spikes of records that are delivered in pieces."""
    found = []
    spikes = Spikes(Spike(window_steps=WINDOW, **settings), found.append)
    for piece in np.split(made, cuts):
        spikes.receive(piece)
    return [(each.step, each.loss, each.z) for each in found]


def test_a_spike_is_reported_with_its_step_and_height():
    """A spike has its step and z, in robust standard deviations above the median before."""
    losses = noise(60)
    losses[40] = 5.0
    made = records(losses)
    window = made["loss"][40 - WINDOW : 40].astype(float)
    [(step, loss, z)] = report(made)
    assert (step, loss) == (41, 5.0)
    deviation = np.median(np.abs(window - np.median(window)))
    assert z == pytest.approx((5.0 - np.median(window)) / (1.4826 * deviation))
    assert report(made, threshold=z * 1.01) == []
    assert report(made, threshold=None) == []


@given(cuts=st.lists(st.integers(0, 80), max_size=6))
def test_how_records_are_handed_over_changes_nothing(cuts):
    """Any split of the records gives the same spikes, because each depends only on
    earlier records.
    """
    losses = noise(80)
    losses[[30, 60]] = 4.0, 9.0
    made = records(losses)
    assert report(made, *sorted(cuts)) == report(made)
    assert [step for step, *_ in report(made)] == [31, 61]


def test_the_first_step_of_an_excursion_is_reported():
    """A loss that stays high or rises is one spike, for the length of a window."""
    losses = noise(60)
    losses[30:] = np.linspace(5, 50, 30)
    assert report(records(losses))[0][0] == 31
    assert len(report(records(losses)[: 31 + WINDOW])) == 1


def test_a_loss_that_falls_or_rests_is_no_spike():
    """Neither a falling loss nor a constant one with noise in its last bits is a spike."""
    assert report(records(np.exp(-np.arange(200) / 30))) == []
    constant = np.full(200, 0.5) + np.random.default_rng(1).normal(0, 1e-7, 200)
    assert report(records(constant)) == []


def test_a_loss_that_is_not_finite_is_one_where_the_step_was_applied():
    """A non-finite loss is a spike if its step was applied, even before the window is full."""
    losses = noise(12)
    losses[[4, 8]] = np.nan, np.inf
    assert [(s, z) for s, _loss, z in report(records(losses, flags=[5]))] == [(9, math.inf)]
    assert report(records(losses, flags=[5, 9])) == []


def test_what_decides_of_the_next_step_is_in_the_state():
    """A detector restored from its state reports the same spikes."""
    losses = noise(80)
    losses[40] = 5.0
    made, whole, parts = records(losses), [], []
    settings = Spike(window_steps=WINDOW, rollback=True)
    one, other = (Spikes(settings, told_.append) for told_ in (whole, parts))
    one.receive(made[:41])
    other.load_state_dict(one.state_dict())
    assert other.pending == one.pending != None  # noqa: E711
    one.receive(made[41:])
    other.receive(made[41:])
    assert whole[1:] == parts
    assert robust_z(2.0, np.ones(16)) == pytest.approx(1000)


@pytest.mark.parametrize("rollback", [True, False])
def test_a_spike_above_nothing_is_plain_numbers(tmp_path, rollback):
    """A spike above losses of 0 is stored as plain numbers, so its checkpoint loads."""
    losses = np.zeros(60)
    losses[40] = 5.0
    spikes = Spikes(Spike(window_steps=WINDOW, rollback=rollback), lambda event: None)
    spikes.receive(records(losses))
    torch.save(spikes.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert (state["pending"] is not None) == rollback
    loaded = Spikes(Spike(window_steps=WINDOW, rollback=rollback), lambda event: None)
    loaded.load_state_dict(state)
    assert loaded.pending == spikes.pending


def test_a_pending_spike_of_the_version_before_is_loaded():
    """A pending spike in the previous version's checkpoint, as a dictionary, is loaded."""
    spikes = Spikes(Spike(window_steps=WINDOW), lambda event: None)
    before = {"event": "spike", "step": 7, "loss": float("inf"), "z": float("inf")}
    spikes.load_state_dict(spikes.state_dict() | {"pending": before})
    assert spikes.pending == events.Spike(step=7, loss=float("inf"), z=float("inf"))


def test_a_rewind_goes_back_and_leaves_the_examples_out(run_loop, tmp_path):
    """A rollback resumes the last checkpoint before the spike, with the examples after the
    undone steps.
    """
    run = run_loop(Poisoned, VALUES, tmp_path / "a")
    first, *_ = run.of("rolled_back")
    spike = next(each for each in run.of("spike") if "rolled_back_to" in each)
    assert first["spike"] == spike["step"]
    assert first["step"] == spike["rolled_back_to"] == (spike["step"] - 1) // 10 * 10
    assert first["from_step"] % 4 == 0 or first["from_step"] % 10 == 0
    assert first["from_step"] >= first["spike"]
    assert first["examples"] == 4 * (first["from_step"] - first["step"])
    steps = run.records["step"].tolist()
    again = steps.index(first["from_step"]) + 1
    assert steps[again] == first["step"] + 1
    assert steps[-1] == 60
    state = torch.load(tmp_path / "a" / "step-00000060.pt", weights_only=True)
    left_out = sum(step - earlier for earlier, step in undone(run))
    assert state["progress"]["position"] == 4 * (60 + left_out)


def undone(run):
    return [(each["step"], each["from_step"]) for each in run.of("rolled_back")]


def test_the_same_seed_goes_back_alike_and_so_does_a_resumed_run(run_loop, tmp_path):
    """Equal seeds roll back alike, to the bit, and so do runs resumed before or between
    rollbacks.
    """
    whole = run_loop(Poisoned, VALUES, tmp_path / "a")
    assert len(undone(whole)) > 1
    again = run_loop(Poisoned, VALUES, tmp_path / "b")
    assert undone(again) == undone(whole)
    assert again.records["loss"].tobytes() == whole.records["loss"].tobytes()
    assert_same_bits(again.weights(), whole.weights())
    for step in (10, 40):
        name = f"step-{step:08}.pt"
        folder = tmp_path / f"from-{step}"
        folder.mkdir()
        for earlier in range(10, step + 1, 10):
            kept = tmp_path / "a" / f"step-{earlier:08}.pt"
            (folder / kept.name).write_bytes(kept.read_bytes())
        resumed = run_loop(Poisoned, VALUES, folder, resume=folder / name)
        assert resumed.of("resumed")[0]["exact"]
        assert_same_bits(resumed.weights(), whole.weights())


def test_a_step_from_before_a_rewind_is_replayed_with_its_own_examples(run_loop, tmp_path):
    """A step from before a rollback is replayed with its own examples, also after a resume."""
    drawn = []

    class Noting(Poisoned):
        def batch(self, indices, generator):
            drawn.append(indices.tolist())
            return super().batch(indices, generator)

    run = run_loop(Noting, VALUES, tmp_path / "a")
    assert undone(run)[0][0] >= 15
    first = drawn[14]
    asked = iter([Control(None, Request(1, "replay", 15.0))])
    drawn.clear()
    resume = tmp_path / "a" / "step-00000050.pt"
    resumed = run_loop(
        Noting, VALUES, tmp_path / "a", resume=resume, control=lambda: next(asked, Control())
    )
    [replay] = resumed.of("replay")
    assert (replay["step"], replay["requested"]) == (15, True)
    assert drawn.count(first) == 1


@pytest.mark.parametrize("is_scaled", [True, False])
def test_a_fork_goes_back_for_spikes_of_its_own(is_scaled):
    """A fork has its own number of rollbacks, and its window begins with the parent's losses."""
    spikes = Spikes(Spike(), print)
    spike = events.Spike(step=7, loss=9.0, z=12.0)
    spikes.pending, spikes.rollbacks = spike, 2
    state = {"parts": {"spikes": spikes.state_dict()}, "scaler": {}}
    left = {
        is_fork: select_inherited_parts(state, is_scaled=is_scaled, is_fork=is_fork)["spikes"]
        for is_fork in (True, False)
    }
    assert [(each["pending"], each["rollbacks"]) for each in left.values()] == [
        (None, 0),
        (to_builtins(spike), 2),
    ]


def test_after_the_last_rewind_a_run_continues_or_fails_as_configured(run_loop, tmp_path):
    """After the last rollback a spike is reported, and a failed run has step, loss and z."""
    once = {**VALUES, "spike": {**VALUES["spike"], "max_rollbacks": 1}}
    run = run_loop(Poisoned, once, tmp_path / "a")
    assert len(undone(run)) == 1
    assert len({each["step"] for each in run.of("spike")}) > 1
    assert run.outcome.step == 60
    once["spike"]["afterwards"] = "fail"
    with pytest.raises(SpikeError, match=r"the loss rose to .* and spike.max_rollbacks is 1"):
        run_loop(Poisoned, once, tmp_path / "b")


def test_without_an_earlier_checkpoint_the_run_continues(run_loop, tmp_path):
    """A spike before the first checkpoint is reported without a rollback."""
    late = {**VALUES, "checkpoints": {"every_steps": 59}}
    run = run_loop(Poisoned, late, tmp_path / "a")
    assert run.of("spike")
    assert undone(run) == []
    assert run.records["step"].tolist() == list(range(1, 61))


def test_looking_without_going_back_changes_no_bit(run_loop, tmp_path):
    """Detecting spikes without rollbacks leaves the weights bit-identical."""
    plain = {name: value for name, value in VALUES.items() if name != "spike"}
    off = run_loop(Poisoned, {**plain, "spike": {"threshold": None}}, tmp_path / "a")
    on = run_loop(Poisoned, {**plain, "spike": {"window_steps": WINDOW}}, tmp_path / "b")
    assert off.of("spike") == []
    assert on.of("spike")
    assert_same_bits(on.weights(), off.weights())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"spike": {"rollback": True}}, "checkpoints.every_steps is empty"),
        (
            {"spike": {"rollback": True, "threshold": None}, "checkpoints": {"every_steps": 5}},
            "threshold is empty",
        ),
    ],
)
def test_a_rewind_needs_what_it_goes_by(values, message):
    """A rollback needs checkpoints and a threshold; the error names the missing one."""
    with pytest.raises(ConfigError, match=message):
        parse_config(Regression, values)
