"""All loops: importing this module registers the scripts and the recipes."""

from tests.diagnosis import loops, recipes
from tests.diagnosis.registry import LOOPS, sample

__all__ = ["LOOPS", "loops", "recipes", "sample"]
