"""Backward passes that are not examined: what is recorded is the same as if all were."""

from collections.abc import Callable, Sequence
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
from halfstep.monitor import backward_passes
from tests.halfstep.monitor.watch_made import Written

pytestmark = pytest.mark.slow

USUAL = 8  # steps of the usual kind before, between and after the others
NEVER = 10**9


class Loop:
    """A loop whose iterations the test chooses."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=7)
        self.generator = torch.Generator().manual_seed(1)

    def loss(self) -> Tensor:
        """Return the loss of the next batch."""
        inputs = torch.randn(5, 3, generator=self.generator)
        result: Tensor = (self.net(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        return result

    def apply(self) -> None:
        """Step and update."""
        self.scaler.step(self.optimizer)
        self.scaler.update()


def usual(loop: Loop) -> None:
    """One scaled loss over gradients that were cleared to None."""
    loop.optimizer.zero_grad()
    loop.scaler.scale(loop.loss()).backward()
    loop.apply()


def accumulated(loop: Loop) -> None:
    """Two passes."""
    loop.optimizer.zero_grad()
    for _ in range(2):
        loop.scaler.scale(loop.loss() / 2).backward()
    loop.apply()


def two_losses(loop: Loop) -> None:
    """One pass from two scaled losses."""
    loop.optimizer.zero_grad()
    torch.autograd.backward(loop.scaler.scale([loop.loss(), loop.loss()]))
    loop.apply()


def uncleared(loop: Loop) -> None:
    """Gradients of the step before remain."""
    loop.scaler.scale(loop.loss()).backward()
    loop.apply()


def zeroed(loop: Loop) -> None:
    """Gradients are cleared in place."""
    loop.optimizer.zero_grad(set_to_none=False)
    loop.scaler.scale(loop.loss()).backward()
    loop.apply()


def overflowing(loop: Loop) -> None:
    """The loss is inf, and the step skipped."""
    loop.optimizer.zero_grad()
    loop.scaler.scale(loop.loss() * torch.inf).backward()
    loop.apply()


def dropped(loop: Loop) -> None:
    """A first batch is given up after its pass."""
    loop.optimizer.zero_grad()
    loop.scaler.scale(loop.loss()).backward()
    usual(loop)


def by_hand(loop: Loop) -> None:
    """The loss is scaled by the loop."""
    loop.optimizer.zero_grad()
    (loop.loss() * loop.scaler.get_scale()).backward()
    loop.apply()


def penalized(loop: Loop) -> None:
    """A gradient penalty by autograd.grad."""
    loop.optimizer.zero_grad()
    loss = loop.loss()
    gradients = torch.autograd.grad(loss, list(loop.net.parameters()), create_graph=True)
    loop.scaler.scale(loss + sum(each.square().sum() for each in gradients)).backward()
    loop.apply()


def nested(loop: Loop) -> None:
    """A pass within the pass, from one number, by a reentrant checkpoint."""
    loop.optimizer.zero_grad()
    inputs = torch.randn(1, 3, generator=loop.generator, requires_grad=True)
    output = checkpoint(loop.net, inputs, use_reentrant=True)
    loop.scaler.scale(output.square().mean()).backward()
    loop.apply()


def directly(loop: Loop) -> None:
    """The optimizer steps with scaled gradients, without its scaler."""
    loop.optimizer.zero_grad()
    loop.scaler.scale(loop.loss() / 1e4).backward()
    loop.optimizer.step()


def left_out(loop: Loop) -> None:
    """The loop updates the scaler without a step."""
    loop.optimizer.zero_grad()
    loop.scaler.scale(loop.loss()).backward()
    loop.scaler.unscale_(loop.optimizer)
    loop.scaler.update()


def ascending(loop: Loop) -> None:
    """The loop moves the weights by hand, and updates the scaler twice, as SAM does."""
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
    """Gradients are not cleared for as many steps as it takes to report it."""
    for _ in range(10):
        uncleared(loop)


def clipped(loop: Loop) -> None:
    """Gradients are clipped once they are unscaled."""
    loop.optimizer.zero_grad()
    loop.scaler.scale(loop.loss()).backward()
    loop.scaler.unscale_(loop.optimizer)
    torch.nn.utils.clip_grad_norm_(loop.net.parameters(), 0.1)
    loop.apply()


def grown(loop: Loop) -> None:
    """A parameter group is added."""
    loop.optimizer.zero_grad()
    loop.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    usual(loop)


def second(loop: Loop) -> None:
    """Another optimizer steps too, with a loss of its own."""
    head = torch.optim.SGD(loop.net[2].parameters(), lr=0.01)
    loop.optimizer.zero_grad()
    loop.scaler.scale(loop.loss()).backward()
    loop.scaler.step(loop.optimizer)
    head.zero_grad()
    loop.scaler.scale(loop.loss()).backward()
    loop.scaler.step(head)
    loop.scaler.update()


def raising(loop: Loop) -> None:
    """The pass raises."""
    loop.optimizer.zero_grad()
    loss = loop.loss()
    handle = loss.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loop.scaler.scale(loss).backward()
    handle.remove()


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
)


class Watched:
    """What is recorded of a loop of usual steps, with one of these kinds after every eight."""

    def __init__(
        self, folder: Path, kinds: Sequence[Callable[[Loop], None]], *, plain_after: int
    ) -> None:
        """plain_after: passes that are all examined."""
        self.unexamined = 0  # passes
        original = backward_passes.BackwardPasses.repeats

        def repeats(passes: backward_passes.BackwardPasses, roots: Any) -> bool:
            is_plain = original(passes, roots)
            self.unexamined += is_plain
            return is_plain

        loop = Loop()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(backward_passes.BackwardPasses, "repeats", repeats)
            patch.setattr(backward_passes, "PLAIN_AFTER", plain_after)
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
        self.events = [
            {key: value for key, value in event.items() if key != "elapsed_ms"}
            for event in written.events
        ]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(KINDS), min_size=1, max_size=4))
def test_rows_and_events_are_those_of_examined_passes(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[Callable[[Loop], None]]
) -> None:
    """After each kind of iteration that is not the usual one."""
    folder = tmp_path_factory.mktemp("runs")
    examined = Watched(folder, kinds, plain_after=NEVER)
    usual = Watched(folder, kinds, plain_after=2)
    assert str(usual.rows) == str(examined.rows)  # NaN equals NaN
    assert str(usual.events) == str(examined.events)
    assert examined.unexamined == 0
    assert usual.unexamined >= USUAL - 3


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind.__name__))
def test_each_kind_alone(tmp_path: Path, kind: Callable[[Loop], None]) -> None:
    """As above, each kind twice."""
    examined = Watched(tmp_path, [kind, kind], plain_after=NEVER)
    usual = Watched(tmp_path, [kind, kind], plain_after=2)
    assert str(usual.rows) == str(examined.rows)
    assert str(usual.events) == str(examined.events)
