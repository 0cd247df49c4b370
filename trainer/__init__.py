"""The training loop and what measures it, the recipes, and the worker that runs them."""
