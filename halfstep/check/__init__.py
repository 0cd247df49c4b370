"""`halfstep check`: what half precision loses in the first steps of a script."""
