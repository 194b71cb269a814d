"""Group advantages: what a completion's reward says relative to the other completions of its prompt."""

from torch import Tensor


def group_advantage(
    rewards: Tensor,
    group: int | Tensor,
    *,
    baseline: str = "mean",
    scale: str = "std",
    eps: float = 1e-4,
    unbiased: bool = True,
    combine: str = "sum",
    weights: Tensor | list[float] | None = None,
    backend: str = "auto",
) -> Tensor:
    """Advantage of each completion."""
    raise NotImplementedError("group_advantage")


def pass_at_k_advantage(rewards: Tensor, group: int | Tensor, k: int) -> Tensor:
    """Advantage of each completion under pass@k."""
    raise NotImplementedError("pass_at_k_advantage")
