"""Rows of a watched loop: loss, whether the step was applied, and overflowed parameters."""

import copy
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

import halfstep
from halfstep.diagnosis.loop_mistakes import LoopSigns, find_mistaken_calls, find_other_mistakes
from halfstep.telemetry.flags import NOT_STEPPED, SKIPPED, UNKNOWN_LOSS, UNKNOWN_NORM
from tests.diagnosis.trial import unreadable
from tests.halfstep.watching.watch_made import Script, Written
from tests.marks import extended
from tests.spool_made import event_of

pytestmark = pytest.mark.usefixtures("nothing_compiled")


def of(name: str, written: Written) -> list[tuple[int, float]]:
    """Return a metric's points."""
    return [(e["step"], e["value"]) for e in written.of("metric") if e["name"] == name]


def adversaries(folder: Path, critic_steps: int, iterations: int, scaler: Any = None) -> Written:
    """Train D with losses of 100, 200, … and G with losses of 1, 2, …."""
    critic, maker = nn.Linear(4, 1), nn.Linear(4, 4)
    d = torch.optim.SGD(critic.parameters(), 1e-3)
    g = torch.optim.Adam(maker.parameters(), 1e-3)
    count = 0
    with halfstep.watch(critic, maker, folder=folder, name="it", mode="offline"):
        for k in range(1, iterations + 1):
            for _ in range(critic_steps):
                count += 1
                d.zero_grad()
                loss = critic(torch.ones(1, 4)).sum() * 0 + 100.0 * count
                step(loss, d, scaler)
            g.zero_grad()
            step(critic(maker(torch.ones(1, 4))).sum() * 0 + float(k), g, scaler)
    return Written(folder / "it")


def step(loss: Tensor, optimizer: torch.optim.Optimizer, scaler: GradScaler | None) -> None:
    if scaler is None:
        loss.backward()
        optimizer.step()
        return
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def test_each_of_two_optimizers_has_its_own_losses(tmp_path: Path) -> None:
    """Each of two optimizers has its own losses from the first iteration to the last."""
    written = adversaries(tmp_path, 1, 5)
    assert written.steps["step"].tolist() == [1, 2, 3, 4, 5]
    assert of("loss/SGD", written) == [(k, 100.0 * k) for k in range(1, 6)]
    assert of("loss/Adam", written) == [(k, float(k)) for k in range(1, 6)]


def test_of_a_critic_that_steps_more_often_no_step_is_lost(tmp_path: Path) -> None:
    """If D steps more often than G, each step of D opens an iteration."""
    written = adversaries(tmp_path, 2, 4)
    assert len(written.steps) == 8
    assert written.steps["loss"].tolist() == [100.0 * k for k in range(1, 9)]
    assert of("loss/Adam", written) == [(2.0 * k, float(k)) for k in range(1, 5)]


def test_with_one_scaler_each_update_has_its_optimizers_loss(tmp_path: Path) -> None:
    """With one scaler each, the updates of D and G alternate, with their own losses."""
    written = adversaries(tmp_path, 1, 3, GradScaler("cpu", init_scale=4.0))
    assert written.steps["loss"].tolist() == [100, 1, 200, 2, 300, 3]


def test_losses_belong_to_the_gradients_that_they_changed(tmp_path: Path) -> None:
    """Each of two losses is recorded for its own optimizer, although both passes come first."""
    a, b = nn.Linear(2, 1), nn.Linear(2, 1)
    first = torch.optim.SGD(a.parameters(), 0.0)
    second = torch.optim.SGD(b.parameters(), 0.0)
    with halfstep.watch(a, b, folder=tmp_path, name="it", mode="offline"):
        for k in range(1, 4):
            for optimizer in (first, second):
                optimizer.zero_grad()
            (a(torch.ones(1, 2)).sum() * 0 + k).backward()
            (b(torch.ones(1, 2)).sum() * 0 + 10 * k).backward()
            first.step()
            second.step()
    written = Written(tmp_path / "it")
    assert of("loss/SGD", written) == [(1, 1), (2, 2), (3, 3)]
    assert of("loss/SGD2", written) == [(1, 10), (2, 20), (3, 30)]


