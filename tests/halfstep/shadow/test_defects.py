"""Defects of a checked step: operators that lose values, and these values."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from halfstep.check.report import Row
from halfstep.check.session import CheckedLoop, CheckedSteps
from halfstep.diagnosis.defect import Defect, Site
from halfstep.diagnosis.observations import Observations
from halfstep.shadow.sanitizer import Sanitizer

HALF = torch.float16
Loss = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Use one thread, since small operators are slower with several."""
    torch.set_num_threads(1)
    torch.manual_seed(0)


def rows_of_loop(train: Callable[[], None]) -> list[Row]:
    """Return the report of a checked loop."""
    loop = CheckedLoop(CheckedSteps(steps=0))
    with loop:
        train()
    assert loop.steps
    report = loop.report()
    assert not report.errors
    return report.rows


def check(loss_of: Loss, *, scale: float = 16.0, steps: int = 2, weight: float = 1.0) -> list[Row]:
    """Train a weight of four numbers with a loss, and return the check's report."""

    def train() -> None:
        parameter = nn.Parameter(torch.full((4,), weight))
        optimizer = torch.optim.SGD([parameter], lr=1e-4)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        for _ in range(steps):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=HALF):
                loss = loss_of(parameter)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    return rows_of_loop(train)


def first(rows: list[Row]) -> Row:
    """Return the first mistake of a report."""
    return next(row for row in rows if row.is_fault)


def test_an_overflow_has_its_value_and_the_loss_in_fp32() -> None:
    row = first(check(lambda w: (w.half() * 1000 * 100).float().mean().log()))
    assert (row.kind, row.symptom, row.dtype) == ("overflow", "loss", "float16")
    assert row.value == pytest.approx(1e5)
    assert row.loss_fp32 == pytest.approx(math.log(1e5), rel=1e-3)
    assert row.source == "w.half() * 1000 * 100"
    assert "bf16" in row.advice
    assert "fp32" in row.advice


def test_gradients_that_an_overflow_makes_0_have_its_line() -> None:
    """A gradient divided by an infinite count is 0, and the count is the cause."""

    class Share(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.length = x.numel()
            return x.mean()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            ones = torch.ones(ctx.length, dtype=gradient.dtype)
            return gradient / ones.sum() * ones

    row = first(check(lambda w: Share.apply(w.half().repeat(25_000)).float() ** 2))
    assert (row.kind, row.value, row.source) == ("overflow", 100_000.0, "ones.sum()")


def test_a_constant_of_a_mask_is_no_number_that_overflows() -> None:
    """-1e9 as a tensor of its own becomes -inf in fp16, as a mask may be."""
    fill = torch.tensor(-1e9)

    def loss_of(w: Tensor) -> Tensor:
        scores = torch.where(torch.ones(4) > 0, w.half(), fill.to(HALF))
        return scores.softmax(0).float().square().sum()

    assert not [row for row in check(loss_of) if row.is_fault]


def test_bf16_is_not_advised_where_the_constant_is_that_of_the_dtype() -> None:
    """bf16 is no remedy for finfo(dtype).min added to itself, which is -inf in bf16 too."""

    def loss_of(w: Tensor) -> Tensor:
        mask = torch.full((4,), torch.finfo(HALF).min, dtype=HALF)
        return (w.half() + (mask + mask)).softmax(0).float().sum()

    row = first(check(loss_of))
    assert (row.kind, row.value) == ("overflow", 131008.0)
    assert "bf16" not in row.advice


def test_of_several_overflows_the_first_is_named() -> None:
    """The first of several overflows is named, also if a quotient of two infinities is NaN."""

    def loss_of(w: Tensor) -> Tensor:
        total = (w.half() * 1000 * 100).sum()
        part = w.half().sum() * 40000
        return ((part + 0.5) / total.clamp_min(1e-3)).float()

    row = first(check(loss_of))
    assert (row.kind, row.source) == ("overflow", "w.half() * 1000 * 100")


def test_an_eps_that_is_0_in_half_precision_is_named() -> None:
    row = first(check(lambda w: F.normalize(w.half() * 0, dim=0).float().sum()))
    assert row.kind == "rounding"
    assert row.source == "F.normalize(w.half() * 0, dim=0)"
    assert "1e-12 in fp32 becomes 0 by rounding" in row.text


def test_a_bound_that_becomes_1_is_named() -> None:
    def loss_of(w: Tensor) -> Tensor:
        p = w.half().clamp(max=1 - 1e-6)
        return -torch.log1p(-p).float().mean()

    row = first(check(loss_of))
    assert (row.kind, row.source) == ("rounding", "w.half().clamp(max=1 - 1e-6)")


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda w: (w - w).sum() / (w - w).sum(),
        lambda w: (w - w).log().mean(),
        lambda w: w[w > 5].mean(),
        lambda w: (w - w).square().sum().sqrt(),
        lambda w: (w.half() - w.half()).sum().float() / 0,
    ],
)
def test_what_is_undefined_in_fp32_gets_no_advice_of_precision(loss_of: Loss) -> None:
    """A value undefined in fp32 too, also in a gradient, gets no advice about precision."""
    row = first(check(loss_of))
    assert row.kind == "undefined"
    assert row.advice.startswith("Avoid the undefined case")


def test_what_is_infinite_in_fp32_too_is_not_blamed_on_a_rounding() -> None:
    """An infinity that fp32 has too is not attributed to a rounding in fp16."""

    def loss_of(w: Tensor) -> Tensor:
        scores = w.half() * torch.tensor([0.0, -30.0, -200.0, -300.0], dtype=HALF)
        return scores.float().softmax(0).half().float().log().mean()

    row = first(check(loss_of))
    assert (row.kind, row.loss_fp32) == ("undefined", -math.inf)


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16])
def test_a_fully_masked_row_is_undefined_in_every_precision(dtype: torch.dtype) -> None:
    def loss_of(w: Tensor) -> Tensor:
        scores = w.to(dtype).masked_fill(torch.ones(4, dtype=torch.bool), -math.inf)
        return scores.softmax(0).float().sum()

    row = first(check(loss_of))
    assert row.kind == "undefined"
    assert row.advice.startswith("Leave out rows that are masked as a whole")


def test_a_number_beyond_fp32_is_no_division_by_0() -> None:
    row = first(check(lambda w: (w * 1e30).pow(2).mean()))
    assert (row.kind, row.dtype, row.source) == ("overflow", "float32", "(w * 1e30).pow(2)")
    assert row.value == pytest.approx(1e60)
    assert row.advice.startswith("No precision has the range")


def test_nan_in_the_data_has_the_name_of_its_variable() -> None:
    def train() -> None:
        net = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        data = [torch.ones(2, 4), torch.full((2, 4), math.nan), torch.ones(2, 4)]
        for pictures in data:
            loss = net(pictures).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            net.load_state_dict({"weight": torch.ones(1, 4), "bias": torch.zeros(1)})

    row = first(rows_of_loop(train))
    assert (row.kind, row.steps) == ("nonfinite_input", [2])
    assert "`data[1]` holds 8 elements" in row.text


@pytest.mark.parametrize("is_early", [True, False])
def test_nan_of_numpy_is_named_where_it_becomes_a_tensor(*, is_early: bool) -> None:
    """A NaN from NumPy is named where it becomes a tensor, even before the loop."""
    array = np.full((2, 4), math.nan, np.float32)

    def train() -> None:
        net = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        early = [torch.from_numpy(row) * 2 for row in array]  # early
        for step in range(3):
            late = [torch.from_numpy(row) for row in (array if step == 2 else array * 0 + 1)]
            pictures = torch.stack(early if is_early and step == 2 else late)
            net(torch.nan_to_num(pictures) if step < 2 else pictures).mean().backward()
            optimizer.step()

    row = first(rows_of_loop(train))
    assert (row.kind, row.steps[:1]) == ("nonfinite_input", [3])
    assert (row.line == line_of("# early")) == is_early
    assert "where it comes into step 3, in `torch.from_numpy(row)`" in row.text


