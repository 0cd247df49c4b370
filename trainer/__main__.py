"""`python -m trainer`: `halfstep recipe train`, by this interpreter."""

import sys

from trainer.commands import recipe

recipe(["train", *sys.argv[1:]])