def test_one_loss_of_two_optimizers_is_recorded_once(tmp_path: Path) -> None:
    """A single loss of two optimizers is recorded once, without metrics per optimizer."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    pair = [torch.optim.SGD(part.parameters(), 0.0) for part in net]
    with halfstep.watch(net, folder=tmp_path, name="it", mode="offline"):
        for k in range(1, 4):
            for optimizer in pair:
                optimizer.zero_grad()
            (net(torch.ones(1, 2)).sum() * 0 + k).backward()
            for optimizer in pair:
                optimizer.step()
    written = Written(tmp_path / "it")
    assert written.steps["loss"].tolist() == [1, 2, 3]
    assert written.of("metric") == []


def test_an_optimizer_that_steps_in_backward_has_that_passs_loss(tmp_path: Path) -> None:
    """An optimizer that steps within the backward pass has its pass's loss, from first to last."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    for parameter in net.parameters():
        optimizer = torch.optim.SGD([parameter], 0.0)

        def hook(_: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(hook)
    with halfstep.watch(net, folder=tmp_path, name="it", mode="offline"):
        for k in range(1, 7):
            (net(torch.ones(1, 2)).sum() * 0 + k).backward()
    assert Written(tmp_path / "it").steps["loss"].tolist() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("how", ["grad", "backward", "hidden"])
def test_a_loss_is_recorded_where_it_can_be(tmp_path: Path, how: str) -> None:
    """The loss is recorded for each way to compute gradients; if unobserved it is unknown, not
    NaN.
    """
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.0)
    with halfstep.watch(net, folder=tmp_path, name="it", mode="offline"):
        for k in range(1, 4):
            loss = net(torch.ones(1, 2)).sum() * 0 + k
            if how == "grad":
                parameters = list(net.parameters())
                for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                    p.grad = g
            elif how == "backward":
                torch.autograd.backward([loss])
            else:
                for p in net.parameters():
                    p.grad = torch.ones_like(p)
            optimizer.step()
    steps = Written(tmp_path / "it").steps
    if how == "hidden":
        assert steps["flags"].tolist() == [UNKNOWN_LOSS] * 3
    else:
        assert steps["loss"].tolist() == [1, 2, 3]


def inf_then_finite(k: int) -> float:
    return math.inf if k == 2 else 1.0


