"""Named, versioned artifacts: routes, pages, uploads and the graph of their lineage."""