def line_of(mark: str) -> int:
    """Return the number of the line of this file that ends with a mark."""
    lines = Path(__file__).read_text().splitlines()
    [number] = [n for n, line in enumerate(lines, 1) if line.endswith(f"  {mark}")]
    return number


def test_a_nan_number_of_the_loop_is_named_where_it_is_used() -> None:
    """A NaN in a Python number is named where the loop uses it, such as the limit of a clip."""

    def train() -> None:
        net = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for limit in (1.0, math.nan):
            loss = net(torch.randn(3, 4)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), limit)
            optimizer.step()

    row = first(rows_of_loop(train))
    assert (row.kind, row.steps) == ("nonfinite_input", [2])
    assert row.text.startswith("A number of Python is NaN when step 2 uses it, in `nn.utils.clip")
    assert row.title == "A number is not finite"


def test_a_state_that_stays_nan_is_carried_from_its_step() -> None:
    """A state that stays NaN has one row, with the line that made it and where it is used again."""
    state = torch.zeros(4, dtype=HALF)
    step = 0

    def loss_of(w: Tensor) -> Tensor:
        nonlocal state, step
        step += 1
        hidden = w.half() * (1e6 if step == 2 else 1.0) + state
        state = hidden.detach()
        return hidden.float().mean()

    [row] = [row for row in check(loss_of, steps=5) if row.is_fault]
    assert (row.kind, row.steps) == ("overflow", [2])
    assert "has not been finite since step 2. In steps 3, 4 and 5 it comes back in" in row.text


def test_an_overflow_of_gradients_that_no_smaller_scale_stops_is_one_of_the_loop() -> None:
    class Large(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return (gradient.half() * 0 + 300) * 300

    row = first(check(lambda w: Large.apply(w).half().float().mean(), steps=8))
    assert (row.kind, row.symptom, row.source) == (
        "overflow",
        "gradient",
        "(gradient.half() * 0 + 300) * 300",
    )


def test_a_scale_that_is_too_large_once_is_no_mistake() -> None:
    rows = check(lambda w: w.half().float().mean() * 8, scale=2.0**18)
    assert not any(row.is_fault for row in rows)
    [row] = rows
    assert row.kind == "scale_too_large"
    assert row.fits_below == 2.0**14  # beyond 65504 / 2 it overflows


def test_a_scale_that_is_forced_up_again_is_a_mistake() -> None:
    def train() -> None:
        parameter = nn.Parameter(torch.ones(4))
        optimizer = torch.optim.SGD([parameter], lr=1e-4)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18)
        for _ in range(6):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=HALF):
                loss = parameter.half().float().mean() * 8
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update(2.0**18)

    assert first(rows_of_loop(train)).kind == "scale_too_large"


def test_a_finite_loss_far_from_fp32_is_wrong() -> None:
    """A finite loss far from fp32's is reported, such as 65,504 instead of 100,000."""
    row = first(check(lambda w: (w.half() * 1e5).nan_to_num().float().mean()))
    assert (row.kind, row.loss, row.loss_fp32) == ("loss_differs", 65504.0, 1e5)
    assert row.source == "w.half() * 1e5"


def test_a_loss_that_is_wrong_by_rounding_has_the_line_of_most_of_it() -> None:
    """A wrong loss has the line with most of the error: a bf16 sum that stops growing among
    exact operators.
    """

    def train() -> None:
        net = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
        for _ in range(6):
            parts = (net(torch.ones(1, 2)).abs() + 1).expand(1024, 1).bfloat16()
            total = torch.zeros((), dtype=torch.bfloat16)
            for part in parts.split(1):
                total = total + part.sum()  # the line
            loss = total.float() / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    row = first(rows_of_loop(train))
    assert (row.kind, row.source) == ("loss_differs", "total + part.sum()")
    assert row.loss_fp32 > 1.1 * row.loss


def test_a_scale_by_hand_that_overflows_once_is_no_mistake() -> None:
    """A hand-made scale may overflow if the loop divides its gradients and skips the step."""

    def train() -> None:
        net = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
        scale = 2.0**18
        for _ in range(6):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=HALF):
                loss = net(torch.ones(2, 4)).float().mean()
            (loss * scale).backward()
            if all(p.grad.isfinite().all() for p in net.parameters()):
                for p in net.parameters():
                    p.grad.div_(scale)
                optimizer.step()
            else:
                scale /= 4

    assert not any(row.is_fault for row in rows_of_loop(train))


def test_autocast_around_the_whole_loop_keeps_old_weights() -> None:
    """Stale weight casts are found if autocast surrounds the whole loop, not if each step enters
    it.
    """

    def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        net(torch.ones(2, 4)).float().square().mean().backward()
        optimizer.step()

    def train(*, is_around_all: bool) -> None:
        net = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        if is_around_all:
            with torch.autocast("cpu", dtype=torch.bfloat16):  # whole loop
                for _ in range(6):
                    step(net, optimizer)
            return
        for _ in range(6):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                step(net, optimizer)

    row = first(rows_of_loop(lambda: train(is_around_all=True)))
    assert (row.kind, row.steps) == ("stale_weight_cache", [2, 3, 4, 5, 6])
    assert f"test_defects.py:{line_of('# whole loop')}) is left" in row.text
    kinds = [each.kind for each in rows_of_loop(lambda: train(is_around_all=False))]
    assert "stale_weight_cache" not in kinds


@pytest.mark.parametrize(("rate", "is_stale"), [(0.1, True), (0.0, False)])
def test_a_region_that_was_entered_before_the_check(rate: float, is_stale: bool) -> None:
    """A stale cast is recognized by a weight's values, also if autocast began before the check."""
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=rate)

    def train() -> None:
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.ones(2, 4)).float().square().mean().backward()
            optimizer.step()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        train()
        kinds = [each.kind for each in rows_of_loop(train)]
    assert ("stale_weight_cache" in kinds) == is_stale


