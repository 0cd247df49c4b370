"""The training process: the loop, the recipes, and what looks into a training. No database."""
