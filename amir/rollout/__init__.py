"""Rollouts: the samplers and the completions that they return."""
