"""A watched run in its process: arguments, logging, exit, notebooks."""
