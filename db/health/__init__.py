"""Diagnosis: findings, causes, loss-scale health, monitoring metrics."""
