"""Precision: scale policies, fp8, bf16 weights, precision per module."""
