"""HTTP plumbing: middleware, errors, parameters, static files, health and metrics."""
