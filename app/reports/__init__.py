"""Reports: pages of Markdown with live panels of runs."""
