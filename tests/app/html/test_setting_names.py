"""Names of settings in table headings."""

from app.html.formats import setting_name
from tests.marks import looped


@looped(
    "path, name",
    [
        ("training.learning_rate", "learning_rate"),
        ("scaler.enabled", "scaler.enabled"),
        ("a.checkpoints.every", "checkpoints.every"),
        ("precision", "precision"),
        ("name", "name"),
    ],
)
def test_a_part_that_says_nothing_comes_with_its_group(path: str, name: str) -> None:
    """The last part of a setting's path is its heading, unless that is ambiguous, like
    "enabled".
    """
    assert setting_name(path) == name
