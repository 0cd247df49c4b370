"""Diagnoses of the corpus' loops."""

import inspect

import pytest

from tests.diagnosis import remedies, trial
from tests.diagnosis.corpus import LOOPS, chosen, each_loop
from tests.diagnosis.registry import HEALTHY, Loop
from trainer.diagnosis import check

pytestmark = pytest.mark.usefixtures("nothing_compiled")
#: Causes that five steps cannot show, or that are not in a recipe's training step.
NOT_FOR_CHECK = ("backward_overflow", "metric_nonfinite", "nonfinite_without_scaler", "no_gradient")


@each_loop(chosen())
def test_the_true_cause_is_named_first(loop: Loop) -> None:
    """A loop's first finding names its cause, and a healthy loop has no finding."""
    ended = trial.try_loop(loop.name)
    titles = [each.title for each in ended.findings]
    if loop.is_healthy:
        assert ended.causes == [], titles
    else:
        assert {loop.cause, *loop.accepts} & {*ended.causes[:1]}, titles


#: Causes whose evidence depends on values that only the device has.
OF_VALUES = (
    *("nonfinite_inputs", "singular_gradient", "forward_overflow", "backward_overflow"),
    *("undefined_forward", "loss_not_scaled"),
)
#: Loops with a single non-finite loss, long after the steps whose inputs are examined on a GPU.
UNEXAMINED = ("one_batch_with_a_nan",)


@each_loop(
    [
        each
        for each in chosen()
        if each.processes == 1 and not each.recipe and each.cause in (*OF_VALUES, HEALTHY)
    ],
    most=6,
)
def test_a_loop_on_a_gpu_is_diagnosed_alike(loop: Loop) -> None:
    """On a GPU, where the host learns of values later, each loop's cause is named, and no other."""
    ended = trial.attempt(loop, is_unreadable=True)
    titles = [each.title for each in ended.findings]
    assert ended.is_same
    if loop.name in UNEXAMINED:
        assert titles == ["The loss of a skipped step was not finite"]
        assert ended.causes == []  # unknown
    elif loop.is_healthy:
        assert ended.causes == [], titles
    else:
        assert {loop.cause, *loop.accepts} & {*ended.causes[:1]}, titles
    harm = {each.title: remedies.list_offered(each) & loop.harmful for each in ended.findings}
    assert {title: sorted(words) for title, words in harm.items() if words} == {}


def test_a_gpus_loss_that_nobody_examined_has_an_unknown_cause() -> None:
    """A GPU's non-finite loss that was not examined has an unknown cause: batch or forward pass."""
    ended = trial.attempt(LOOPS["one_batch_with_a_nan"], is_unreadable=True)
    assert ended.causes == []
    [finding] = ended.findings
    assert finding.title == "The loss of a skipped step was not finite"
    assert "is unknown" in finding.text
    assert not finding.is_certain


@each_loop(chosen())
def test_no_remedy_would_harm(loop: Loop) -> None:
    """No finding offers a harmful remedy, and no two contradict each other."""
    ended = trial.try_loop(loop.name)
    harm = {each.title: remedies.list_offered(each) & loop.harmful for each in ended.findings}
    assert {title: sorted(words) for title, words in harm.items() if words} == {}
    assert remedies.contradictions(ended.findings) == []


@each_loop([each for each in chosen() if not each.is_healthy])
def test_nothing_learned_is_not_healthy(loop: Loop) -> None:
    """A loop whose gradients are all 0, or whose weights never move, is not called healthy."""
    ended = trial.try_loop(loop.name)
    if ended.health and (loop.cause == "zero_gradients" or not ended.unwatched.moved):
        assert ended.health.word != "healthy", ended.health.reason


@each_loop([each for each in chosen() if each.recipe and each.cause not in NOT_FOR_CHECK])
def test_recipe_check_passes_only_valid_recipes(loop: Loop) -> None:
    """`halfstep recipe check` finds a mistake in each recipe that has one, and in no other."""
    assert loop.recipe is not None
    reference = f"{inspect.getfile(loop.recipe)}:{loop.recipe.__name__}"
    _, report = check.check_and_print(reference)
    result = [each.text for each in report.findings]
    assert bool(result) is not loop.is_healthy, result
