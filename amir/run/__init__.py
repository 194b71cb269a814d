"""A run: its folder, its metrics, its display."""
