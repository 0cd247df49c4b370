"""The training process: loop, recipes and diagnosis. Without a database."""
