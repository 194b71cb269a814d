"""`amir doctor`: what this machine can run, and which packages are missing."""

import importlib.metadata
import platform
from collections.abc import Iterator

from .errors import ConfigError

PACKAGES = ("torch", "triton", "transformers", "peft", "flash-attn", "liger-kernel", "bitsandbytes", "trl")
SERVES = {
    "triton": "the Triton kernels on a GPU; it is installed with torch on Linux",
    "flash-attn": "attn_implementation: flash_attention_2, and packed attention on GPUs; pip install 'amir-grpo[gpu]'",
    "liger-kernel": "liger_layers; pip install 'amir-grpo[gpu]'",
    "bitsandbytes": "quantization and optimizer: adamw_8bit; pip install 'amir-grpo[gpu]'",
    "trl": "the comparisons in bench/; pip install 'amir-grpo[bench]'",
}
"""What needs each optional package, and how to install it."""


def findings() -> Iterator[str]:
    """The lines of the report."""
    import torch

    yield f"python {platform.python_version()} on {platform.system()} {platform.machine()}"
    for package in PACKAGES:
        try:
            yield f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            yield f"{package}: not installed; needed for {SERVES.get(package, 'the trainer')}"
    if torch.cuda.is_available():
        capability = ".".join(map(str, torch.cuda.get_device_capability()))
        yield f"GPU: {torch.cuda.get_device_name()} (compute capability {capability}); the Triton kernels are used"
    else:
        yield f"no GPU: the torch backend is used with {torch.get_num_threads()} threads; train small models only"
    yield _packaged_model()


def _packaged_model() -> str:
    from .policy.smollm2 import MODEL_NAME, packaged_gguf

    try:
        return f"model {MODEL_NAME}: {packaged_gguf().name}"
    except ConfigError as error:
        return str(error)
