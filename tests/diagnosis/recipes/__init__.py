"""The corpus' recipes: causes as `halfstep recipe train` and `recipe check` meet them."""

from tests.diagnosis.recipes import cases

__all__ = ["cases"]
