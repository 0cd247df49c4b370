"""Live streams: server-sent events and the updates that they carry."""
