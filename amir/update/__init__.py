"""The update: from a rollout to an optimizer step."""
