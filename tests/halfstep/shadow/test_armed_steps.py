"""Watched steps that run with shadows in fp32."""

import copy
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import convert
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import optimizer as optimizer_module
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import _get_current_dispatch_mode

import halfstep
from db.health.shadow_findings import explaining, first_step, observe, others
from halfstep.check.session import CheckedLoop, CheckedSteps
from halfstep.diagnosis.defect import Defect
from halfstep.diagnosis.statements import text_of
from halfstep.shadow import armed_steps, mode, validations
from halfstep.shadow.armed_steps import EARLY_STEPS, ArmedSteps
from halfstep.shadow.sanitizer import Sanitizer
from halfstep.telemetry import event_codec as codec
from halfstep.telemetry.events import ShadowStep
from tests.halfstep.shadow.checked import Loop, bare
from tests.halfstep.shadow.test_bits import (
    LOOPS,
    accumulation,
    closures,
    compiled,
    evaluation,
    exceptions,
    mlp,
    no_scaler,
    optimizer_in_backward,
    two_scalers,
)
from tests.halfstep.shadow.test_odd_loops import BORNE
from tests.halfstep.watching.watch_made import Written
from tests.marks import sampled

pytestmark = pytest.mark.usefixtures("nothing_compiled")


@pytest.fixture(autouse=True)
def _enough_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give slow machines enough time to arm each step."""
    monkeypatch.setattr(armed_steps, "FREE_SECONDS", math.inf)


class Net(nn.Module):
    """A network with activations that can be made too large for fp16."""

    wait_seconds = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)

    def forward(self, x: Tensor, factor: float) -> Tensor:
        time.sleep(self.wait_seconds)
        hidden: Tensor = self.body(x) * factor
        return hidden


def _train(folder: Path, *, steps: int = 12, from_step: int = 8, **options: Any) -> Written:
    """Watch a loop that overflows from the given step on."""
    torch.manual_seed(0)
    net = Net()
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.01), GradScaler("cpu")
    with halfstep.watch(net, folder=folder, name="it", **options):
        for step in range(1, steps + 1):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                out = net(torch.ones(2, 8), 1e6 if step >= from_step else 1.0)
            scaler.scale(out.float().square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    return Written(folder / "it")


def _train_armed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, **named: Any
) -> tuple[Written, list[int]]:
    """Train, and return the numbers of the armed steps."""
    steps: list[int] = []
    ended = Sanitizer.next_step

    def next_step(self: Sanitizer, step: int) -> None:
        steps.append(self.step)
        ended(self, step)

    monkeypatch.setattr(Sanitizer, "next_step", next_step)
    return _train(folder, **named), steps


def test_early_steps_and_those_after_a_lost_loss_are_armed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Early steps, and those after a lost loss, are armed until two have shown the cause."""
    written, steps = _train_armed(tmp_path, monkeypatch)
    early = list(range(2, 2 + EARLY_STEPS))
    assert steps == [*early, 9, 10]
    assert [event["step"] for event in written.of("shadow_step")] == [9, 10]
    [defect] = written.of("shadow_step")[0]["defects"]
    assert (defect["kind"], defect["site"]["source"]) == ("overflow", "self.body(x) * factor")
    assert _get_current_dispatch_mode() is None


def test_a_healthy_loop_has_armed_steps_at_each_tenfold_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A healthy loop arms steps around each power of ten, and none for calibration skips."""
    monkeypatch.setattr(armed_steps, "FREE_SECONDS", 60.0)
    written, steps = _train_armed(tmp_path, monkeypatch, from_step=1000, steps=250)
    assert steps == [2, 3, 4, 23, 24, 25, 222, 223, 224]
    assert not written.of("shadow_step")


def test_an_armed_step_has_to_be_affordable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a time budget only steps that are skipped anyway are armed."""
    monkeypatch.setattr(armed_steps, "FREE_SECONDS", 0.0)
    _, steps = _train_armed(tmp_path, monkeypatch)
    assert not steps


def test_waits_are_not_the_time_of_an_armed_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, waits for data or a busy processor do not count as the time of an armed step."""
    monkeypatch.setattr(armed_steps, "FREE_SECONDS", 0.6)  # less than three waits
    monkeypatch.setattr(Net, "wait_seconds", 0.2)
    _, steps = _train_armed(tmp_path, monkeypatch, steps=5, from_step=1000)
    assert steps == [2, 3, 4]


def test_nothing_is_armed_with_too_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step is armed if its shadows would need memory that the training needs."""
    monkeypatch.setattr(armed_steps, "_budget_bytes", lambda _: 0)
    _, steps = _train_armed(tmp_path, monkeypatch)
    assert not steps


