"""AMIR-GRPO: a lean trainer for GRPO-family objectives with a within-group preference term, on fused kernels."""
