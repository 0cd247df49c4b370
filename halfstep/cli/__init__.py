"""The halfstep command."""