def test_a_step_past_the_scaler_counts_as_applied(tmp_path: Path) -> None:
    """A step by optimizer.step after scaler.step skipped counts as applied, and is reported."""
    weight = nn.Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.SGD([weight], 0.0), GradScaler("cpu", init_scale=4.0)
    with halfstep.watch(folder=tmp_path, name="it", mode="offline"):
        for k in range(1, 5):
            optimizer.zero_grad()
            scaler.scale((weight * inf_then_finite(k)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.step()
    written = Written(tmp_path / "it")
    assert len(written.steps) == 4
    assert not (written.steps["flags"] & SKIPPED).any()
    assert written.of("direct_step")[-1]["count"] == 4


def test_each_replaced_scaler_is_counted(tmp_path: Path) -> None:
    """Three scalers that each restart above the previous scale count as three."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], 0.0)
    with halfstep.watch(folder=tmp_path, name="it", mode="offline"):
        for number in range(4):
            scaler = GradScaler("cpu", init_scale=4.0 * 2**number)
            for _ in range(3):
                optimizer.zero_grad()
                scaler.scale(weight.sum()).backward()
                scaler.step(optimizer)
                scaler.update()
    events = [
        each for each in Written(tmp_path / "it").events if each["event"] == "scaler_replaced"
    ]
    assert [(each["step"], each["count"]) for each in events] == [(4, 1), (7, 2), (10, 3)]


@pytest.mark.parametrize("loads_scaler", [False, True])
def test_a_scaler_that_is_not_restored_with_its_optimizer_is_reported(
    tmp_path: Path, loads_scaler: bool
) -> None:
    """A scaler not restored with its optimizer is reported, since it restarts at 65,536."""
    weight = nn.Parameter(torch.ones(2))
    before = torch.optim.SGD([weight], 0.0, momentum=0.9)
    weight.grad = torch.ones(2)
    before.step()
    optimizer, scaler = torch.optim.SGD([weight], 0.0, momentum=0.9), GradScaler("cpu")
    with halfstep.watch(folder=tmp_path, name="it", mode="offline"):
        optimizer.load_state_dict(before.state_dict())
        if loads_scaler:
            scaler.load_state_dict(GradScaler("cpu").state_dict())
        for number in range(1, 7):
            optimizer.zero_grad()
            scaler.scale((weight * (math.inf if number in (2, 3) else 1.0)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    reported = Written(tmp_path / "it").of("scaler_left_behind")
    assert [(event["step"], event["skipped"]) for event in reported] == [(1, 2)][loads_scaler:]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_state_that_was_saved_in_half_precision_is_reported(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    """A state saved in half precision is reported, since squares of gradients become 0 in fp16."""
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.Adam([weight], 1e-3)
    with halfstep.watch(folder=tmp_path, name="it"):
        for number in range(3):
            optimizer.zero_grad()
            (weight * torch.tensor([1.0, 1e-3, 1e-3, 0.0])).sum().backward()
            optimizer.step()
            if number == 1:
                saved = optimizer.state_dict()
                for state in saved["state"].values():
                    state["exp_avg_sq"] = state["exp_avg_sq"].to(dtype)
                optimizer.load_state_dict(saved)
    reported = Written(tmp_path / "it").of("rounded_state")
    figures = [
        (event["step"], event["optimizer"], event["count"], event["of"]) for event in reported
    ]
    assert figures == ([(3, "Adam", 2, 3)] if dtype is torch.float16 else [])


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_the_loop_leaves_out_is_neither_applied_nor_skipped(
    tmp_path: Path, fused: bool
) -> None:
    """An unscale_ and an update without a step are neither applied nor skipped."""
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], 0.1, fused=fused)
    scaler = GradScaler("cpu", init_scale=4.0)
    with halfstep.watch(folder=tmp_path, name="it", mode="offline"):
        for k in range(1, 5):
            optimizer.zero_grad()
            scaler.scale(weight.sum()).backward()
            scaler.unscale_(optimizer)
            if k != 3:
                scaler.step(optimizer)
            scaler.update()
    written = Written(tmp_path / "it")
    assert (written.steps["flags"] & NOT_STEPPED != 0).tolist() == [False, False, True, False]
    assert written.of("not_stepped")[-1]["count"] == 1


@pytest.mark.parametrize("limit", [6.0, 2.0])
def test_gradients_that_the_loop_drops_are_counted_from_the_last_step_on(
    tmp_path: Path, limit: float
) -> None:
    """Gradients that no optimizer used 8 times in a row are reported, with the scale then."""
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], 0.0)
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=20)
    with halfstep.watch(folder=tmp_path, name="it", mode="offline"):
        for k in range(1, 40):
            optimizer.zero_grad()
            scaler.scale(weight.sum()).backward()
            assert weight.grad is not None
            if k > 10 and weight.grad.item() > limit:
                continue
            scaler.step(optimizer)
            scaler.update()
    written = Written(tmp_path / "it")
    event = written.of("gradients_dropped")[-1]
    steps, count, scale = (20, 16, 8.0) if limit > 4 else (10, 16, 4.0)
    assert (len(written.steps), event["step"]) == (steps, steps + 1)
    assert (event["count"], event["scale"]) == (count, scale)
    signs = LoopSigns(events=[event_of(event)], last=steps, scale=4.0, has_scaler=True)
    [finding] = find_mistaken_calls(signs)
    assert finding.is_certain_fault == (limit > 4)


@pytest.mark.parametrize("interval", [3, 100])
def test_an_update_between_added_gradients_is_counted_if_it_changes_the_scale(
    tmp_path: Path, interval: int
) -> None:
    """An update that changes the scale between accumulated passes is reported once per step."""
    weight, other = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    rare, often = torch.optim.SGD([weight], 0.0), torch.optim.SGD([other], 0.0)
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=interval)
    with halfstep.watch(folder=tmp_path, name="it", mode="offline"):
        for k in range(1, 9):
            often.zero_grad()
            scaler.scale(other.sum()).backward()
            scaler.step(often)
            scaler.scale(weight.sum()).backward()
            if k % 2 == 0:
                scaler.step(rare)
            scaler.update()
            if k % 2 == 0:
                rare.zero_grad()
    events = Written(tmp_path / "it").of("mixed_scales")
    assert [event["count"] for event in events] == ([1] if interval == 3 else [])


def test_an_update_of_another_optimizers_scaler_mixes_no_scales(tmp_path: Path) -> None:
    """Updates of one scaler between another's pass and step mix no scales."""
    weight, other = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    first, second = torch.optim.SGD([weight], 0.0), torch.optim.SGD([other], 0.0)
    small, large = GradScaler("cpu", init_scale=4.0), GradScaler("cpu", init_scale=64.0)
    with halfstep.watch(folder=tmp_path, name="it", mode="offline"):
        for _ in range(4):
            first.zero_grad()
            second.zero_grad()
            small.scale(weight.sum()).backward()
            small.step(first)
            large.scale(other.sum()).backward()
            small.update()
            large.step(second)
            large.update()
    assert Written(tmp_path / "it").of("mixed_scales") == []


class Ascent(torch.optim.Optimizer):
    """Sharpness-aware minimization around another optimizer, as it is commonly written."""

    def __init__(self, parameters: Any, base: Any, **options: Any) -> None:
        super().__init__(parameters, options)
        self.base = base(self.param_groups, **options)

    @torch.no_grad()
    def first(self) -> None:
        """Ascend, and clear the gradients."""
        for p in self.param_groups[0]["params"]:
            self.state[p]["moved"] = 0.01 * p.grad
            p.add_(self.state[p]["moved"])
        self.zero_grad()

    @torch.no_grad()
    def back(self) -> None:
        """Return to the starting point."""
        for p in self.param_groups[0]["params"]:
            p.sub_(self.state[p]["moved"])

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Ascend by the present gradients, and descend by those of the closure."""
        if closure is not None:
            self.first()
            with torch.enable_grad():
                closure()
            self.back()
        self.base.step()


@pytest.mark.parametrize("how", ["closure", "halves", "scaled"])
def test_an_ascent_and_its_descent_are_one_step(tmp_path: Path, how: str) -> None:
    """An ascent with its descent is one step, with the loss before the ascent."""
    net = nn.Linear(2, 1)
    optimizer = Ascent(net.parameters(), torch.optim.SGD, lr=0.1)
    scaler = GradScaler("cpu", init_scale=4.0)
    losses = []

    def closure(scaled: bool = False) -> Tensor:
        optimizer.zero_grad()
        loss = net(torch.ones(1, 2)).square().sum()
        (scaler.scale(loss) if scaled else loss).backward()
        return loss

    with halfstep.watch(net, folder=tmp_path, name="it", mode="offline"):
        for _ in range(6):
            losses.append(closure(how == "scaled").item())
            if how == "closure":
                optimizer.step(closure)
            elif how == "halves":
                optimizer.first()
                closure()
                optimizer.back()
                optimizer.base.step()
            else:
                scaler.unscale_(optimizer)
                optimizer.first()
                scaler.update()
                closure(True)
                scaler.unscale_(optimizer)
                optimizer.back()
                scaler.step(optimizer)
                scaler.update()
    steps = Written(tmp_path / "it").steps
    assert (steps["flags"] == 0).all()
    assert steps["loss"].tolist() == pytest.approx(losses)


def test_lbfgs_makes_one_step_of_many_closures(tmp_path: Path) -> None:
    """An LBFGS step with many closures is one step, with the first loss."""
    net, losses = nn.Linear(2, 1), []
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=4)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = net(torch.ones(1, 2)).square().sum()
        loss.backward()
        losses.append(loss.item())
        return loss

    first = []
    with halfstep.watch(net, folder=tmp_path, name="it", mode="offline"):
        for _ in range(3):
            first.append(len(losses))
            optimizer.step(closure)
    steps = Written(tmp_path / "it").steps
    assert steps["loss"].tolist() == pytest.approx([losses[i] for i in first])


def test_steps_without_any_gradient_are_counted_and_reported(tmp_path: Path) -> None:
    """Steps without gradients are counted and reported, as with a cut graph."""
    net, other = nn.Linear(2, 1), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with halfstep.watch(net, folder=tmp_path, name="it", mode="offline"):
        for _ in range(20):
            (net(torch.ones(1, 2)).detach().sum() + other.sum()).backward()
            optimizer.step()
    written = Written(tmp_path / "it")
    assert len(written.steps) == 20
    [event] = written.of("no_gradient")
    assert (event["count"], event["of"], event["optimizer"]) == (2, 2, "SGD")


@pytest.mark.parametrize("is_scaled", [False, True])
def test_a_short_loop_without_any_gradient_reports_its_own_steps(
    tmp_path: Path, is_scaled: bool
) -> None:
    """A short loop without gradients is reported with its number of steps."""
    net, other = nn.Linear(2, 1), nn.Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.SGD(net.parameters(), 0.1), GradScaler("cpu")
    with halfstep.watch(net, folder=tmp_path, name="it", mode="offline"):
        for _ in range(3):
            loss = net(torch.ones(1, 2)).detach().sum() + other.sum()
            if is_scaled:
                scaler.scale(loss).backward()
                with pytest.raises(AssertionError, match="No inf checks"):
                    scaler.step(optimizer)
            else:
                loss.backward()
                optimizer.step()
    written = Written(tmp_path / "it")
    [event] = written.of("no_gradient")
    assert event["step"] == len(written.steps) == (0 if is_scaled else 3)
    assert event["steps"] <= 3
    signs = LoopSigns(events=[event_of({**event, "event": "no_gradient"})])
    [found] = find_other_mistakes(signs)
    start = "None of" if is_scaled else "In 3 steps up to step 3, none of"
    assert found.text.startswith(f"{start} its parameters received a gradient")


def test_a_loop_without_an_optimizer_gets_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A loop without an optimizer gets a one-line message after twenty backward passes."""
    net = nn.Linear(2, 1)
    with halfstep.watch(net, folder=tmp_path, name="it", mode="offline"):
        for _ in range(45):
            net(torch.ones(1, 2)).sum().backward()
            with torch.no_grad():
                for p in net.parameters():
                    p.sub_(0.1 * p.grad)
                    p.grad = None
    _watching, line = capsys.readouterr().err.splitlines()
    assert "20 backward passes without an optimizer step" in line
    [event] = Written(tmp_path / "it").of("no_step")
    assert (event["passes"], event["is_by_hand"]) == (20, True)


def test_a_replaced_parameter_is_measured_by_its_name(tmp_path: Path) -> None:
    """A replaced parameter's norm is measured by its name, in the current parameter groups."""
    net = nn.Module()
    net.w = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([net.w], 0.0)
    scaler = GradScaler("cpu", init_scale=4.0)
    with halfstep.watch(net, folder=tmp_path, name="it", mode="offline"):
        for k in range(6):
            if k == 3:
                optimizer.param_groups[0]["params"][0] = net.w = nn.Parameter(torch.ones(4))
            optimizer.zero_grad()
            factor = math.inf if k == 5 else k + 1
            scaler.scale((net.w * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    written = Written(tmp_path / "it")
    norms = [math.sqrt(n) * k for n, k in ((2, 1), (2, 2), (2, 3), (4, 4), (4, 5))]
    assert written.steps["grad_norm"].tolist()[:5] == pytest.approx(norms)
    [skip] = written.of("scaler", "skip")
    assert [each["name"] for each in skip["culprits"]] == ["w"]


def test_norms_of_sparse_and_complex_gradients_are_right(tmp_path: Path) -> None:
    """Sparse gradients sum repeated rows before the norm; imaginary parts count."""
    table = nn.Embedding(4, 2, sparse=True)
    turn = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    optimizer = torch.optim.SGD([*table.parameters(), turn], 0.0)
    with halfstep.watch(table, folder=tmp_path, name="it", mode="offline", histogram_every=1):
        (table(torch.tensor([1, 1, 3])).sum() + (turn * 3j).imag.sum()).backward()
        norms = [table.weight.grad.to_dense().norm().item(), turn.grad.abs().norm().item()]
        optimizer.step()
    written = Written(tmp_path / "it")
    assert written.steps["grad_norm"].tolist() == pytest.approx([math.hypot(*norms)])
    assert sum(sum(each["counts"]) for each in written.of("histogram")[0]["modules"]) > 0


@pytest.mark.parametrize("rate", [None, "empty group"])
def test_what_cannot_be_read_costs_that_figure_only(tmp_path: Path, rate: Any) -> None:
    """Losses and norms are recorded also without a learning rate, and with an empty group."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], 0.1)
    with halfstep.watch(folder=tmp_path, name="it", mode="offline") as watch:
        if rate == "empty group":
            optimizer.param_groups.insert(0, {**optimizer.param_groups[0], "params": []})
        for k in range(3):
            optimizer.zero_grad()
            (weight.sum() * 0 + k).backward()
            optimizer.param_groups[0]["lr"] = 0.1
            optimizer.step()
            if rate is None:
                optimizer.param_groups[0]["lr"] = None
        assert watch._run.guard.is_on
    assert Written(tmp_path / "it").steps["loss"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_precision_is_the_one_that_autocast_used(tmp_path: Path, dtype: torch.dtype) -> None:
    """The precision is that of autocast, with and without a scaler."""
    net, scaler = nn.Linear(2, 1), GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(net.parameters(), 0.0)
    with halfstep.watch(net, folder=tmp_path, name="it", mode="offline"):
        with torch.autocast("cpu", dtype=dtype):
            loss = net(torch.ones(1, 2)).float().sum()
        step(loss, optimizer, scaler)
    [event] = Written(tmp_path / "it").of("precision")
    assert event["dtype"] == str(dtype).removeprefix("torch.")


def test_norms_may_be_taken_rarely(tmp_path: Path) -> None:
    """With rare norms loss, scale and skips are still recorded in every step."""
    script = Script(fused=True)
    with halfstep.watch(folder=tmp_path, name="each") as watch:
        every = script.train(watch.add)
    with halfstep.watch(folder=tmp_path, name="rare", norms_every=5) as watch:
        rare = script.train(watch.add)
    assert all(map(torch.equal, rare.weights, every.weights))
    each, few = Written(tmp_path / "each"), Written(tmp_path / "rare")
    is_taken = few.steps["step"] % 5 == 0
    assert ((few.steps["flags"] & UNKNOWN_NORM == 0) == is_taken).all()
    assert (few.steps["grad_norm"][is_taken] == each.steps["grad_norm"][is_taken]).all()
    assert np.isnan(few.steps["grad_norm"][~is_taken]).all()
    for name in ("loss", "scale"):
        assert few.steps[name].tolist() == each.steps[name].tolist()
    skips = few.of("scaler", "skip")
    assert [event["step"] for event in skips] == [e["step"] for e in each.of("scaler", "skip")]
    assert {bool(event["culprits"]) for event in skips if event["step"] % 5} == {False}


def test_norms_that_are_not_taken_are_no_nonfinite_gradients(tmp_path: Path) -> None:
    """Norms that were not measured do not count as nonfinite gradients."""
    net = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with halfstep.watch(net, folder=tmp_path, name="it", norms_every=0):
        for _ in range(30):
            optimizer.zero_grad()
            net(torch.ones(2, 3)).square().mean().backward()
            optimizer.step()
    written = Written(tmp_path / "it")
    assert (written.steps["flags"] == UNKNOWN_NORM).all()
    assert not written.of("first_nonfinite")


@pytest.mark.parametrize("is_scaled", [True, False])
@pytest.mark.parametrize("first", [1, *extended([40])])
@pytest.mark.parametrize("is_on_device", [False, True])
def test_a_loss_that_the_loop_changes_in_place_is_recorded_as_it_was(
    tmp_path: Path, is_scaled: bool, first: int, is_on_device: bool
) -> None:
    """A loss changed in place is recorded as before; on a device it is unknown in the first such
    step.
    """
    net = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
    scaler = GradScaler("cpu", init_scale=8.0, enabled=is_scaled)
    losses = []
    with (
        unreadable() if is_on_device else nullcontext(),
        halfstep.watch(net, folder=tmp_path, name="it"),
    ):
        for number in range(1, 61):
            optimizer.zero_grad()
            loss = net(torch.ones(2, 3)).square().mean()
            losses.append(loss.item())
            scaler.scale(loss).backward()
            if number >= first:
                loss.detach().mul_(100.0)
            scaler.step(optimizer)
            scaler.update()
    steps = Written(tmp_path / "it").steps
    is_known = steps["flags"] & UNKNOWN_LOSS == 0
    unknown = [first] if is_on_device and first > 1 else []
    assert steps["step"][~is_known].tolist() == unknown
    assert steps["loss"][is_known].tolist() == np.array(losses)[is_known].tolist()


def test_a_loss_that_is_changed_by_its_data_is_recorded_as_it_was(tmp_path: Path) -> None:
    """A loss changed through .data is recorded as before in host memory."""
    net = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    with halfstep.watch(net, folder=tmp_path, name="it"):
        for number in range(1, 61):
            optimizer.zero_grad()
            loss = net(torch.ones(2, 3)).square().mean()
            losses.append(loss.item())
            loss.backward()
            if number % 10 == 0:
                loss.data.zero_()
            optimizer.step()
    assert Written(tmp_path / "it").steps["loss"].tolist() == losses


@pytest.mark.parametrize("is_scaled", [True, False])
def test_parameters_that_join_a_clipped_optimizer_are_measured(
    tmp_path: Path, is_scaled: bool
) -> None:
    """Parameters added to a clipped optimizer are measured in their first step, apart from the
    clip's norms.
    """
    layers = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
    optimizer = torch.optim.SGD(layers[2].parameters(), lr=0.01)
    scaler = GradScaler("cpu", init_scale=8.0, enabled=is_scaled)
    norms = []
    with halfstep.watch(layers, folder=tmp_path, name="it"):
        for number in range(60):
            if number in (20, 40):
                optimizer.add_param_group({"params": [*layers[number // 20 - 1].parameters()]})
            optimizer.zero_grad()
            scaler.scale(layers(torch.ones(2, 3)).square().mean()).backward()
            scaler.unscale_(optimizer)
            own = [p for group in optimizer.param_groups for p in group["params"]]
            norms.append(nn.utils.clip_grad_norm_(own, 0.1).item())
            scaler.step(optimizer)
            scaler.update()
            layers.zero_grad()
    assert Written(tmp_path / "it").steps["grad_norm"].tolist() == pytest.approx(norms, rel=1e-6)


def test_a_scaler_that_never_steps_has_no_scale(tmp_path: Path) -> None:
    """A scaler that never steps, in a loop that unscales by hand, has no recorded scale."""
    net = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    scaler = GradScaler("cpu", init_scale=64.0)
    with halfstep.watch(net, folder=tmp_path, name="it"):
        for number in range(30):
            optimizer.zero_grad()
            scaler.scale(net(torch.ones(2, 3)).square().mean()).backward()
            for parameter in net.parameters():
                assert parameter.grad is not None
                parameter.grad.div_(scaler.get_scale())
            optimizer.step()
            scaler.update(64.0 if number % 2 else 128.0)
    written = Written(tmp_path / "it")
    assert (written.steps["scale"] == 1).all()
    assert not written.of("scaler")


@pytest.mark.parametrize("has_scaler", [True, False])
@pytest.mark.parametrize("divides", ["/", "*", *extended(["not", "mean"])])
def test_a_loss_that_is_divided_to_accumulate_is_recorded_undivided(
    tmp_path: Path, has_scaler: bool, divides: str
) -> None:
    """A loss divided for accumulation is recorded undivided, also with fewer passes at an
    epoch's end.
    """
    net = nn.Linear(3, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    scaler = GradScaler("cpu", init_scale=8.0, enabled=has_scaler)
    truth = []
    with halfstep.watch(net, folder=tmp_path) as watch:
        for passes in [4, 4, 1, 4, 3] * 6:
            losses = []
            for _ in range(passes):
                loss = net(torch.randn(1, 3)).square()
                loss = loss.sum() / 4 if divides == "mean" else loss.mean()
                losses.append(loss.item())
                if divides in "/*":
                    loss = loss / 4 if divides == "/" else loss * 0.25
                scaler.scale(loss).backward()
            truth.append(sum(losses) / passes)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert watch.folder is not None
    assert Written(watch.folder).steps["loss"] == pytest.approx(truth, rel=1e-5)


@pytest.mark.parametrize("steps", [60, 120])
def test_parameters_that_an_optimizer_gets_while_training_are_inside(
    tmp_path: Path, steps: int
) -> None:
    """Parameters that replace others while training, as split and pruned points, are measured."""
    cloud = nn.Module()
    cloud.points = nn.Parameter(torch.ones(4, 3))
    cloud.size = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.Adam([{"params": [cloud.points]}, {"params": [cloud.size]}])
    kept = []
    with halfstep.watch(cloud, folder=tmp_path) as watch:
        for step in range(steps):
            if step % 20 == 19 or step == steps - 1:
                kept.append(cloud.points)
                cloud.points = nn.Parameter(torch.cat([cloud.points, cloud.points]).detach())
                optimizer.param_groups[0]["params"] = [cloud.points]
                watch.add(cloud)
            (cloud.points.square().mean() * cloud.size).backward()
            if step < steps - 1:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
    assert watch.folder is not None
    assert Written(watch.folder).of("outside_optimizers") == []


@pytest.mark.parametrize("copies", [True, *extended([False])])
@pytest.mark.parametrize("has_scaler", [True, False])
@pytest.mark.parametrize("steps_each", [1, 5, *extended([12])])
def test_each_step_of_an_optimizer_made_for_each_task_is_a_row(
    tmp_path: Path, copies: bool, has_scaler: bool, steps_each: int
) -> None:
    """If each task has its own optimizer, as in Reptile, each of its steps is a row."""
    meta = nn.Linear(3, 1)
    scaler = GradScaler("cpu", init_scale=8.0, enabled=has_scaler)
    losses, norms = [], []
    with halfstep.watch(meta, folder=tmp_path) as watch:
        for _ in range(60 // steps_each):
            net = copy.deepcopy(meta) if copies else meta
            optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
            for _ in range(steps_each):
                optimizer.zero_grad()
                loss = net(torch.randn(4, 3)).square().mean()
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                norms.append(nn.utils.clip_grad_norm_(net.parameters(), 0.1).item())
                losses.append(loss.item())
                scaler.step(optimizer)
                scaler.update()
    assert len(watch._loop.state.known) == 1
    assert watch.folder is not None
    written = Written(watch.folder)
    assert written.steps["loss"] == pytest.approx(losses)
    assert written.steps["grad_norm"] == pytest.approx(norms, rel=1e-5)
    assert written.steps["grad_norm_clipped"] == pytest.approx(np.minimum(norms, 0.1), rel=1e-4)
    assert written.of("outside_optimizers") == written.of("no_step") == []


def test_an_optimizer_that_stays_shares_the_row_of_those_of_tasks(tmp_path: Path) -> None:
    """In MAML the outer optimizer's step shares a row with each task's inner steps."""
    meta, outer_steps = nn.Linear(3, 1), 0
    outer = torch.optim.Adam(meta.parameters(), lr=0.01)
    with halfstep.watch(meta, folder=tmp_path) as watch:
        for _ in range(12):
            net = copy.deepcopy(meta)
            inner = torch.optim.SGD(net.parameters(), lr=0.01)
            for _ in range(5):
                inner.zero_grad()
                net(torch.randn(4, 3)).square().mean().backward()
                inner.step()
            for own, other in zip(meta.parameters(), net.parameters(), strict=True):
                own.grad = (own - other).detach()
            outer.step()
            outer_steps += 1
    assert [each.name for each in watch._loop.state.known.values()] == ["SGD", "Adam"]
    assert watch.folder is not None
    assert len(Written(watch.folder).steps) == 60
