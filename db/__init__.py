"""Database access of server and worker: tables, queries and the only commit."""
