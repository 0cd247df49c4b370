"""The server: pages, JSON API, live streams, downloads, sign-in. Imports no torch."""
