"""A sanitizer for mixed precision: operators run a second time in fp32, on shadow values."""