def train_beside_a_reference(*, keeps_cache: bool) -> None:
    """Use a reference's weights in the network for one forward pass of each step."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    own = [weight.data for weight in net.parameters()]
    reference = [weight.detach() * 0.5 for weight in net.parameters()]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    kept_by_the_loop = [weight.to(torch.bfloat16) for weight in net.parameters()]
    for _ in range(4):
        x = torch.randn(3, 4)
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=keeps_cache):
            output = net(x)
            for weight, values in zip(net.parameters(), reference, strict=True):
                weight.data = values
            with torch.no_grad():
                target = net(x)  # stale
            for weight, values in zip(net.parameters(), own, strict=True):
                weight.data = values
            again = net(x)
            old = nn.functional.linear(x.bfloat16(), kept_by_the_loop[0])  # on purpose
        loss = (output - target).float().square().mean() + again.float().square().mean()
        optimizer.zero_grad()
        (loss + old.float().mean()).backward()
        optimizer.step()


def test_weights_that_are_exchanged_within_autocast() -> None:
    """The line that calls the network is named if exchanged weights made its casts stale."""
    row = first(rows_of_loop(lambda: train_beside_a_reference(keeps_cache=True)))
    assert (row.kind, row.steps) == ("stale_weight_cache", [1, 2, 3, 4])
    assert "`target = net(x)" in row.text or "`net(x)`" in row.text
    assert Path(__file__).read_text().splitlines()[row.line - 1].endswith("# stale")
    kinds = [
        each.kind for each in rows_of_loop(lambda: train_beside_a_reference(keeps_cache=False))
    ]
    assert "stale_weight_cache" not in kinds


def test_an_unseen_operator_that_has_spoilt_a_weight() -> None:
    """Nothing false is stated about a weight that an unobserved operator made infinite."""

    def train() -> None:
        table = nn.Embedding(6, 4, sparse=True)
        optimizer = torch.optim.SparseAdam(table.parameters())
        for step in range(4):
            loss = table(torch.tensor([step])).square().mean()
            optimizer.zero_grad()
            (loss * (math.inf if step == 1 else 1.0)).backward()
            optimizer.step()

    texts = [row.text for row in rows_of_loop(train)]
    assert not any("holds 0 elements" in text for text in texts)


@pytest.mark.parametrize("how", ["squares", "unscaled squares", "divided squares", "sums", "copy"])
def test_a_state_of_scaled_gradients(how: str) -> None:
    """A state of squared scaled gradients mixes scales; sums and copies can still be unscaled."""

    def train() -> None:
        net = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        states = [torch.zeros_like(weight) for weight in net.parameters()]
        for _ in range(5):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = net(torch.randn(3, 4)).float().square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            if how == "unscaled squares":
                scaler.unscale_(optimizer)
            factor = 1 / scaler.get_scale() if how == "divided squares" else 1.0
            for state, weight in zip(states, net.parameters(), strict=True):
                gradient = weight.grad * factor
                if how == "sums":
                    state.zero_().add_(gradient)
                elif how == "copy":
                    state.copy_(gradient)
                else:
                    state.mul_(0.9).addcmul_(gradient, gradient, value=0.1)  # state
            scaler.step(optimizer)
            scaler.update()

    rows = [row for row in rows_of_loop(train) if row.is_fault]
    assert [row.kind for row in rows] == ["scaled_gradients_kept"] * (how == "squares")
    for row in rows:
        assert row.steps == [2, 3, 4, 5]  # the states were made in the first one
        assert Path(__file__).read_text().splitlines()[row.line - 1].endswith("# state")


def test_gradients_that_are_cleared_before_the_step() -> None:
    """Gradients cleared before the step are reported with the line; no weight moves."""

    def train() -> None:
        net = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(4):
            net(torch.ones(2, 4)).mean().backward()
            optimizer.zero_grad(set_to_none=False)
            optimizer.step()

    row = first(rows_of_loop(train))
    assert (row.kind, row.count) == ("gradients_cleared_before_step", 4)
    assert row.source == "optimizer.zero_grad(set_to_none=False)"


@pytest.mark.parametrize("set_to_none", [False, True])
def test_a_clip_after_the_step_has_no_effect(*, set_to_none: bool) -> None:
    """A clip after the step is reported, unless the gradients are used again or just cleared."""

    def train(*, clears: bool) -> None:
        net = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(5):
            net(torch.ones(2, 4)).mean().backward()
            optimizer.step()
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            if clears:
                optimizer.zero_grad(set_to_none=set_to_none)

    row = first(rows_of_loop(lambda: train(clears=True)))
    assert row.kind == "gradients_edited_after_step"
    kinds = [each.kind for each in rows_of_loop(lambda: train(clears=False))]
    assert "gradients_edited_after_step" not in kinds


@pytest.mark.parametrize("clipped", ["model", "copies", "model before the copy"])
def test_a_clip_of_gradients_that_no_step_uses_has_no_effect(clipped: str) -> None:
    """Clipping gradients after they were copied for the optimizer has no effect, and is
    reported.
    """

    def clip(weights: list[nn.Parameter]) -> None:
        for weight in weights:
            assert weight.grad is not None
            weight.grad.detach().mul_(0.1)

    def train() -> None:
        net = nn.Linear(4, 1)
        copies = [nn.Parameter(weight.detach().clone()) for weight in net.parameters()]
        optimizer = torch.optim.SGD(copies, lr=0.01)
        for _ in range(5):
            net.zero_grad()
            net(torch.ones(2, 4)).mean().backward()
            if clipped == "model before the copy":
                clip(list(net.parameters()))
            for copy, weight in zip(copies, net.parameters(), strict=True):
                copy.grad = weight.grad.clone()
            if clipped != "model before the copy":
                clip(list(net.parameters()) if clipped == "model" else copies)
            optimizer.step()
            with torch.no_grad():
                for copy, weight in zip(copies, net.parameters(), strict=True):
                    weight.copy_(copy)

    found = [row.source for row in rows_of_loop(train) if row.kind == "gradients_edited_after_step"]
    clips = ["weight.grad.detach().mul_(0.1)"]
    assert found == (clips if clipped == "model" else [])


def test_gradients_below_the_range_underflow() -> None:
    row = first(check(lambda w: w.half().float().mean() * 1e-8, scale=1.0, steps=4))
    assert (row.kind, row.share) == ("gradients_underflow", 1.0)


def test_weights_in_half_precision_that_do_not_move() -> None:
    def train() -> None:
        net = nn.Linear(8, 8).bfloat16()
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-5)
        for _ in range(4):
            optimizer.zero_grad()
            net(torch.ones(2, 8, dtype=torch.bfloat16)).float().mean().backward()
            optimizer.step()

    row = first(rows_of_loop(train))
    assert (row.kind, row.dtype) == ("update_lost", "bfloat16")
    assert "It is in bf16 since `nn.Linear(8, 8).bfloat16()` (test_defects.py:" in row.text


class KahanSum(torch.optim.Optimizer):
    """An optimizer that keeps the rounded part of an update in a second tensor."""

    def step(self, closure: Any = None) -> None:
        """Update the weights."""
        for weight in self.param_groups[0]["params"]:
            rest = self.state[weight].setdefault("rest", torch.zeros_like(weight))
            rest.add_(weight.grad, alpha=-1e-4)
            before = weight.detach().clone()
            weight.detach().add_(rest)
            rest.add_(before.sub_(weight.detach()))


def test_an_update_that_is_kept_for_the_next_is_not_lost() -> None:
    def train() -> None:
        net = nn.Linear(8, 8).bfloat16()
        optimizer = KahanSum(net.parameters(), {})
        for _ in range(4):
            optimizer.zero_grad()
            net(torch.ones(2, 8, dtype=torch.bfloat16)).float().mean().backward()
            optimizer.step()

    assert not [row for row in rows_of_loop(train) if row.kind == "update_lost"]


@pytest.mark.parametrize(
    "clip", ["scaled", "unscaled", "to_scaled_norm", "to_known_norm", "to_constant", "by_hand"]
)
def test_a_clip_by_a_number_that_was_read_of_scaled_gradients_is_seen(clip: str) -> None:
    """A clip by a norm of scaled gradients, read as a Python number, is recognized by a constant
    product of factor and norm. It is correct after `unscale_`, if the loop multiplies its limit by
    the scale, or if no scaler divides by it any more.
    """

    def train() -> None:
        net = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        for step in range(4):
            optimizer.zero_grad()
            known = scaler.get_scale() if clip == "to_known_norm" else 2.0**16
            loss = (step + 2) * net(torch.ones(2, 4)).square().sum()
            (loss * 2.0**16 if clip == "by_hand" else scaler.scale(loss)).backward()
            if clip == "unscaled":
                scaler.unscale_(optimizer)
            total = 0.0
            for weight in net.parameters():
                assert weight.grad is not None
                total += weight.grad.norm().item() ** 2
            is_to_known = clip in {"to_known_norm", "to_constant"}
            most = known if is_to_known else scaler.get_scale() if clip == "to_scaled_norm" else 1.0
            for weight in net.parameters():
                assert weight.grad is not None
                weight.grad.mul_(most / (math.sqrt(total) + 1e-6))
            if clip == "by_hand":
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()

    faults = [row for row in rows_of_loop(train) if row.is_fault]
    named = [(row.kind, row.source) for row in faults if row.kind == "scaled_gradients_edited"]
    source = "weight.grad.mul_(most / (math.sqrt(total) + 1e-6))"
    assert named == ([("scaled_gradients_edited", source)] if clip == "scaled" else [])


@pytest.mark.parametrize(
    "edit",
    [
        lambda w: w.grad.add_(1e-3 * w.detach().sign()),
        lambda w: w.grad.data.add_(1e-3 * w.detach().sign()),
        lambda w: torch.nan_to_num(w.grad, posinf=1.0, out=w.grad),
        lambda w: w.grad.clamp_(-1, 1),
    ],
)
def test_an_edit_of_scaled_gradients_is_seen(edit: Callable[[Tensor], Any]) -> None:
    """Every kind of edit of scaled gradients is reported; after unscale_ it is correct."""

    def train(*, is_right: bool) -> None:
        net = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=HALF):
                loss = net(torch.ones(2, 4)).float().mean()
            scaler.scale(loss).backward()
            if is_right:
                scaler.unscale_(optimizer)
            edit(net.weight)
            scaler.step(optimizer)
            scaler.update()

    assert first(rows_of_loop(lambda: train(is_right=False))).kind == "scaled_gradients_edited"
    assert not any(row.is_fault for row in rows_of_loop(lambda: train(is_right=True)))


def test_a_weight_of_a_mean_that_equals_the_inverse_scale_is_no_scale() -> None:
    """An averaging weight of Adam that equals the inverse scale by chance is not taken for it."""

    def train() -> None:
        net = nn.Linear(4, 1)
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-4, betas=(0.875, 0.999))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=HALF):
                loss = net(torch.ones(2, 4)).float().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    assert not [row.kind for row in rows_of_loop(train) if row.is_fault]


def test_a_penalty_of_scaled_gradients_is_seen() -> None:
    """A penalty on gradients of a scaled loss, by autograd.grad, is reported if it is not
    unscaled. Its infinite loss at a scale that is too large is the search for a scale.
    """

    def train(*, divides: bool, scale: float = 16.0) -> None:
        net = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=HALF):
                loss = net(torch.ones(2, 4)).float().square().mean()
            [gradient] = torch.autograd.grad(scaler.scale(loss), [net.weight], create_graph=True)
            if divides:
                gradient = gradient / scaler.get_scale()
            scaler.scale(loss + gradient.norm()).backward()
            scaler.step(optimizer)
            scaler.update()

    assert first(rows_of_loop(lambda: train(divides=False))).kind == "scaled_gradients_in_loss"
    assert not any(row.is_fault for row in rows_of_loop(lambda: train(divides=True)))
    [searching] = rows_of_loop(lambda: train(divides=True, scale=2.0**18))
    assert (searching.kind, searching.is_fault) == ("scale_too_large", False)


def test_the_sign_of_a_scaled_gradient_is_used_as_it_is() -> None:
    """Using a scaled gradient's sign is correct, since no scale affects it."""

    def train() -> None:
        net = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        for _ in range(3):
            optimizer.zero_grad()
            x = torch.ones(2, 4, requires_grad=True)
            for attack in (True, False):
                with torch.autocast("cpu", dtype=HALF):
                    loss = net(x).float().square().mean()
                if attack:
                    [gradient] = torch.autograd.grad(scaler.scale(loss), [x])
                    x = x.detach() + 0.1 * gradient.sign()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    assert not any(row.is_fault for row in rows_of_loop(train))


