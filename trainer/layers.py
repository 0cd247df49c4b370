"""The interval of gradient norms per layer; see halfstep.recording.layers."""

import math

from halfstep.config_groups import Diagnosis

MOST_SAMPLES = 2000  # maximum per run: as many as a screen has columns


def layer_interval(steps: int, diagnosis: Diagnosis) -> int:
    """Return the interval in steps of norms per layer; 0: never."""
    every = diagnosis.layer_norms_every_steps
    return every and max(every, math.ceil(steps / MOST_SAMPLES))
