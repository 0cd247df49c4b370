"""Named, versioned artifacts: content digests, references, and the local cache."""