def steps_with_scaled_gradients(
    use: Callable[[list[Tensor], float], object], *, scale: float = 1024.0, factor: float = 1.0
) -> list[Row]:
    """Train a layer whose gradients are used while they are scaled. factor: that of the loss.

    use: receives the gradients and the scale; returns False to leave out the step.
    """

    def train() -> None:
        net = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=HALF):
                loss = net(torch.ones(2, 4)).float().square().mean()
            scaler.scale(loss * factor).backward()
            if use([p.grad for p in net.parameters() if p.grad is not None], scale) is not False:
                scaler.step(optimizer)
                scaler.update()

    return rows_of_loop(train)


def clip_each(gradients: list[Tensor], _scale: float) -> None:
    """Clip by hand, with a bound that is always exceeded."""
    norm = torch.stack([each.norm() for each in gradients]).norm()
    for each in gradients:
        each.mul_((1e-3 / (norm + 1e-6)).clamp(max=1.0))


def replace_by_sign(gradients: list[Tensor], _scale: float) -> None:
    """Replace gradients by their signs times a constant."""
    for each in gradients:
        each.data = each.sign()


def unscale_by_hand(gradients: list[Tensor], scale: float) -> None:
    """Unscale gradients that the scaler unscales again."""
    for each in gradients:
        each.data = each / scale


def sum_of_clipped(gradients: list[Tensor], _scale: float) -> None:
    """Replace the gradients by new clipped tensors, in several operators."""
    norm = torch.stack([each.norm() for each in gradients]).norm()
    for each in gradients:
        total = torch.zeros_like(each)
        total.add_(each * (1e-3 / (norm + 1e-6)))
        each.data = total / 2


@pytest.mark.parametrize("edit", [clip_each, replace_by_sign, unscale_by_hand, sum_of_clipped])
def test_gradients_that_do_not_grow_with_the_scale_are_no_scaled_ones(
    edit: Callable[[list[Tensor], float], None],
) -> None:
    """Edited gradients that do not grow with the scale are reported: the scaler still divides."""
    assert first(steps_with_scaled_gradients(edit)).kind == "scaled_gradients_edited"


def leave_out(threshold: float) -> Callable[[list[Tensor], float], bool]:
    """Return a condition by which a loop leaves out steps."""
    return lambda gradients, _scale: not bool(gradients[0].norm() > threshold)


def mask_small(gradients: list[Tensor], _scale: float) -> None:
    """Set elements to 0 that are below half of the largest one, independent of the scale."""
    for each in gradients:
        each.mul_(each.abs() >= each.abs().max() / 2)


def unscale_and_scale(gradients: list[Tensor], scale: float) -> None:
    """Clip unscaled gradients, and scale them again."""
    for each in gradients:
        each.data = (each / scale).clamp(-1e-3, 1e-3) * scale


def clip_by_a_scaled_bound(gradients: list[Tensor], scale: float) -> None:
    """Clip at a bound that is scaled like the gradients."""
    for each in gradients:
        each.clamp_(-1e-3 * scale, 1e-3 * scale)


def test_a_guard_that_depends_on_the_scale_is_seen() -> None:
    """A condition that depends on the scale is reported even if it leaves out no step."""
    [row] = [row for row in steps_with_scaled_gradients(leave_out(1e4)) if row.is_fault]
    assert (row.kind, row.source) == (
        "scaled_gradients_compared",
        "gradients[0].norm() > threshold",
    )


@pytest.mark.parametrize(
    ("use", "factor"),
    [
        (mask_small, 1.0),
        (unscale_and_scale, 1.0),
        (lambda gradients, _scale: bool(gradients[0].norm() > 0), 1.0),
        (lambda gradients, _scale: bool(gradients[0].norm() < 65504), 1.0),
        (lambda gradients, _scale: bool(gradients[0].isfinite().all()), 1.0),
        (lambda gradients, _scale: bool(gradients[0].isfinite().all()) or None, 1e38),
    ],
)
def test_a_use_of_scaled_gradients_in_proportion_is_right(
    use: Callable[[list[Tensor], float], object], factor: float
) -> None:
    """Uses that are proportional to scaled gradients, and tests for finite values, are correct."""
    kinds = {row.kind for row in steps_with_scaled_gradients(use, factor=factor) if row.is_fault}
    assert not kinds & {"scaled_gradients_compared", "scaled_gradients_edited"}


