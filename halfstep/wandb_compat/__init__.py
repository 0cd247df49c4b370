"""`import halfstep as wandb`: runs scripts written for W&B, recorded by Halfstep.

Provides the names that W&B's documentation gives for training scripts, with the same arguments.
Unsupported features are reported once on stderr; nothing here raises an exception.
"""
