"""Training data: the order of examples, loading in workers, and the copy to the device."""
