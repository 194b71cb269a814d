"""What this machine can run, and what is missing."""

import importlib.metadata
import platform
from collections.abc import Iterator

from .errors import ConfigError

PACKAGES = ("torch", "triton", "transformers", "peft", "flash-attn", "liger-kernel", "bitsandbytes", "trl")
SERVES = {
    "triton": "the kernels on a GPU",
    "flash-attn": "attn_implementation: flash_attention_2, and packed attention on GPUs; pip install 'amir-grpo[gpu]'",
    "liger-kernel": "liger_layers; pip install 'amir-grpo[gpu]'",
    "bitsandbytes": "quantization and optimizer: adamw_8bit; pip install 'amir-grpo[gpu]'",
    "trl": "the benchmarks beside it; pip install 'amir-grpo[bench]'",
}
"""What a package that may be missing would be for."""


def findings() -> Iterator[str]:
    """One line a finding."""
    import torch

    yield f"python {platform.python_version()} on {platform.system()} {platform.machine()}"
    for package in PACKAGES:
        try:
            yield f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            yield f"{package}: not installed (for {SERVES.get(package, 'the trainer')})"
    if torch.cuda.is_available():
        capability = ".".join(map(str, torch.cuda.get_device_capability()))
        yield f"GPU: {torch.cuda.get_device_name()} (compute capability {capability}); Triton kernels serve it"
    else:
        yield f"no GPU: the torch backend serves, on {torch.get_num_threads()} threads; train small models only"
    yield _packaged_model()


def _packaged_model() -> str:
    from .policy.smollm2 import MODEL_NAME, packaged_gguf

    try:
        return f"model {MODEL_NAME}: {packaged_gguf().name}"
    except ConfigError as error:
        return str(error)
