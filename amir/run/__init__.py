"""A run: the checks before it, its directory, metrics, display and warnings, its signals and processes."""
