"""SQL over the recorded data of runs, in the client."""
