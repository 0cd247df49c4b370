"""Diagnosis: findings, causes, the verdict on loss scaling, monitoring metrics."""
