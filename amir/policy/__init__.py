"""The policy: loading it, its log-probs, what saves memory, its checkpoints."""
