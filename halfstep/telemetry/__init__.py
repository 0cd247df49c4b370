"""The spool, the run folder, and their upload to a server."""
