"""Parts of the API client."""
