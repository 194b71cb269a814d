"""A run: its directory, its metrics, its display."""
