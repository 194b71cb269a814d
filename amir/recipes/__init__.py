"""Shipped runs, as YAML files."""
