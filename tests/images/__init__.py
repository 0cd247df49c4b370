"""The images, built and tried without an engine: `make image-test`."""
