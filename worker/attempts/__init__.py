"""An attempt of a run: supervisor, recorder, log, files."""
