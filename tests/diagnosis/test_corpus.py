"""The corpus of training loops: proofs of their causes, and of bit-identical watching."""

from collections import Counter
from dataclasses import dataclass

import pytest

from halfstep.diagnosis.finding import Finding
from tests.diagnosis import remedies, trial, truth
from tests.diagnosis.corpus import LOOPS, chosen, each_loop
from tests.diagnosis.registry import CAUSES, HEALTHY, Loop
from tests.marks import looped

pytestmark = pytest.mark.usefixtures("nothing_compiled")


def test_every_cause_has_three_loops_and_thirty_are_healthy() -> None:
    """The corpus has at least a hundred loops, over all three precisions."""
    counts = Counter(each.cause for each in LOOPS.values())
    assert len(LOOPS) >= 100
    assert counts[HEALTHY] >= 30
    assert {cause: counts[cause] for cause in CAUSES if counts[cause] < 3} == {}
    assert {each.precision for each in LOOPS.values()} == {"fp16", "bf16", "fp32"}


@each_loop(chosen(), most=8)
def test_a_loop_has_the_cause_that_it_is_registered_with(loop: Loop) -> None:
    """Recorded gradients, flags and losses prove each loop's cause, or that nothing is wrong."""
    seen = trial.truths(loop)
    for each, _ in seen:
        assert each.error.startswith(loop.raises) if loop.raises else not each.error
    if loop.is_healthy:
        assert [truth.is_healthy(each) for each, _ in seen] == [[]] * loop.processes
    else:
        assert any(truth.PROOFS[loop.cause](each, in_fp32) for each, in_fp32 in seen)


@each_loop(chosen(), most=8)
def test_watching_changes_no_bit(loop: Loop) -> None:
    """With watching, weights, buffers, optimizer state and exceptions are those without."""
    ended = trial.try_loop(loop.name)
    assert ended.watched.differences(ended.unwatched) == []
    assert ended.unwatched.state or loop.raises


@dataclass(frozen=True)
class Caused(Finding):
    """A finding with a cause and a fix, in the form of db.health.finding."""

    cause: str = ""
    fix: str = ""


@looped(
    "text, words",
    [
        ("Use bf16, or run that module in fp32.", {"bf16", "fp32"}),
        ("bf16 would not help: the gradient is NaN in fp32 too.", set()),
        ("No smaller scale will help; lower the learning rate.", {"lower_rate"}),
        ("Start with a larger init_scale of GradScaler.", {"larger_scale"}),
        ("A larger growth_interval makes it try less often.", {"growth_interval"}),
        (
            "Raise growth_interval of GradScaler to make overflows less frequent.",
            {"growth_interval"},
        ),
        ("The same run in fp32 shows it.", set()),
        ("At a smaller scale the same node is finite.", set()),
        ("Gradients overflow even so: a smaller scale only makes others underflow.", set()),
        ("Use bf16 rather than fp32.", {"bf16"}),
        ("Go back to a checkpoint, or with the module in fp32.", {"fp32"}),
        ("The scale fell from 65,536 to 4 in 14 steps.", set()),
        ("Add an eps inside the root.", {"eps"}),
        ("Call scaler.unscale_(optimizer) ahead of it.", {"unscale"}),
        ("Save scaler.state_dict() and load it on resume.", {"restore"}),
    ],
)
def test_remedies_are_parsed_from_sentences(text: str, words: set[str]) -> None:
    """Remedies that a sentence recommends count; excluded ones do not."""
    assert remedies.list_offered(Finding("Title", text)) == words


@looped(
    "fix, words",
    [
        ("optimizer.zero_grad()", {"zero_grad"}),
        (
            "scaler.scale(loss).backward()\nscaler.unscale_(optimizer)  # new\nclip_grad_norm_(p)",
            {"unscale"},
        ),
        ("optimizer = torch.optim.AdamW(p, lr=1e-3, eps=1e-4)", {"eps", "lower_rate"}),
        ("scaler.load_state_dict(state)", {"restore"}),
    ],
)
def test_remedies_are_parsed_from_code(fix: str, words: set[str]) -> None:
    """Code that changes something is a remedy; lines that only show the place are not."""
    assert remedies.list_offered(Caused("Title", "Text", fix=fix)) == words


def test_contradictory_findings_are_noticed() -> None:
    """Two causes that exclude each other, or remedies that pull both ways, are a contradiction."""
    both = [Caused("A", "", cause=name) for name in ("singular_gradient", "backward_overflow")]
    assert remedies.contradictions(both) == [frozenset({"singular_gradient", "backward_overflow"})]
    ways = [Finding("A", "Use a smaller init_scale."), Finding("B", "Use a larger init_scale.")]
    assert remedies.contradictions(ways) == [frozenset({"smaller_scale", "larger_scale"})]
    assert remedies.contradictions(both[:1] + ways[:1]) == []


def test_exclusive_causes_are_causes() -> None:
    assert {cause for pair in remedies.EXCLUSIVE_CAUSES for cause in pair} <= {*CAUSES}
