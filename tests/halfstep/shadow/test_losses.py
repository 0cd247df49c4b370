"""History of losses in fp32."""

import pytest

from halfstep.shadow.losses import LossHistory


@pytest.mark.parametrize(
    ("last", "growth"),
    [
        ([300.0, 200.0, 400.0], 200.0),
        ([20.0, 500.0, 4e23], 500.0),  # each larger than the one before
        ([20.0, 4e23, 500.0], None),  # samples that are far from the others
        ([20.0, 30.0, 4e23], None),
    ],
)
def test_a_loss_that_has_grown_tells_that_the_training_diverges(
    last: list[float], growth: float | None
) -> None:
    """A training diverges if all last losses have grown a hundredfold, or two that rise in a
    row.
    """
    history = LossHistory()
    for loss in [1.0] * 5 + last:
        history.add(loss)
    assert history.growth() == growth
