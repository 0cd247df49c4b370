"""Process next to a watched training: keeps its output, and samples its machine."""
