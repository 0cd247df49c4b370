"""Export of a server's runs to the formats of other loggers."""