def test_a_bound_in_a_hook_on_scaled_gradients_is_seen() -> None:
    """A bound in a gradient hook during the scaled backward pass is reported."""

    def train(*, is_right: bool) -> None:
        net = nn.Linear(4, 1)
        bound = 1e-3 * (1024.0 if is_right else 1.0)
        net.weight.register_hook(lambda gradient: gradient.clamp(-bound, bound))
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=HALF):
                loss = net(torch.ones(2, 4)).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    row = first(rows_of_loop(lambda: train(is_right=False)))
    assert (row.kind, row.source) == ("scaled_gradients_edited", "gradient.clamp(-bound, bound)")


@pytest.mark.parametrize("is_right", [True, False])
def test_a_loss_that_another_scaler_scales_is_seen(*, is_right: bool) -> None:
    """A loss scaled by another scaler than the one that steps is reported."""

    def train() -> None:
        net = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
        scaler, other = (torch.amp.GradScaler("cpu", init_scale=n) for n in (1024.0, 16.0))
        for _ in range(3):
            for of_loss in (scaler, scaler if is_right else other):
                with torch.autocast("cpu", dtype=HALF):
                    loss = net(torch.ones(2, 4)).float().square().mean()
                of_loss.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=HALF):
                loss = net(torch.ones(2, 4)).float().square().mean()
            other.scale(loss).backward()  # as for another optimizer, which comes next
            optimizer.zero_grad(set_to_none=False)

    rows = [row for row in rows_of_loop(train) if row.is_fault]
    kinds = {(row.kind, row.source) for row in rows}
    assert kinds == (set() if is_right else {("scaled_by_another", "of_loss.scale(loss)")})


class Injected(torch.autograd.Function):
    """A function with its own gradient, which may ignore the incoming one."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradient: Tensor, is_right: bool) -> Tensor:  # type: ignore[override]
        """Return 0."""
        ctx.save_for_backward(gradient)
        ctx.is_right = is_right
        return value.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:  # type: ignore[override]
        """Return the gradient, multiplied by the incoming one only in the correct variant."""
        (gradient,) = ctx.saved_tensors
        return gradient * grad_output if ctx.is_right else gradient.clone(), None, None


@pytest.mark.parametrize("is_alone", [True, False])
@pytest.mark.parametrize("is_right", [True, False])
def test_a_gradient_without_the_scale_is_seen(*, is_right: bool, is_alone: bool) -> None:
    """A custom Function that ignores the incoming scaled gradient is reported, also in a sum."""

    def loss_of(weight: Tensor) -> Tensor:
        injected = Injected.apply(weight * 2.0, torch.ones(4), is_right)  # type: ignore[no-untyped-call]
        loss: Tensor = injected if is_alone else injected + (weight * 2.0).square().sum()
        return loss

    kinds = {row.kind for row in check(loss_of) if row.is_fault} - {"no_half_operators"}
    assert kinds == (set() if is_right else {"gradients_not_scaled"})


def test_a_fill_value_is_named_as_what_fp32_cannot_hold() -> None:
    """A fill value in the data that overflows even in fp32 is named as the cause."""
    target = torch.tensor([1.0, 9.96921e36, 2.0, 3.0])
    row = first(check(lambda weight: (weight * 1.0 - target).square().mean()))
    assert (row.kind, row.symptom, row.value) == (
        "nonfinite_input",
        "loss",
        pytest.approx(9.96921e36),
    )
    assert "(weight * 1.0 - target).square()" in row.text


def test_an_overflow_that_comes_back_from_outside_is_the_fault() -> None:
    """An overflow stored in NumPy is named as the cause when its NaN comes back later."""
    kept = np.ones(4, np.float32)

    def loss_of(weight: Tensor) -> Tensor:
        share = torch.from_numpy(kept / kept.max())
        loss = (share * weight).sum()
        kept[0] = float((weight.detach().half() * 300.0).square()[0])
        return loss

    with np.errstate(invalid="ignore"):
        row = first(check(loss_of, steps=3))
    assert (row.kind, row.value) == ("overflow", pytest.approx(90_000, rel=0.01))
    assert "may come from there" in row.text


def test_what_the_last_steps_leave_out_is_judged() -> None:
    """The last weights and losses are examined too, without a step after them."""

    class Hoarder(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.param_groups[0]["params"][0].add_(self.kept)

    def train() -> None:
        net = nn.Linear(4, 1)
        optimizer = Hoarder(net.parameters(), lr=1e-3)
        optimizer.kept = torch.zeros(1, 4)  # type: ignore[attr-defined]
        for number in range(6):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=HALF):
                loss = net(torch.ones(2, 4)).float().square().sum()
            (loss * 2.0 ** (30 if number == 2 else 4)).backward()
            assert net.weight.grad is not None
            optimizer.kept += net.weight.grad * 1e-6  # type: ignore[attr-defined]
            if bool(net.weight.grad.isfinite().all()):
                optimizer.step()

    rows = [row for row in rows_of_loop(train) if row.is_fault]
    assert {row.kind for row in rows} == {"overflow"}
    assert "has not been finite since step 3" in rows[0].text


@pytest.mark.parametrize("weight", [1e-9, 0.0])
def test_a_head_whose_gradients_a_cast_empties_is_seen(weight: float) -> None:
    """A head's gradients that its loss's cast makes 0 are reported next to larger ones."""

    def train() -> None:
        net, head = nn.Linear(4, 4), nn.Linear(4, 1)
        optimizer = torch.optim.SGD([*net.parameters(), *head.parameters()], lr=1e-3)
        for _ in range(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=HALF):
                hidden = net(torch.ones(2, 4))
                loss = hidden.float().square().sum()
                loss = loss + weight * head(hidden.detach()).float().square().mean()
            loss.backward()
            optimizer.step()

    kinds = [row.kind for row in rows_of_loop(train) if row.is_fault]
    assert kinds == (["gradients_underflow"] if weight else [])


def test_a_loss_that_the_loop_scales_itself_is_reported_unscaled() -> None:
    """A loss that the loop multiplies by a power of 2 is reported without the factor."""

    def train() -> None:
        net = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-9)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=HALF):
                loss = (net(torch.ones(2, 4)) * 0 + 300).square().float().mean()
            (loss * 1024.0).backward()
            optimizer.step()

    assert first(rows_of_loop(train)).loss_fp32 == pytest.approx(90_000)


def test_gradients_that_the_loop_drops_itself_are_judged() -> None:
    """Non-finite gradients that a loop without a scaler drops are reported."""

    def train() -> None:
        net = nn.Linear(4, 1, dtype=HALF)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        for step in range(4):
            optimizer.zero_grad()
            x = torch.full((2, 4), 100.0 if step == 1 else 1.0, dtype=HALF)
            (net(x).float() * 1000.0).mean().backward()
            if all(torch.isfinite(each.grad).all() for each in net.parameters()):  # type: ignore[arg-type]
                optimizer.step()

    row = first(rows_of_loop(train))
    assert (row.kind, row.symptom, row.steps) == ("overflow", "gradient", [2])


def test_zeros_that_a_backward_pass_masks_are_an_underflow_at_any_scale() -> None:
    """Zeros that a backward pass returns instead of dividing by 0, like atan2's, are an
    underflow.
    """
    row = first(
        check(
            lambda w: torch.atan2((w * 1e-5).half(), torch.full((4,), 1e-5).half()).float().mean()
        )
    )
    assert (row.kind, row.share) == ("gradients_underflow", 1.0)
    assert "whatever the scale is" in row.text
    assert "fp32" in row.advice


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_copy_of_a_value_that_lives_on_loses_no_update(*, is_kept: bool) -> None:
    """A half-precision copy of master weights loses no update; an average stored in half does."""

    def train() -> None:
        net = nn.Linear(64, 1, dtype=HALF)
        master = net.weight.detach().float()
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        for _ in range(6):
            (
                net(torch.ones(2, 64, dtype=HALF)).float().mean()
                * optimizer.param_groups[0]["params"][0]
            ).backward()
            optimizer.step()
            with torch.no_grad():
                if is_kept:
                    master += 1e-6
                net.weight.copy_(master if is_kept else net.weight.float() + 1e-6)

    kinds = [row.kind for row in rows_of_loop(train) if row.is_fault]
    assert kinds == ([] if is_kept else ["update_lost"])


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16])
def test_a_comparison_of_tensors_in_half_precision_is_examined(dtype: torch.dtype) -> None:
    """A comparison of two half-precision tensors is repeated in fp32, like one with a number."""

    def train() -> None:
        weight = nn.Parameter(torch.ones(4))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for _ in range(2):
            half = weight.to(dtype)
            (half * (half != half.flip(0))).float().sum().backward()
            optimizer.step()

    loop = CheckedLoop(CheckedSteps(steps=0))
    with loop:
        train()
    assert not loop.get_unexamined().operators


def test_an_update_that_is_rounded_away_for_the_most_part_is_lost() -> None:
    """An update is lost if only a few elements of a sum change, and by less than in fp32."""

    def train() -> None:
        total = torch.linspace(1, 2, 64, dtype=torch.bfloat16)
        weight = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for _ in range(6):
            (weight * 2).sum().backward()
            optimizer.step()
            total += torch.linspace(0, 0.0042, 64).bfloat16()

    assert first(rows_of_loop(train)).kind == "update_lost"


def test_a_parameter_whose_gradients_are_all_0_in_half_precision_is_told() -> None:
    """A parameter whose half-precision gradients are all 0 is reported, even if it is small."""

    def train(*, factor: float) -> None:
        first_layer, last = nn.Linear(4, 4), nn.Linear(4, 1)
        optimizer = torch.optim.SGD([*first_layer.parameters(), *last.parameters()], lr=1e-4)
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        for _ in range(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=HALF):
                hidden = first_layer(torch.ones(2, 4))
                hidden.register_hook(lambda gradient: gradient * factor)
                loss = last(hidden).float().mean()
            scaler.scale(loss * 1e-5).backward()
            scaler.step(optimizer)
            scaler.update()

    row = first(rows_of_loop(lambda: train(factor=1e-3)))
    assert row.kind == "gradients_underflow"
    assert "of 2 of 4 parameters are 0" in row.text
    assert (row.share, row.elements) == (None, (2, 4))
    assert not any(row.is_fault for row in rows_of_loop(lambda: train(factor=1.0)))


def test_a_loss_that_has_reached_0_is_no_mistake() -> None:
    """Zero gradients of a loss that has reached 0, as of a satisfied margin, are no mistake."""

    def train(*, is_zero_from_the_start: bool) -> None:
        net = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        for _ in range(60):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=HALF):
                out = net(torch.ones(2, 4)).float()
            loss = out.mean() * 0.0 if is_zero_from_the_start else F.relu(1.0 - out).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    assert not any(
        row.is_fault for row in rows_of_loop(lambda: train(is_zero_from_the_start=False))
    )
    assert first(rows_of_loop(lambda: train(is_zero_from_the_start=True))).kind == "zero_gradients"


def test_a_sum_in_place_that_stops_growing_is_found() -> None:
    """An in-place sum that stops growing is reported, such as one of ones in bf16 at 256."""

    def train() -> None:
        net = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
        for _ in range(6):
            optimizer.zero_grad()
            count = torch.zeros(1, dtype=torch.bfloat16)
            count.index_add_(0, torch.zeros(1000, dtype=torch.int64), torch.ones(1000).bfloat16())
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = net(torch.ones(2, 4)).float().square().mean() / count.float().squeeze()
            loss.backward()
            optimizer.step()

    row = first(rows_of_loop(train))
    assert (row.kind, row.operator) == ("loss_differs", "index_add_")


def test_the_source_of_an_iterators_item_is_its_statements_first_line() -> None:
    """The source of a loop's item is the first line of the `for` statement, without its body."""

    data = [torch.ones(4), torch.ones(4), torch.full((4,), math.nan)]

    def train() -> None:
        net = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
        for batch in map(torch.abs, data):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = net(batch).float().mean()
            loss.backward()
            optimizer.step()

    assert first(rows_of_loop(train)).source == "for batch in map(torch.abs, data)"


