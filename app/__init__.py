"""The server: pages, JSON API, live streams, downloads, sign-in. Neither torch nor trainer."""
