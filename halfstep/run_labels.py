"""Labels for states of runs and of their loss scale, by the words of the API."""

#: Statuses, and outcomes of ended runs.
STATES = {
    "queued": "Queued",
    "starting": "Starting",
    "running": "Running",
    "pausing": "Pausing",
    "paused": "Paused",
    "stopping": "Stopping",
    "unreachable": "No contact",
    "finished": "Finished",
    "failed": "Failed",
    "cancelled": "Cancelled",
    "no_updates": "No updates",
    "diverged": "Diverged",
    "stopped": "Stopped by rule",
    "pruned": "Pruned",
}
#: Health of the loss scale.
HEALTHS = {
    "calibrating": "Calibrating",
    "healthy": "Healthy",
    "oscillating": "Frequent skips",
    "collapsing": "Collapsing",
    "dead": "No updates",
}
#: What a failure is due to, by its kind.
FAILURE_KINDS = {
    "infrastructure": "the machine, not your code",
    "code": "an error in the code",
    "settings": "it could not be started",
    "rule": "a rule of its configuration",
}
#: States by the words of a filter: a label as one word names its state, too.
STATE_WORDS = {label.lower().replace(" ", "_"): state for state, label in STATES.items()}
