"""Where server and worker meet: tables, queries and the only commit."""
