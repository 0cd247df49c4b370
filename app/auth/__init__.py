"""Sign-in, permissions, tokens, users, secrets and the audit log."""
