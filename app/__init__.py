"""The server: pages, JSON API, live streams, downloads, sign-in. No torch, no trainer."""
