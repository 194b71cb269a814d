"""AMIR-GRPO: a lean trainer for GRPO-family objectives with a within-group preference term, on fused kernels.

The command is `amir`; from Python, `load_config` gives a checked run without importing torch, which
`amir.trainer.Trainer` runs.
"""

from .config import ConfigError, RunConfig, load_config

__all__ = ["ConfigError", "RunConfig", "load_config"]
