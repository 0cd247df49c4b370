"""HTTP: middleware, errors, parameters, static files, health checks and metrics."""
