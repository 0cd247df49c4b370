"""The client's commands, a module per noun; each has an `app`."""