def test_nothing_is_armed_in_a_process_that_has_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step is armed in a process that compiles: graphs would recompile and hide operators."""
    monkeypatch.setattr(armed_steps, "has_compiled", lambda: True)
    _, steps = _train_armed(tmp_path, monkeypatch)
    assert not steps


def test_nothing_is_armed_where_modules_are_nested_deeply(tmp_path: Path) -> None:
    """No step is armed with deeply nested modules, since hooks add frames to Python's limit."""
    net: nn.Module = nn.Linear(2, 2)
    for _ in range(150):
        net = nn.Sequential(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=8.0)
    with halfstep.watch(net, folder=tmp_path, name="it") as watch:
        for _ in range(5):
            scaler.scale(net(torch.ones(1, 2)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            assert not watch._loop.evidence.armed.is_armed


def test_an_error_of_an_armed_step_ends_only_these(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of an armed step ends only the arming, and the training is recorded."""

    def fails(_self: Sanitizer, _step: int) -> None:
        raise ValueError("no shadow")

    monkeypatch.setattr(Sanitizer, "next_step", fails)
    written = _train(tmp_path)
    assert len(written.steps) == 12
    [failed] = written.of("failed_diagnosis")
    assert (failed["diagnosis"], failed["error"]) == ("shadow steps", "ValueError: no shadow")
    assert _get_current_dispatch_mode() is None


def test_a_run_that_ends_in_an_armed_step_leaves_nothing_behind(tmp_path: Path) -> None:
    """A run that ends within an armed step removes the step's wrappers before those of watch."""
    scale = GradScaler.scale
    _train(tmp_path, steps=2)
    assert GradScaler.scale is scale
    assert _get_current_dispatch_mode() is None


def test_hooks_that_go_within_a_step_do_not_disturb_others(tmp_path: Path) -> None:
    """A run that ends within an optimizer's step removes hooks while torch iterates over them."""
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    watch = halfstep.watch(net, folder=tmp_path, name="it")
    run = watch._run
    assert run is not None
    first = register_optimizer_step_post_hook(lambda *_: run.guard.fail(ValueError("a test")))
    calls: list[int] = []
    last = register_optimizer_step_post_hook(lambda *_: calls.append(1))
    try:
        for _ in range(3):
            net(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    finally:
        first.remove()
        last.remove()
        watch.finish()
    assert calls == [1, 1, 1]


def test_a_number_that_torch_holds_as_a_tensor_can_be_read(tmp_path: Path) -> None:
    """A number that torch saved as a tensor and passes to a dispatch mode as a number can be read.

    The default dtype does not round it.
    """
    sanitizer = Sanitizer(lambda _: None)
    loss = torch.ones((), requires_grad=True) * 1.0
    torch.set_default_dtype(torch.bfloat16)
    sanitizer.arm(1)
    try:
        divided: Any = loss / 4
        assert divided.grad_fn._saved_other.item() == 4
        halved: Any = loss * 0.1
        assert halved.grad_fn._saved_other.item() == 0.1
    finally:
        sanitizer.disarm()
        torch.set_default_dtype(torch.float32)


#: Loops that step and clear in different ways; the others run in `make test-all`.
SAMPLE: list[Loop] = [
    *(mlp, accumulation, closures, two_scalers, optimizer_in_backward, no_scaler),
    *(compiled, exceptions, evaluation),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own
@pytest.mark.parametrize(
    "loop", sampled([*LOOPS, *BORNE], SAMPLE), ids=lambda loop: loop.__qualname__.split(".")[0]
)
def test_a_watched_loop_of_armed_steps_is_equal_to_the_bit(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop whose steps are all armed is bit-identical, and has no fault if it is healthy."""
    expected = bare(loop)
    monkeypatch.setattr(armed_steps, "EARLY_STEPS", 1000)
    with halfstep.watch(folder=tmp_path, name="it"):
        assert bare(loop) == expected
    written = Written(tmp_path / "it")
    assert not written.of("failed_diagnosis")
    steps = [codec.decode(json.dumps(each).encode()) for each in written.of("shadow_step")]
    assert not observe([each for each in steps if isinstance(each, ShadowStep)], None)


def test_an_armed_step_that_takes_too_long_goes_on_without_shadows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An armed step that takes too long, such as with an evaluation in it, continues without
    shadows and reports nothing.
    """
    monkeypatch.setattr(mode, "PURGE_EVERY", 1)
    monkeypatch.setattr(ArmedSteps, "_get_allowed_seconds", lambda _: -1.0)
    monkeypatch.setattr(ArmedSteps, "_is_affordable", lambda *_: True)
    monkeypatch.setattr(armed_steps, "FREE_SECONDS", 0.0)
    written = _train(tmp_path)
    assert len(written.steps) == 12
    assert not written.of("shadow_step")
    assert not written.of("failed_diagnosis")


@pytest.mark.parametrize("seconds", [0.0, 60.0])
def test_a_loop_that_only_skips_is_examined_for_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """A loop that only skips is examined for longer, up to a limit for all of its steps."""
    monkeypatch.setattr(mode, "PURGE_EVERY", 1)
    monkeypatch.setattr(armed_steps, "FREE_SECONDS", 0.0)
    monkeypatch.setattr(armed_steps, "SHARE", 0.0)
    monkeypatch.setattr(armed_steps, "ALL_SKIPPED_SECONDS", seconds)
    written, steps = _train_armed(tmp_path, monkeypatch, from_step=1)
    assert steps[0] > armed_steps.EARLY_SKIPS
    assert bool(written.of("shadow_step")) == (seconds > 0)


def test_a_check_that_ends_within_a_step_does_not_disturb_other_hooks() -> None:
    """Hooks registered after those of a check are called in each step, even in its last one."""
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    calls: list[int] = []
    with CheckedLoop(CheckedSteps(steps=2)) as check:
        last = register_optimizer_step_post_hook(lambda *_: calls.append(1))
        for _ in range(4):
            net(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        last.remove()
    assert (check.steps, calls) == (2, [1, 1, 1, 1])
    assert not optimizer_module._global_optimizer_post_hooks


def test_what_was_kept_of_scaled_gradients_is_forgotten_where_steps_are_not_armed() -> None:
    """Records of scaled gradients are dropped before unarmed steps, which may change them
    unseen.
    """
    net, scaler, sanitizer = nn.Linear(4, 1), GradScaler("cpu"), Sanitizer(list)
    scaler.scale(torch.ones(1))  # creates the scale
    sanitizer.arm(1)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = net(torch.ones(2, 4)).float().mean()
    sanitizer.loss(loss, scaler)
    scaler.scale(loss).backward()
    copies = [weight.grad.clone() for weight in net.parameters()]
    sanitizer.next_step(2)
    assert len(sanitizer.mode.kept) == len(copies)
    sanitizer.disarm()
    assert not sanitizer.mode.kept


def test_steps_with_gradients_of_0_are_looked_into(tmp_path: Path) -> None:
    """Steps are armed if gradients become 0, as by a clip whose norm overflows in fp16."""
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    with halfstep.watch(folder=tmp_path, name="it"):
        for step in range(1, 1300):
            optimizer.zero_grad()
            (weight * (1.0 if step < 300 else 200.0)).sum().backward()
            assert weight.grad is not None
            norm = (weight.grad.half() ** 2).sum().sqrt()
            weight.grad.mul_(1 / (norm.float() + 1))
            optimizer.step()
    [*_, event] = Written(tmp_path / "it").of("shadow_step")
    [defect] = [each for each in event["defects"] if each["kind"] == "loss_differs"]
    assert text_of(convert(defect, Defect)).startswith(
        f"In step {event['step']:,} the loss is as in fp32, and gradients are not."
    )


class Scores(nn.Module):
    """A network that sums large scores in the precision of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.body(x)
        return scores.sum() * 1e4


def _validate_halves(folder: Path, validations: int, overflows: Callable[[int], bool]) -> list[str]:
    """Watch a loop that validates a copy in fp16 after every third step.

    overflows: whether a validation overflows, by its number from 1 on.  Returns the texts of
    findings.
    """
    torch.manual_seed(0)
    net = Scores()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-12)
    with halfstep.watch(net, folder=folder, name="it"):
        for validation in range(1, validations + 1):
            for _ in range(3):
                optimizer.zero_grad()
                net(torch.ones(2, 8)).square().backward()
                optimizer.step()
            half = copy.deepcopy(net).half().eval()
            with torch.no_grad():
                for _ in range(2):
                    half(torch.full((2, 8), 100.0 if overflows(validation) else 0.001).half())
    assert _get_current_dispatch_mode() is None
    written = Written(folder / "it")
    assert len(written.steps) == 3 * validations
    assert not written.of("failed_diagnosis")
    defects = [each for event in written.of("shadow_step") for each in event["defects"]]
    assert all(each["symptom"] == "validation" for each in defects)
    return [text_of(convert(each, Defect)) for each in defects]


def test_a_validation_that_overflows_has_its_line(tmp_path: Path) -> None:
    """The first validation is armed up to the next step, and an overflow in it has its line."""
    [text] = _validate_halves(tmp_path, 3, lambda _: True)
    assert text.startswith("In a validation after step 3 `scores.sum() * 1e4`")
    assert "beyond fp16's 65,504" in text


def test_each_tenfold_validation_is_armed(tmp_path: Path) -> None:
    """Each tenfold validation is armed; of twelve with the first one clean it is the tenth, after
    step 30.

    A validation that the end of the run cuts off is reported as well.
    """
    [text] = _validate_halves(tmp_path / "twelve", 12, lambda number: number > 1)
    assert text.startswith("In a validation after step 30 ")
    [text] = _validate_halves(tmp_path / "ten", 10, lambda number: number == 10)
    assert text.startswith("In a validation after step 30 ")


def test_a_validation_explains_no_skip(tmp_path: Path) -> None:
    """A fault in a validation is separate: it neither explains nor hides one in the training."""
    _validate_halves(tmp_path, 1, lambda _: True)
    [event] = Written(tmp_path / "it").of("shadow_step")
    step = codec.decode(json.dumps(event).encode())
    assert isinstance(step, ShadowStep)
    observed = observe([step], None)
    assert not list(explaining(observed, ""))
    assert first_step([step]) is None
    [finding] = others(observed, are_mild=False)
    assert (finding.cause, finding.part, finding.is_fault) == ("validation_overflow", "", True)


def test_a_validation_that_is_undefined_in_fp32_is_no_fault(tmp_path: Path) -> None:
    """A validation value undefined in fp32 too is no fault, such as a mean over no elements."""
    net = Scores()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-12)
    with halfstep.watch(net, folder=tmp_path, name="it"):
        for _ in range(2):
            net(torch.ones(2, 8)).backward()
            optimizer.step()
            with torch.no_grad():
                net.eval()(torch.ones(2, 8))
                torch.ones(2, dtype=torch.float16)[2:].mean()
            net.train()
    assert not Written(tmp_path / "it").of("shadow_step")


def test_a_module_that_trains_in_evaluation_mode_is_no_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training in evaluation mode, as with frozen batch norms, does not count as validation."""
    monkeypatch.setattr(validations, "MOST_BATCHES", 2)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-12)
    with halfstep.watch(net, folder=tmp_path, name="it"):
        for step in range(6):
            optimizer.zero_grad()
            net.eval()
            for _ in range(4):
                with torch.autocast("cpu", torch.float16):
                    out = net(torch.ones(2, 8), 1e6 if step > 1 else 1.0)
                out.sum().backward()
            optimizer.step()
    defects = [d for event in Written(tmp_path / "it").of("shadow_step") for d in event["defects"]]
    assert "validation" not in {defect["symptom"] for defect in defects}


def test_a_step_that_a_loop_without_a_scaler_leaves_out_is_judged(tmp_path: Path) -> None:
    """A step that a loop with its own loss scale leaves out is examined."""
    torch.manual_seed(0)
    net = Net().half()
    masters = [weight.detach().float().requires_grad_() for weight in net.parameters()]
    optimizer = torch.optim.SGD(masters, lr=1e-6)
    with halfstep.watch(net, folder=tmp_path, name="it"):
        for step in range(1, 15):
            out = net(torch.ones(2, 8).half(), 1e6 if step > 11 else 1.0)
            (out.float().square().mean() * 8).backward()
            for weight, master in zip(net.parameters(), masters, strict=True):
                master.grad = weight.grad.float() / 8 if weight.grad is not None else None
                weight.grad = None
            if step <= 11:
                optimizer.step()
    [*_, event] = Written(tmp_path / "it").of("shadow_step")
    [defect] = event["defects"]
    assert (defect["kind"], defect["site"]["source"]) == ("overflow", "self.body(x) * factor")


def test_losses_that_become_0_are_looked_into(tmp_path: Path) -> None:
    """A loss that becomes 0 is examined, since a mean in fp16 over 65,520 elements is 0."""
    weight = nn.Parameter(torch.ones(70_000, dtype=torch.float16))
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    with halfstep.watch(folder=tmp_path, name="it"):
        for step in range(1, 1300):
            optimizer.zero_grad()
            part = weight[: 1000 if step < 300 else None]
            (part.sum(dtype=torch.float32) / torch.tensor(float(len(part))).half()).backward()
            optimizer.step()
    [*_, event] = Written(tmp_path / "it").of("shadow_step")
    [defect] = [each for each in event["defects"] if each["kind"] == "loss_differs"]
    assert defect["loss"] == 0
    assert defect["loss_fp32"] > 0.5
