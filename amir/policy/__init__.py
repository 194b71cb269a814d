"""The policy: loading, log-probs, memory savings, checkpoints."""
