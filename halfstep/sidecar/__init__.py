"""Process beside a watched training: keeps its output, and samples its machine."""
