"""The server: pages, JSON API, live streams, sign-in. It has no torch."""
