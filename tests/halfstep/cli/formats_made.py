"""Shared helpers of the tests of formats."""

RUN = {
    "id": 7,
    "name": "baseline",
    "status": "running",
    "attempt": 2,
    "step": 352_889,
    "steps_total": 3_000_000,
    "loss": 0.01812,
    "scale": 524288.0,
    "is_scaled": True,
    "own_steps": 12000,
    "skipped": 1234,
    "health": {"word": "healthy", "reason": "No step was skipped."},
    "seconds_left": 20160.0,
    "error": None,
}