class PassedOn(TorchDispatchMode):
    """A dispatch mode of the script that changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the operator unchanged."""
        return func(*args, **kwargs or {})


def test_a_mode_of_the_loop_hides_no_line() -> None:
    """With the loop's own dispatch mode a row has its line, and no mode is left behind."""

    def train() -> None:
        weight = nn.Parameter(torch.ones(4))
        optimizer = torch.optim.SGD([weight], lr=1e-4)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        with PassedOn():
            loss = (weight.half() * 60000 + 10000).float().sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    row = first(rows_of_loop(train))
    assert row.source == "weight.half() * 60000 + 10000"
    assert _get_current_dispatch_mode() is None


def test_an_overflow_without_effect_is_no_mistake() -> None:
    """An overflow without effect is no mistake, such as a score that is masked afterwards."""

    def loss_of(w: Tensor) -> Tensor:
        scores = w.half() * torch.tensor([1.0, 1.0, 1.0, 1e6])
        return torch.where(torch.arange(4) < 3, scores, 0.0).float().sum()

    rows = check(loss_of)
    assert not any(row.is_fault for row in rows)


@pytest.mark.parametrize("held_as", ["weight", "running"])
def test_a_weight_or_buffer_that_came_in_nonfinite_is_no_data(held_as: str) -> None:
    """A weight or buffer that was nonfinite before the check is not attributed to the data."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.register_buffer("running", torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.weight * self.running).half().float().sum()

    net = Net()
    with torch.no_grad():
        getattr(net, held_as)[1] = math.nan

    def train() -> None:
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
        for _ in range(2):
            optimizer.zero_grad()
            net(torch.ones(4)).backward()
            optimizer.step()

    row = first(rows_of_loop(train))
    assert (row.kind, row.title) == ("nonfinite_weight", f"{held_as} is not finite")
    assert "data" not in row.advice


def test_a_number_that_is_read_while_it_is_scaled_is_noted() -> None:
    """Reading a scaled loss or norm, as for a log, is a note and no mistake."""

    def train() -> None:
        weight = nn.Parameter(torch.ones(4))
        optimizer = torch.optim.SGD([weight], lr=1e-4)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for _ in range(2):
            optimizer.zero_grad()
            loss = (weight.half() * 2).float().sum()
            scaled = scaler.scale(loss)
            scaled.backward()
            scaled.item()
            weight.grad.norm().item()
            scaler.unscale_(optimizer)
            weight.grad.norm().item()
            loss.item()
            scaler.step(optimizer)
            scaler.update()
            float(scaled.detach())

    rows = rows_of_loop(train)
    assert not any(row.is_fault for row in rows)
    assert [(row.source, row.count, row.value) for row in rows] == [
        ("scaled.item()", 2, 8192.0),
        ("weight.grad.norm().item()", 2, 4096.0),
        ("float(scaled.detach())", 2, 8192.0),
    ]
    assert [row.steps for row in rows] == [[1, 2]] * 3
    assert "it is 8,192, and 8 without the scale of 2^10" in rows[0].text


def test_a_nan_that_is_swallowed_does_not_hide_the_overflow() -> None:
    """A NaN of fp32 that masked_fill removes does not hide another overflow."""

    def loss_of(w: Tensor) -> Tensor:
        mask = torch.tensor([[False] * 4, [True] * 4])
        scores = w.expand(2, 4).masked_fill(mask, -math.inf)
        pooled = torch.where(mask.any(1), torch.zeros(2), scores.softmax(1).sum(1))
        return (pooled * w[:2].half()).float().sum() * 8

    rows = check(loss_of, scale=2.0**20, steps=8)
    assert [row.kind for row in rows if row.is_fault] == []


def test_a_step_over_the_budget_is_left_out_and_runs_on() -> None:
    """A step over the time budget continues without shadows and is left out."""
    found: list[Any] = []
    sanitizer = Sanitizer(found.extend, budget_bytes=1000)
    sanitizer.arm(1)
    try:
        x = torch.randn(64, 64).half() * 1000
        assert (x * 1000).isinf().any()
        assert sanitizer.mode.is_over_budget
        sanitizer.next_step(2)
        assert not sanitizer.mode.is_over_budget
    finally:
        sanitizer.disarm()
    assert found == []


def test_versions_of_lists_that_change_in_place_are_counted() -> None:
    """Foreach operators count versions, so autograd refuses saved tensors that they changed."""
    sanitizer = Sanitizer(lambda _: None)
    sanitizer.arm(1)
    try:
        x = torch.ones(3, requires_grad=True)
        saved = x * 2
        loss = saved.square().sum()
        torch._foreach_add_([saved.detach()], 1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    finally:
        sanitizer.disarm()


def test_an_edit_with_a_copy_of_scaled_gradients_is_named_where_the_copy_was_made() -> None:
    """Adding a copy of an earlier step's scaled gradients is reported at the line of the copy."""

    def train() -> None:
        net = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
        full: list[Tensor] = []
        for _ in range(5):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = net(torch.randn(3, 4)).float().square().mean()
            scaler.scale(loss).backward()
            if not full:
                full = [weight.grad.clone() for weight in net.parameters()]  # copy
            for weight, gradient in zip(net.parameters(), full, strict=True):
                weight.grad.add_(gradient)
            scaler.step(optimizer)
            scaler.update()

    [row] = [row for row in rows_of_loop(train) if row.is_fault]
    assert (row.kind, row.steps) == ("scaled_gradients_kept", [1])
    assert Path(__file__).read_text().splitlines()[row.line - 1].endswith("# copy")


