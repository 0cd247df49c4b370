"""`import halfstep as wandb`: scripts written for W&B, with their run here.

The names that W&B's documentation has for a training script, with their arguments' meaning. What
cannot be served says so once on stderr; nothing here raises, and nothing ends the script.
"""
