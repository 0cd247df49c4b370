"""Tools of `halfstep mcp`, a Model Context Protocol server for runs."""