def test_integers_are_named_where_their_numbers_were_rounded() -> None:
    """Wrong indices are reported at the cast to half precision, not at the one to integers."""

    def loss_of(w: Tensor) -> Tensor:
        table = torch.cat([w, torch.zeros(5000)])
        ids = torch.tensor([4097.0, 4099.0, 4101.0]).half()
        return table[ids.long()].float().sum() + w.half().float().sum()

    row = first(check(loss_of))
    assert (row.kind, row.source) == (
        "integers_differ",
        "torch.tensor([4097.0, 4099.0, 4101.0]).half()",
    )
    assert "what `ids.long()`" in row.text


def stop_at_an_error(accepts: Callable[[Tensor], Tensor]) -> Row:
    """Return the mistake of a loop that an operator ends by raising."""

    def train() -> None:
        net = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
        for factor in (0.1, 1.0):
            with torch.autocast("cpu", dtype=HALF):
                out = net(torch.ones(2, 4)) * 0 + factor
                try:
                    loss = accepts(out)
                except RuntimeError:
                    return
            loss.float().sum().backward()
            optimizer.step()

    return first(rows_of_loop(train))


def test_an_operator_that_rejects_a_rounded_value_is_named() -> None:
    """An operator that raises for a rounded value, and would not for fp32's, is named."""

    def accepts(out: Tensor) -> Tensor:
        probability = out.half() * 1.0006
        return F.binary_cross_entropy(probability.float() - 0.0008, torch.ones(2, 4))

    row = stop_at_an_error(accepts)
    assert row.kind == "rejected"
    assert "all elements of input should be between 0 and 1" in row.text
    assert row.text.endswith("With the values of fp32 it does not. The loop ended in this step.")


def test_an_overflow_in_the_step_in_which_the_loop_ends_is_named() -> None:
    """An overflow in the loop's last step is reported, since it may have ended the loop."""

    def accepts(out: Tensor) -> Tensor:
        costs = (out.half().detach() * 60000 * 1.5 * (out > 0.5)).float()
        if costs.isinf().any():
            raise RuntimeError("infeasible")
        return out

    row = stop_at_an_error(accepts)
    assert (row.kind, row.value) == ("overflow", pytest.approx(90000, rel=1e-3))
    assert row.text.endswith("The loop ended in this step.")


def test_an_overflow_after_the_training_ends_no_loop() -> None:
    """An overflow in an evaluation after the training is not reported as what ended the loop."""

    def train() -> None:
        net = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
        with torch.autocast("cpu", dtype=HALF):
            loss = net(torch.ones(2, 4)).float().sum()
        loss.backward()
        optimizer.step()
        net.eval()
        with torch.no_grad(), torch.autocast("cpu", dtype=HALF):
            net(torch.ones(2, 4)).exp2().half().add(6e4).mul(2).float().clamp(max=1.0)

    assert not [row for row in rows_of_loop(train) if row.is_fault]


