"""The command and the client for people at a keyboard."""
