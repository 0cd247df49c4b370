"""Files: downloads, uploads and the ingest of watched runs."""