class Positions(nn.Module):
    """A module that computes a table of angles once, and adds it to its input."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1000))
        self.dtype, self.table = dtype, torch.tensor(())

    def forward(self) -> Tensor:
        if not self.table.numel():
            position = torch.arange(1000).to(self.dtype)
            self.table = (position * 0.5).cos().bfloat16()
        return (self.weight.bfloat16() + self.table).float().square().mean()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_table_that_was_computed_in_half_precision_is_named(dtype: torch.dtype) -> None:
    """A table of positions above 256 is reported if computed in bf16, not if stored in it."""

    def train() -> None:
        net = Positions(dtype)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            net().backward()
            optimizer.step()

    faults = [row for row in rows_of_loop(train) if row.is_fault]
    assert [row.kind for row in faults] == ["kept_rounded"] * (dtype is torch.bfloat16)
    for row in faults:
        assert row.source == "torch.arange(1000).to(self.dtype)"
        assert "`(position * 0.5).cos()" in row.text


def test_an_operator_without_a_kernel_for_half_precision_rejects_no_value() -> None:
    """An operator that has no half-precision kernel raises for its dtype, and is not reported."""

    def train() -> None:
        net = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
        for step in range(2):
            with torch.autocast("cpu", dtype=HALF):
                out = net(torch.ones(4, 4)).half() + torch.eye(4, dtype=HALF)
            if step:
                with pytest.raises(RuntimeError, match="Half"):
                    torch.linalg.cholesky_ex(out)
                return
            out.float().sum().backward()
            optimizer.step()

    assert not [row for row in rows_of_loop(train) if row.kind == "rejected"]


def test_an_update_that_an_overflow_makes_0_has_its_line() -> None:
    """An update that is divided by an overflowed norm is 0 without NaN, and has its line."""

    def train() -> None:
        net = nn.Linear(4, 4)
        optimizer = torch.optim.SGD([net.bias], lr=0.01)
        for _ in range(3):
            net.zero_grad()
            net(torch.randn(3, 4)).square().mean().backward()
            with torch.no_grad():
                update = net.weight.grad.sign().half() * 3e4
                update = update / update.norm()  # norm
                net.weight.sub_(update, alpha=0.01)
            optimizer.step()

    [row] = [row for row in rows_of_loop(train) if row.is_fault]
    assert (row.kind, row.symptom) == ("overflow", "weight")
    assert Path(__file__).read_text().splitlines()[row.line - 1].endswith("# norm")
    assert row.text.endswith("is 0, and so is the update of a weight.")


def test_gradients_that_are_not_cleared_explain_that_they_are_carried() -> None:
    """Nonfinite gradients that a loop does not clear are explained, without precision advice."""

    def train() -> None:
        net = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        for step in range(12):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = net(torch.randn(3, 4)).float().square().mean()
            if step == 2:
                scaler.update(2.0**40)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            if norm.isfinite():
                optimizer.zero_grad()

    rows = rows_of_loop(train)
    assert "gradients_not_cleared" in {row.kind for row in rows if row.is_fault}
    assert "carried" not in {row.kind for row in rows}


@pytest.mark.parametrize("changes", [False, True])
def test_a_state_of_gradients_with_a_scale_by_hand(changes: bool) -> None:
    """A state of gradients under a hand-made scale is wrong once this scale changes."""

    def train() -> None:
        net = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        momentum = [torch.zeros_like(weight) for weight in net.parameters()]
        for step in range(5):
            scale = 2.0 ** (8 - step * changes)
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = net(torch.randn(3, 4)).float().square().mean()
            (loss * scale).backward()
            for weight, kept in zip(net.parameters(), momentum, strict=True):
                kept.lerp_(weight.grad, 0.1)
                weight.grad.copy_(kept / kept.norm())
            optimizer.step()

    kinds = {row.kind for row in rows_of_loop(train) if row.is_fault}
    assert kinds == ({"scaled_gradients_kept"} if changes else set())


@pytest.mark.parametrize("decay", [1.6e-3, 0.05])
def test_a_decay_that_is_rounded_away_has_its_line(decay: float) -> None:
    """A weight decay that is rounded away has its line, although a stochastically rounded update
    does not.
    """

    def train() -> None:
        weight = nn.Parameter(torch.linspace(1.0, 1.9, 64).bfloat16())
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        for _ in range(6):
            (weight.float() * torch.ones(64)).sum().backward()
            assert weight.grad is not None
            with torch.no_grad():
                weight.mul_(1 - decay)  # decay
                noise = torch.randint(0, 1 << 16, weight.shape, dtype=torch.int32)
                moved = (weight.float() - 0.01 * weight.grad.float()).view(torch.int32) + noise
                weight.copy_(moved.bitwise_and_(-65536).view(torch.float32))
            weight.grad = None
            optimizer.step()

    lost = [row for row in rows_of_loop(train) if row.kind == "update_lost"]
    lines = [Path(__file__).read_text().splitlines()[row.line - 1][-7:] for row in lost]
    assert lines == (["# decay"] if decay < 0.01 else [])


def test_bf16_is_not_advised_where_a_root_of_a_difference_follows() -> None:
    """bf16 is not advised for the root of a difference, which it may round below 0."""

    def deviation(weight: Tensor) -> Tensor:
        x = (weight * torch.tensor([400.0, 404.0, 408.0, 412.0])).half()
        total = (x * 1.0).sum()
        squares = (x.float() * x.float()).sum()
        return (squares / 4 - (total * total).float() / 16).sqrt().sum()

    row = first(check(deviation))
    assert (row.kind, row.is_fault) == ("overflow", True)
    assert "bf16" not in row.advice
    assert "bf16" in first(check(lambda weight: ((weight.half() * 400) ** 2).sum().float())).advice


@pytest.mark.parametrize("name", ["root of a mean", "square of a difference"])
def test_bf16_is_advised_where_no_difference_is_rounded_below_0(name: str) -> None:
    """bf16 is advised for a root of a sum with eps or of a square, which cannot be negative."""

    def loss(weight: Tensor) -> Tensor:
        x = weight.half() * 400
        if name == "root of a mean":
            return ((x * x).mean() + 1e-5).sqrt()
        return (((x * x) - 1.0) ** 2).float().mean()

    row = first(check(lambda weight: loss(weight).float().sum()))
    assert (row.kind, row.is_fault) == ("overflow", True)
    assert "bf16" in row.advice


def test_a_scaled_loss_that_is_never_unscaled_is_healthy_with_adam() -> None:
    """A scaled loss that is never unscaled is healthy with Adam, which ignores it, not with SGD."""

    def train(make: type[torch.optim.Optimizer]) -> None:
        net = nn.Linear(4, 1)
        optimizer = make(net.parameters(), lr=1e-3)  # type: ignore[call-arg]
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for _ in range(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=HALF):
                loss = net(torch.randn(8, 4)).float().square().mean()
            scaler.scale(loss).backward()
            optimizer.step()

    assert not [row for row in rows_of_loop(lambda: train(torch.optim.Adam)) if row.is_fault]
    rows = rows_of_loop(lambda: train(torch.optim.SGD))
    assert [row.kind for row in rows if row.is_fault] == ["step_outside_scaler"]


def test_an_overflow_by_wrong_inputs_follows_the_line_that_makes_them_wrong() -> None:
    """An overflow of a value that fits fp32 comes after the wrong loss of its step."""
    site = Site(operator="sub", file="train.py", line=3)
    wrong = Defect(step=8, kind="loss_differs", symptom="loss", site=site, loss=1.0, loss_fp32=0.5)
    others = [replace(wrong, step=step) for step in (9, 10)]
    overflow = Defect(step=8, kind="overflow", symptom="gradient", limit=65504.0)
    for value, first_kind in ((113.1, "loss_differs"), (1e5, "overflow")):
        observations = Observations()
        observations.add([replace(overflow, value=value), wrong])
        observations.add(others[:1])
        observations.add(others[1:])
        assert observations.found(10)[0].first.kind == first_kind


def test_copies_of_weights_in_fp32_lose_nothing() -> None:
    """A half-precision copy may stay equal while its fp32 master moves."""

    def train() -> None:
        master = nn.Parameter(torch.tensor([1.0, 1.5]))
        copied = master.detach().bfloat16().requires_grad_()
        optimizer = torch.optim.SGD([master], lr=4e-4)
        for _ in range(6):
            copied.float().sum().backward()
            assert copied.grad is not None
            master.grad, copied.grad = copied.grad.float(), None
            optimizer.step()
            with torch.no_grad():
                copied.copy_(master)

    assert not [row for row in rows_of_loop(train) if row.is_fault]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_a_0_that_is_drawn_in_half_precision_has_its_line(dtype: torch.dtype) -> None:
    """A 0 that bf16 draws at random, with an infinite logarithm, is reported at its line.

    The logarithm of a negative number is NaN in any precision, as with numbers drawn in fp16.
    """

    def train() -> None:
        weight = nn.Parameter(torch.ones(4))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for _ in range(2):
            least = -1.0 if dtype is torch.float16 else 0.0
            drawn = torch.empty(4096, dtype=dtype).uniform_(least, 16)  # drawn
            if dtype is torch.float32:
                drawn[:1].fill_(0.0)
            (weight.sum() * drawn.log().float().mean()).backward()
            optimizer.step()

    row = first(rows_of_loop(train))
    assert row.kind == ("rounding" if dtype is torch.bfloat16 else "undefined")
    line = Path(__file__).read_text().splitlines()[row.line - 1]
    assert line.endswith("# drawn") == (dtype is torch.bfloat16)
