"""All loops: importing this module registers the scripts and the recipes.

HALFSTEP_DIAGNOSIS=full has the tests try all of them (`make test-diagnosis`); without, they try one
of each cause and six healthy ones.
"""

import os

import pytest

from tests.diagnosis import loops, recipes
from tests.diagnosis.parts import DEVICE
from tests.diagnosis.registry import LOOPS, Loop, sample

__all__ = ["LOOPS", "chosen", "each_loop", "loops", "recipes"]


#: Loops without their mistake on CUDA, whose autocast computes exp, powers and losses in fp32 and
#: whose fused optimizers compute in fp32.
SOUND_ON_CUDA = (
    *("squared_error_in_half", "exponential_in_half", "eps_in_half-AdamW-fused"),
    *("averaged_statistics", "weights_in_bfloat16"),
)


def chosen() -> list[Loop]:
    """Return the loops that are to be tried."""
    is_full = os.environ.get("HALFSTEP_DIAGNOSIS") == "full"
    loops = list(LOOPS.values()) if is_full else sample()
    if DEVICE == "cuda":
        loops = [each for each in loops if not each.name.startswith(SOUND_ON_CUDA)]
    if os.environ.get("HALFSTEP_DIAGNOSIS_DEVICE", "cpu") != "cpu":  # its cause is unknown there
        loops = [each for each in loops if each.name != "one_batch_with_a_nan"]
    # Several processes train over gloo, on processors.
    return [each for each in loops if DEVICE == "cpu" or each.processes == 1]


def each_loop(loops: list[Loop], most: int = 1000) -> pytest.MarkDecorator:
    """Parametrize a test by loops; all tests of one loop share a process, and so its trial.

    most: how many of them `make test` tries, evenly chosen.
    """
    few = {each.name for each in loops[:: len(loops) // most + 1]}
    marked = [
        pytest.param(
            each,
            id=each.name,
            marks=[
                pytest.mark.xdist_group(each.name),
                *([] if each.name in few else [pytest.mark.extended]),
            ],
        )
        for each in loops
    ]
    return pytest.mark.parametrize("loop", marked)
