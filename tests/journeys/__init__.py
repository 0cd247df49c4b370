"""Complete jobs of operators, by the documented commands on a running installation."""
