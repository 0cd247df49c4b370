"""The daemons of a machine that trains: worker, supervisor, recorder. The database, no torch."""
