"""Unexamined backward passes are recorded like examined ones."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.utils.checkpoint import checkpoint

import halfstep
from halfstep.session import active_run
from halfstep.watching import backward_passes
from tests.halfstep.watching.watch_made import Written
from tests.marks import extended

pytestmark = pytest.mark.slow

USUAL = 8  # steps of the usual kind before, between and after the others
NEVER = 10**9


class Loop:
    """A loop with iterations chosen by the test."""

    def __init__(self, *, is_fused: bool = False) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, fused=is_fused)
        self.scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=7)
        self.generator = torch.Generator().manual_seed(1)

    def loss(self) -> Tensor:
        """Return the loss of the next batch."""
        inputs = torch.randn(5, 3, generator=self.generator)
        result: Tensor = (self.net(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        return result

    def apply(self) -> None:
        """Step the optimizer and update the scaler."""
        self.scaler.step(self.optimizer)
        self.scaler.update()


def usual(loop: Loop) -> None:
    """Take a usual step: one scaled loss over gradients cleared to None."""
    loop.optimizer.zero_grad()
    loop.scaler.scale(loop.loss()).backward()
    loop.apply()


def accumulated(loop: Loop) -> None:
    """Accumulate two passes."""
    loop.optimizer.zero_grad()
    for _ in range(2):
        loop.scaler.scale(loop.loss() / 2).backward()
    loop.apply()


def two_losses(loop: Loop) -> None:
    """Take one pass from two scaled losses."""
    loop.optimizer.zero_grad()
    torch.autograd.backward(loop.scaler.scale([loop.loss(), loop.loss()]))
    loop.apply()


def uncleared(loop: Loop) -> None:
    """Keep the previous step's gradients."""
    loop.scaler.scale(loop.loss()).backward()
    loop.apply()


def zeroed(loop: Loop) -> None:
    """Clear gradients in place."""
    loop.optimizer.zero_grad(set_to_none=False)
    loop.scaler.scale(loop.loss()).backward()
    loop.apply()


def overflowing(loop: Loop) -> None:
    """Let the loss be inf, so that the step is skipped."""
    loop.optimizer.zero_grad()
    loop.scaler.scale(loop.loss() * torch.inf).backward()
    loop.apply()


def dropped(loop: Loop) -> None:
    """Drop a first batch after its pass."""
    loop.optimizer.zero_grad()
    loop.scaler.scale(loop.loss()).backward()
    usual(loop)


def by_hand(loop: Loop) -> None:
    """Scale the loss by hand."""
    loop.optimizer.zero_grad()
    (loop.loss() * loop.scaler.get_scale()).backward()
    loop.apply()


def penalized(loop: Loop) -> None:
    """Add a gradient penalty by autograd.grad."""
    loop.optimizer.zero_grad()
    loss = loop.loss()
    gradients = torch.autograd.grad(loss, list(loop.net.parameters()), create_graph=True)
    loop.scaler.scale(loss + sum(each.square().sum() for each in gradients)).backward()
    loop.apply()


def nested(loop: Loop) -> None:
    """Nest a pass within the pass, by a reentrant checkpoint."""
    loop.optimizer.zero_grad()
    inputs = torch.randn(1, 3, generator=loop.generator, requires_grad=True)
    output = checkpoint(loop.net, inputs, use_reentrant=True)
    loop.scaler.scale(output.square().mean()).backward()
    loop.apply()


def directly(loop: Loop) -> None:
    """Step with scaled gradients, without the scaler."""
    loop.optimizer.zero_grad()
    loop.scaler.scale(loop.loss() / 1e4).backward()
    loop.optimizer.step()


def left_out(loop: Loop) -> None:
    """Update the scaler without a step."""
    loop.optimizer.zero_grad()
    loop.scaler.scale(loop.loss()).backward()
    loop.scaler.unscale_(loop.optimizer)
    loop.scaler.update()


def ascending(loop: Loop) -> None:
    """Move the weights by hand and update the scaler twice, as SAM does."""
    loop.optimizer.zero_grad()
    loop.scaler.scale(loop.loss()).backward()
    loop.scaler.unscale_(loop.optimizer)
    with torch.no_grad():
        for parameter in loop.net.parameters():
            if parameter.grad is not None:
                parameter.add_(0.01 * parameter.grad)
    loop.scaler.update()
    usual(loop)


def carrying(loop: Loop) -> None:
    """Leave gradients uncleared for as many steps as it takes to be reported."""
    for _ in range(10):
        uncleared(loop)


def clipped(loop: Loop) -> None:
    """Clip the gradients after unscaling."""
    loop.optimizer.zero_grad()
    loop.scaler.scale(loop.loss()).backward()
    loop.scaler.unscale_(loop.optimizer)
    torch.nn.utils.clip_grad_norm_(loop.net.parameters(), 0.1)
    loop.apply()


def grown(loop: Loop) -> None:
    """Add a parameter group."""
    loop.optimizer.zero_grad()
    loop.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    usual(loop)


