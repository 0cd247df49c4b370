"""Recipes that come with Halfstep; yours register through the same entry point."""
