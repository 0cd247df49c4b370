"""The `halfstep` command, for people at a keyboard."""