def second(loop: Loop) -> None:
    """Step another optimizer with its own loss."""
    head = torch.optim.SGD(loop.net[2].parameters(), lr=0.01)
    loop.optimizer.zero_grad()
    loop.scaler.scale(loop.loss()).backward()
    loop.scaler.step(loop.optimizer)
    head.zero_grad()
    loop.scaler.scale(loop.loss()).backward()
    loop.scaler.step(head)
    loop.scaler.update()


def raising(loop: Loop) -> None:
    """Raise within the pass."""
    loop.optimizer.zero_grad()
    loss = loop.loss()
    handle = loss.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loop.scaler.scale(loss).backward()
    handle.remove()


def skipped(loop: Loop) -> None:
    """Let the gradients overflow at a finite loss."""
    loop.optimizer.zero_grad()
    loop.scaler.scale(loop.loss()).backward()
    first = next(loop.net.parameters())
    assert first.grad is not None
    first.grad.fill_(torch.inf)
    loop.apply()


def scale_set(loop: Loop) -> None:
    """Set the scale by update, and again in place."""
    for change in (2.0**12, None):
        loop.optimizer.zero_grad()
        loop.scaler.scale(loop.loss()).backward()
        loop.scaler.step(loop.optimizer)
        loop.scaler.update(change)
    assert loop.scaler._scale is not None
    loop.scaler._scale.fill_(2.0**9)


def scale_replaced(loop: Loop) -> None:
    """Replace the scale's tensor between step and update."""
    loop.optimizer.zero_grad()
    loop.scaler.scale(loop.loss()).backward()
    loop.scaler.step(loop.optimizer)
    loop.scaler._scale = torch.full((), 2.0**8)
    loop.scaler.update()


def unused(loop: Loop) -> None:
    """Leave one parameter without a gradient."""
    loop.optimizer.zero_grad()
    loop.scaler.scale(loop.loss()).backward()
    next(loop.net.parameters()).grad = None
    loop.apply()


def abandoned(loop: Loop) -> None:
    """Scale a loss without a backward pass of it."""
    loop.scaler.scale(loop.loss())
    usual(loop)


def other_root(loop: Loop) -> None:
    """Start the pass from another tensor than the scaled one."""
    loop.optimizer.zero_grad()
    loop.scaler.scale(loop.loss())
    (2 * loop.loss()).backward()
    loop.apply()


def clipped_scaled(loop: Loop) -> None:
    """Clip the gradients while they are scaled."""
    loop.optimizer.zero_grad()
    loop.scaler.scale(loop.loss()).backward()
    torch.nn.utils.clip_grad_norm_(loop.net.parameters(), 0.1)
    loop.apply()


def tensor_rate(loop: Loop) -> None:
    """Use a tensor as the learning rate for one step."""
    rate = loop.optimizer.param_groups[0]["lr"]
    loop.optimizer.param_groups[0]["lr"] = torch.tensor(0.05)
    usual(loop)
    loop.optimizer.param_groups[0]["lr"] = rate


def scheduled(loop: Loop) -> None:
    """Step a scheduler after each update, in applied and in skipped steps."""
    schedule = torch.optim.lr_scheduler.ExponentialLR(loop.optimizer, 0.9)
    for kind in (usual, skipped, usual, skipped, skipped, usual):
        kind(loop)
        schedule.step()


def reported(loop: Loop) -> None:
    """Report the loss by the loop itself."""
    loop.optimizer.zero_grad()
    loop.scaler.scale(loop.loss()).backward()
    active_run.active.loss(3.0)  # type: ignore[union-attr]
    loop.apply()


def restored(loop: Loop) -> None:
    """Replace the scaler by one with its state, between pass and step."""
    loop.optimizer.zero_grad()
    loop.scaler.scale(loop.loss()).backward()
    scaler = GradScaler("cpu", growth_interval=7)
    scaler.load_state_dict(loop.scaler.state_dict())
    loop.scaler = scaler
    scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
    loop.apply()


def interrupted(loop: Loop) -> None:
    """Raise in the optimizer's step, and continue with the next batch."""
    loop.optimizer.zero_grad()
    loop.scaler.scale(loop.loss()).backward()

    def raises(*_: Any) -> None:
        raise ZeroDivisionError

    handle = loop.optimizer.register_step_pre_hook(raises)
    # A step that the scaler skips, as after a scale of 0, does not raise.
    gradients = [p.grad for p in loop.net.parameters() if p.grad is not None]
    is_skipped = not all(bool(each.isfinite().all()) for each in gradients)
    with nullcontext() if is_skipped else pytest.raises(ZeroDivisionError):
        loop.scaler.step(loop.optimizer)
    handle.remove()
    loop.scaler.update()


def early(loop: Loop) -> None:
    """Run the next batch's pass before the update."""
    loop.optimizer.zero_grad()
    loop.scaler.scale(loop.loss()).backward()
    loop.scaler.step(loop.optimizer)
    loop.optimizer.zero_grad()
    loop.scaler.scale(loop.loss()).backward()
    loop.scaler.update()


