"""Inputs of a drop-in and of the peer it stands in for, and how far their results are apart."""

import torch

B, L, H, V = 4, 7, 16, 37


def head(dtype=torch.float32):
    """Peaked logits and tokens drawn from them."""
    hidden, weight = torch.randn(B, L, H, dtype=dtype), torch.randn(V, H, dtype=dtype)
    target = torch.distributions.Categorical(logits=(hidden @ weight.T).float()).sample()
    return hidden.requires_grad_(), weight.requires_grad_(), target


def error(ours, theirs):
    """Largest difference, each tensor's against its own size; shapes and dtypes must agree."""
    for a, b in zip(ours, theirs, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
    return max(((a - b).abs().max() / (1e-3 + b.abs().max())).item() for a, b in zip(ours, theirs, strict=True))
