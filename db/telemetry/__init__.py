"""What trainings record: steps, metrics, events, and how they are read back."""
