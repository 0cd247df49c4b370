"""Labels of runs side by side."""

from app.compare.run_labels import choose_settings, label
from tests.marks import looped


@looped(
    "names, labels",
    [
        (["my first run fp16 seed 0", "my first run bf16 seed 0"], ["fp16 seed 0", "bf16 seed 0"]),
        (["train-20261129-194353", "train-20261129-194346"], None),
        (["a-long-experiment-1", "a-long-experiment-2"], ["experiment-1", "experiment-2"]),
        (["short-a", "short-b"], None),
        (["the long run of today", "the long run of today again"], None),
    ],
)
def test_a_name_lacks_what_all_names_begin_with(names: list[str], labels: list[str] | None) -> None:
    """A run's label drops what all names begin with: whole words of long names, and never so much
    that just a number is left.
    """
    assert list(label([1, 2], names, []).values()) == (labels or names)


def test_a_value_that_is_no_word_has_the_name_of_its_setting() -> None:
    """A switch in a label is named, with "no" if it is off; equal runs show their number."""
    settings = [
        ("precision", ["fp32", "fp16", "fp16", "fp16"]),
        ("scaler.enabled", [False, False, True, True]),
        ("training.seed", [1, 1, 1, 1]),
    ]
    chosen = choose_settings(settings, ["a", "a", "a", "a"])
    assert list(label([5, 6, 7, 8], ["a"] * 4, chosen).values()) == [
        *("fp32 · no scaler", "fp16 · no scaler", "fp16 · scaler · 7", "fp16 · scaler · 8"),
    ]
    rates = [("recipe.learning_rate", [0.1, 0.01])]
    assert label([20, 21], ["many-1", "many-2"], rates) == {20: "lr 0.1", 21: "lr 0.01"}
