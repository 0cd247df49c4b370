"""Diagnosis: replay of overflows, gradient histograms, headroom, recipe checks."""
