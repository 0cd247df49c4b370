"""What a training script imports and a person types: spool, recipe, client, the command."""

__version__ = "0.1.0"
