"""Rollouts: what samples completions, and what it returns."""
