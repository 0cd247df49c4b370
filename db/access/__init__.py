"""Users, permissions, projects, secrets, shared links and the audit log."""
