"""The queue: claims, reservations, quotas, workers and their nodes."""