def not_updated(loop: Loop) -> None:
    """Forget an update, so that the next step is refused."""
    loop.optimizer.zero_grad()
    loop.scaler.scale(loop.loss()).backward()
    loop.scaler.step(loop.optimizer)
    loop.optimizer.zero_grad()
    loop.scaler.scale(loop.loss()).backward()
    with pytest.raises(RuntimeError, match="step"):
        loop.scaler.step(loop.optimizer)
    loop.scaler.update()


def scale_zero(loop: Loop) -> None:
    """Set the scale to 0 between pass and step."""
    loop.optimizer.zero_grad()
    loop.scaler.scale(loop.loss()).backward()
    assert loop.scaler._scale is not None
    loop.scaler._scale.fill_(0.0)
    loop.apply()
    loop.scaler._scale.fill_(2.0**9)


KINDS: tuple[Callable[[Loop], None], ...] = (
    *(
        usual,
        carrying,
        accumulated,
        two_losses,
        uncleared,
        zeroed,
        overflowing,
        dropped,
        by_hand,
        penalized,
    ),
    *(nested, directly, left_out, ascending, clipped, grown, second, raising),
    *(skipped, scale_set, scale_replaced, unused, abandoned, other_root, clipped_scaled),
    *(tensor_rate, scheduled, reported, restored, interrupted, early, not_updated, scale_zero),
)


class Watched:
    """The records of a loop with one step of another kind after every eight usual ones."""

    def __init__(
        self,
        folder: Path,
        kinds: Sequence[Callable[[Loop], None]],
        *,
        plain_after: int,
        is_fused: bool = False,
    ) -> None:
        """Run the loop. plain_after: number of passes that are all examined."""
        self.unexamined = 0  # passes
        repeats = backward_passes.BackwardPasses.repeats

        def count_repeats(passes: backward_passes.BackwardPasses, roots: Any) -> bool:
            is_plain = repeats(passes, roots)
            self.unexamined += is_plain
            return is_plain

        loop = Loop(is_fused=is_fused)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(backward_passes.BackwardPasses, "repeats", count_repeats)
            patch.setattr(backward_passes, "PLAIN_AFTER", plain_after)
            patch.setattr(backward_passes, "PLAIN_AFTER_ON_HOST", plain_after)
            with halfstep.watch(loop.net, folder=folder / str(plain_after)) as watch:
                for kind in kinds:
                    for _ in range(USUAL):
                        usual(loop)
                    kind(loop)
                for _ in range(USUAL):
                    usual(loop)
        assert watch.folder is not None
        written = Written(watch.folder)
        clocks = ["elapsed_ms", "step_us", "data_us"]
        names = [name for name in written.steps.dtype.names if name not in clocks]
        self.rows = [tuple(row) for row in written.steps[names].tolist()]
        events = [
            {key: value for key, value in event.items() if key != "elapsed_ms"}
            for event in written.events
        ]
        self.events = sorted(events, key=str)  # a scale's is written when the ring is read


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # all steps skipped
@settings(max_examples=min(25, settings.default.max_examples), deadline=None)
@given(st.lists(st.sampled_from(KINDS), min_size=1, max_size=4))
def test_rows_and_events_are_those_of_examined_passes(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[Callable[[Loop], None]]
) -> None:
    """Rows and events equal those of examined passes after each unusual iteration."""
    folder = tmp_path_factory.mktemp("runs")
    examined = Watched(folder, kinds, plain_after=NEVER)
    usual = Watched(folder, kinds, plain_after=2)
    assert str(usual.rows) == str(examined.rows)  # NaN equals NaN
    assert str(usual.events) == str(examined.events)
    assert examined.unexamined == 0
    assert usual.unexamined >= USUAL - 3


@pytest.mark.parametrize("after", [overflowing, zeroed])
@pytest.mark.parametrize("kind", [early, not_updated])
def test_a_pass_before_the_update_is_no_later_steps_loss(
    tmp_path: Path, kind: Callable[[Loop], None], after: Callable[[Loop], None]
) -> None:
    """A pass before the update does not supply the loss of the next unusual step."""
    examined = Watched(tmp_path, [kind, after], plain_after=NEVER)
    usual = Watched(tmp_path, [kind, after], plain_after=2)
    assert str(usual.rows) == str(examined.rows)
    assert str(usual.events) == str(examined.events)


@pytest.mark.parametrize("is_fused", [True, *extended([False])])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind.__name__))
def test_each_kind_by_itself(tmp_path: Path, kind: Callable[[Loop], None], is_fused: bool) -> None:
    """Rows and events equal those of examined passes for two iterations of each kind."""
    examined = Watched(tmp_path, [kind, kind], plain_after=NEVER, is_fused=is_fused)
    usual = Watched(tmp_path, [kind, kind], plain_after=2, is_fused=is_fused)
    assert str(usual.rows) == str(examined.rows)
    assert str(usual.events) == str(examined.events)
