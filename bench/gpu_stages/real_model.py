"""A policy of real shapes with random weights, and batches for it: no model hub and no tokenizer files are needed."""

from dataclasses import replace

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from amir.config import RunConfig
from amir.policy.load import wrap_policy
from amir.policy.memory import keep_differentiable
from amir.policy.policy import Policy
from amir.tokens import Tokens
from amir.update.batch import Batch, assemble
from bench_memory import Setting, model_config, run_config

from .sizes import Sizes

PAD, EOS = 0, 1


def setting_of(sizes: Sizes, quantization: str | None = None) -> Setting:
    """The step that is measured, as `bench_memory` counts it: one group, LoRA, packed, checkpointed."""
    step = sizes.step
    tokens = step.prompt + step.rows * step.completion
    return Setting(
        step.model,
        quantization=quantization,
        checkpointing=True,
        prompt=step.prompt,
        completion=step.completion,
        rows=step.rows,
        micro_batch_tokens=tokens,
    )


def dtype_of(sizes: Sizes) -> str:
    """Of weights and activations."""
    return str(sizes.dtype).removeprefix("torch.")


def make_model(setting: Setting, sizes: Sizes) -> Qwen2ForCausalLM:
    """The model with random weights on the device."""
    torch.manual_seed(0)
    with torch.device(sizes.device):
        base = Qwen2ForCausalLM(model_config(setting))
    return nn.Module.to(base, sizes.dtype)


def make_policy(setting: Setting, sizes: Sizes) -> Policy:
    """The model with a LoRA adapter that has moved from its start."""
    base = make_model(setting, sizes)
    if setting.quantization == "4bit":
        quantize(base.model, sizes)
    config = config_of(setting, sizes)
    policy = wrap_policy(base, small_tokenizer(base.config.vocab_size), config)
    if setting.quantization is not None:
        keep_differentiable(base)
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return policy


def config_of(setting: Setting, sizes: Sizes) -> RunConfig:
    """The run's configuration, in the dtype and on the device of these sizes."""
    return run_config(setting).model_copy(update={"dtype": dtype_of(sizes), "device": sizes.device})


def quantize(body: nn.Module, sizes: Sizes) -> None:
    """Replaces the linear layers of the body by bitsandbytes' 4-bit layers that hold the same weights."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    for name, layer in list(body.named_modules()):
        if type(layer) is not nn.Linear:
            continue
        out, width = layer.weight.shape
        quantized = Linear4bit(width, out, layer.bias is not None, sizes.dtype, quant_type="nf4")
        quantized.weight = Params4bit(layer.weight.data.cpu(), requires_grad=False, quant_type="nf4", module=quantized)
        quantized.bias = layer.bias
        parent, _, leaf = name.rpartition(".")
        setattr(body.get_submodule(parent), leaf, quantized.to(sizes.device))


def small_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """A token for each id; text is not needed."""
    words = {"<pad>": PAD, "<eos>": EOS} | {f"w{number}": number for number in range(2, vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", padding_side="left"
    )


def body_weights(model: nn.Module) -> int:
    """Weights of the linear layers, each of which takes two operations for a token; the head's are not among them."""
    layers = [layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and "lm_head" not in name]
    return sum(layer.in_features * layer.out_features for layer in layers)


def make_batch(setting: Setting, sizes: Sizes, vocabulary: int) -> Batch:
    """One group of random completions of full length, half of them right."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randint(2, vocabulary, shape, generator=generator)

    shape = (setting.rows, setting.completion)
    tokens = Tokens(
        draw(1, setting.prompt),
        torch.ones(1, setting.prompt, dtype=torch.bool),
        torch.zeros(setting.rows, dtype=torch.int64),
        draw(*shape),
        torch.ones(shape, dtype=torch.bool),
    )
    tokens = Tokens(*(part.to(sizes.device) for part in vars(tokens).values()))
    scores = torch.arange(setting.rows, device=sizes.device).remainder(2).float()[:, None]
    truncated = torch.zeros(setting.rows, dtype=torch.bool, device=sizes.device)
    return assemble(tokens, scores, truncated, config_of(setting, sizes))


def short(setting: Setting) -> Setting:
    """The same with few tokens, for comparisons with full logits."""
    return replace(setting, prompt=min(setting.prompt, 64), completion=min(setting.completion, 64))
