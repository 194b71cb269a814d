"""The update: from a rollout through `batch`, `pairs`, `micro_batches` and `gradient` to an `optimizer` step."""
