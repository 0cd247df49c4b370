"""Projects, roles and quotas."""
