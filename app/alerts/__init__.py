"""Alerts: rules, channels and their delivery."""
