"""Alert rules, their evaluation, and deliveries."""
