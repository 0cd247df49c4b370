"""What a run recorded: series, metrics, diagnosis, environment, system samples."""
