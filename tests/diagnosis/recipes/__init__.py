"""The corpus' recipes: causes for `halfstep recipe train` and `recipe check`."""

from tests.diagnosis.recipes import cases

__all__ = ["cases"]
