"""Import of other loggers' runs into run folders of the format that `halfstep.watch` writes."""
