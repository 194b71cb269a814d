"""Peak memory of a real-size training step, counted without a GPU: the trainer's own step on the meta device.

A mode under the dispatcher counts the bytes of every storage that is alive, in blocks of 512 as CUDA's allocator hands
them out. Beside that count: the scratch that the head op reports for itself (`workspace_of`), and FlashAttention as it
runs on a GPU, O(T) statistics and the backward's float32 buffers included. Not counted: the CUDA context (about half a
GB), what the allocator loses to fragmentation, scratch of cuBLAS. Sampling is not part of the step; the size of its
key-value cache is printed.

T tokens of a micro-batch; D head size.
"""

import argparse
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from amir.config import RunConfig
from amir.policy import load, memory, packed_attention, packing
from amir.policy import policy as policy_module
from amir.policy.policy import Policy
from amir.tokens import Tokens
from amir.update.batch import Batch, assemble
from amir.update.gradient import backward, make_objective, reference_logprobs
from amir.update.micro_batches import TokenBudget
from amir.update.optimizer import make_optimizer, update
from amir_kernels import LogprobEntropy, workspace_of
from machine import row_origin
from rows import keep

META = torch.device("meta")
BLOCK = 512
MODELS: dict[str, dict[str, Any]] = {
    "Qwen2.5-7B": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28},
    "Qwen2.5-3B": {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16},
    "Qwen2.5-1.5B": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
    },
    "Qwen2.5-0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "tiny": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
}
"""Of the configurations; "tiny" is for rehearsals."""
KEY_HEADS = {"Qwen2.5-7B": 4}
UNTIED = {"Qwen2.5-7B": 152_064, "tiny": 307}
VOCABULARY = 151_936


@dataclass(frozen=True)
class Setting:
    """A step to count: `prompt` and `completion` tokens, `rows` completions of one prompt in `parts` micro-batches."""

    model: str = "Qwen2.5-7B"
    head: str = "amir"
    quantization: str | None = None
    checkpointing: bool = False
    offload: bool = False
    full: bool = False
    prompt: int = 512
    completion: int = 2048
    rows: int = 8
    micro_batch_tokens: int = 32_768

    @property
    def workload(self) -> dict[str, Any]:
        """The workload of a row."""
        return {
            "model": self.model,
            "weights": {None: "bfloat16", "4bit": "4-bit NF4"}[self.quantization],
            "lora_r": None if self.full else 16,
            "completions": self.rows,
            "completion_tokens": self.completion,
            "prompt_tokens": self.prompt,
            "micro_batch_tokens": min(self.micro_batch_tokens, self.prompt + self.rows * (self.completion - 1)),
            "checkpointed": self.checkpointing,
            "offloaded": self.offload,
        }

    @property
    def case(self) -> str:
        """In words."""
        work = self.workload
        trained = "every weight" if self.full else "LoRA r 16"
        saved = ", layers checkpointed" if self.checkpointing else ""
        saved += " and offloaded" if self.offload else ""
        return (
            f"{self.model} {work['weights']}, {trained}, {self.rows} completions of {self.completion:,} tokens, prompt "
            f"of {self.prompt:,}, micro-batches of up to {work['micro_batch_tokens']:,} tokens{saved}"
        )


@dataclass(frozen=True)
class Memory:
    """Bytes: those allocated between steps, and the peak within a step."""

    weights: int
    trained: int
    peak: int


# ---- counting ------------------------------------------------------------------------------------------------------


class Live(TorchDispatchMode):
    """Counts the bytes of the meta device's storages that are alive, and the peak, scratch of the head op included."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def hold(self, tensor: Tensor) -> None:
        """Counts a tensor's storage until it is freed; ignores host tensors and storages that are already counted."""
        storage = tensor.untyped_storage()
        if tensor.device != META or storage._cdata in self._known:
            return
        size = math.ceil(storage.nbytes() / BLOCK) * BLOCK
        self._known.add(storage._cdata)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, storage._cdata, size)

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.hold(tensor)
        name = func.name()
        if name.startswith("amir_kernels::linear_logprob"):
            hidden, weight = args[7:9] if "backward" in name else args[:2]
            self.peak = max(self.peak, self.now + workspace_of(hidden, weight))
        return out


# ---- the step on the meta device -----------------------------------------------------------------------------------


class Flash(torch.autograd.Function):
    """FlashAttention's allocations without its computation: q `[T, heads, D]`, k and v `[keys, key heads, D]`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Output, and log-sum-exps kept for the backward."""
        out, lse = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients, beside a float32 sum of dq and dk, dv of every query head."""
        q, k, v, _, lse = ctx.saved_tensors
        scratch = [torch.empty_like(q, dtype=torch.float32), torch.empty_like(lse)]
        scratch += [x.new_empty(x.shape[0], q.shape[1], x.shape[2]) for x in (k, v) if x.shape[1] != q.shape[1]]
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class ToHost(torch.autograd.Function):
    """Log-probs leave the counted device here, as zeros `[B, C]` on the host."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, mask: Tensor) -> Tensor:
        """`[K]` to `[B, C]`."""
        ctx.like = values.shape, values.dtype
        return torch.zeros(mask.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Back."""
        shape, dtype = ctx.like
        return torch.empty(shape, dtype=dtype, device=META), None


class OnMeta(Policy):
    """The trainer's policy with tokens on the host and tensors without data."""

    full_logits: torch.dtype | None = None

    def _hidden_and_target(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        hidden, target = super()._hidden_and_target(tokens)
        return hidden, target.to(META)

    def _logprobs(self, tokens: Tokens) -> Tensor:
        if self.full_logits is None:
            return super()._logprobs(tokens)
        hidden, target = self._hidden_and_target(tokens)
        logits = F.linear(hidden, self.support.weight).to(self.full_logits) / self.temperature
        logprob = logits.log_softmax(-1).gather(1, target[:, None])[:, 0]
        return ToHost.apply(logprob.float(), tokens.completion_mask)

    def _logprobs_entropy(self, tokens: Tokens) -> LogprobEntropy:
        """With full logits the entropy is not computed: it would cost that contender more memory."""
        if self.full_logits is None:
            return super()._logprobs_entropy(tokens)
        logprob = self._logprobs(tokens)
        return LogprobEntropy(logprob, torch.zeros_like(logprob), torch.zeros_like(logprob))


@contextmanager
def on_meta() -> Iterator[None]:
    """Replaces the transfers between host and device, and the attention by the one that a GPU would run."""
    pack = packing.pack

    def packed(tokens: Tokens) -> Any:
        row = pack(tokens)
        return replace(row, **{name: getattr(row, name).to(META) for name in ("ids", "positions", "predicts")})

    def flash(query: Tensor, how: Any) -> Callable[..., Tensor]:
        return lambda q, k, v, *_: Flash.apply(q, k, v)

    with (
        patch.object(packing, "pack", packed),
        patch.object(memory, "_to_cpu", lambda tensor: (tensor.shape, tensor.dtype)),
        patch.object(memory, "_from_cpu", lambda saved: torch.empty(saved[0], dtype=saved[1], device=META)),
        patch.object(packed_attention, "varlen_kernel", flash),
        patch.object(policy_module, "_padded", lambda values, tokens: ToHost.apply(values, tokens.completion_mask)),
    ):
        yield


def model_config(setting: Setting) -> Qwen2Config:
    """The model's sizes."""
    sizes = MODELS[setting.model] | {
        "num_key_value_heads": KEY_HEADS.get(setting.model, 2),
        "vocab_size": UNTIED.get(setting.model, VOCABULARY),
        "tie_word_embeddings": setting.model not in UNTIED,
        "max_position_embeddings": 32_768,
        "eos_token_id": 0,
    }
    return Qwen2Config(**sizes, dtype="bfloat16")


def make_policy(setting: Setting, config: RunConfig) -> OnMeta:
    """A model of these sizes without data, with its adapter."""
    with META:
        base = nn.Module.to(Qwen2ForCausalLM(model_config(setting)), torch.bfloat16)
    if setting.quantization == "4bit":
        quantize(base.model)
    tokenizer = type("Tokenizer", (), {"pad_token_id": 0, "eos_token_id": 0})()
    with patch.object(load, "refuse_dependent_rows", lambda *_: None):  # it compares values
        policy: Any = load.wrap_policy(base, tokenizer, config)
    policy.__class__ = OnMeta
    policy.__dict__["why_unpacked"] = None
    policy.full_logits = {"full logits, float32": torch.float32, "full logits, bfloat16": torch.bfloat16}.get(
        setting.head
    )
    return policy


def quantize(body: nn.Module) -> None:
    """Replaces the linear layers of the body by bitsandbytes' 4-bit layers with double quantization."""
    import bitsandbytes as bnb
    from bitsandbytes.functional import QuantState

    for name, layer in list(body.named_modules()):
        if type(layer) is not nn.Linear:
            continue
        out, width = layer.weight.shape
        quantized = bnb.nn.Linear4bit(width, out, layer.bias is not None, torch.bfloat16, quant_type="nf4", device=META)
        state = QuantState(
            absmax=torch.empty(out * width // 64, dtype=torch.uint8, device=META),
            shape=layer.weight.shape,
            code=torch.empty(16, device=META),
            blocksize=64,
            quant_type="nf4",
            dtype=torch.bfloat16,
            offset=torch.empty((), device=META),
            state2=QuantState(
                absmax=torch.empty(math.ceil(out * width / 64 / 256), device=META),
                code=torch.empty(256, device=META),
                blocksize=256,
                dtype=torch.float32,
            ),
        )
        packed = torch.empty(out * width // 2, 1, dtype=torch.uint8, device=META)
        quantized.weight = bnb.nn.Params4bit(
            packed, requires_grad=False, quant_state=state, bnb_quantized=True, module=quantized
        )
        quantized.bias = layer.bias
        parent, _, leaf = name.rpartition(".")
        setattr(body.get_submodule(parent), leaf, quantized)


def run_config(setting: Setting) -> RunConfig:
    """The run whose step is counted."""
    return RunConfig.model_validate(
        {
            "model": setting.model,
            "task": {"name": "arithmetic"},
            "lora": None if setting.full else {"r": 16},
            "dtype": "bfloat16",
            "max_prompt_length": setting.prompt,
            "max_completion_length": setting.completion,
            "micro_batch_tokens": setting.micro_batch_tokens,
            "gradient_checkpointing": setting.checkpointing,
            "offload_activations": setting.offload,
            "lambda_reg": 0.01,
        }
    )


def count(setting: Setting) -> Memory:
    """Runs reference pass, forward, backward and update of one optimizer step on the meta device."""
    config = run_config(setting)
    policy = make_policy(setting, config)
    storages = Live()
    for tensor in held_by(policy):
        storages.hold(tensor)
    weights = storages.now
    with storages, on_meta():
        optimizer = make_optimizer(config, policy.trainable())
        for group in optimizer.param_groups:
            group["foreach"] = True  # as on a GPU
        budget = TokenBudget.for_policy(config, policy)
        batch = make_one_batch(setting, config)
        batch = replace(batch, ref_logprobs=reference_logprobs(policy, batch, config, budget))
        backward(policy, batch, make_objective(config), config, budget)
        update(optimizer, optimizer.param_groups[0]["params"])
        trained = storages.now - weights
    return Memory(weights, trained, storages.peak)


def held_by(policy: Policy) -> Iterator[Tensor]:
    """Parameters and buffers, those inside a quantized weight included."""
    parts = [policy.model] if policy.frozen is None else [policy.model, policy.frozen.body, policy.frozen.head]
    for part in parts:
        yield from part.parameters()
        yield from part.buffers()
    for parameter in policy.model.parameters():
        state = getattr(parameter, "quant_state", None)
        for part in (state, getattr(state, "state2", None)):
            if part is not None:
                yield from (part.absmax, part.code)


def make_one_batch(setting: Setting, config: RunConfig) -> Batch:
    """One group whose completions are all of full length, half of them right."""
    shape = (setting.rows, setting.completion)
    tokens = Tokens(
        torch.zeros(1, setting.prompt, dtype=torch.int64),
        torch.ones(1, setting.prompt, dtype=torch.bool),
        torch.zeros(setting.rows, dtype=torch.int64),
        torch.zeros(shape, dtype=torch.int64),
        torch.ones(shape, dtype=torch.bool),
    )
    scores = torch.arange(setting.rows).remainder(2).float()[:, None]
    return assemble(tokens, scores, torch.zeros(setting.rows, dtype=torch.bool), config)


# ---- what is counted -----------------------------------------------------------------------------------------------

HEADS = ("full logits, float32", "full logits, bfloat16", "amir")
STEPS = [Setting(), Setting(checkpointing=True), Setting(checkpointing=True, offload=True)]
STEPS += [Setting(quantization="4bit", checkpointing=True)]
SHORT: dict[str, Any] = {"prompt": 512, "completion": 1024, "checkpointing": True}
CARDS = [
    Setting("Qwen2.5-7B", quantization="4bit", micro_batch_tokens=1535, **SHORT),
    Setting("Qwen2.5-7B", quantization="4bit", micro_batch_tokens=4096, **SHORT),
    Setting("Qwen2.5-3B", quantization="4bit", micro_batch_tokens=8704, **SHORT),
    Setting("Qwen2.5-3B", micro_batch_tokens=4096, **SHORT),
    Setting("Qwen2.5-1.5B", micro_batch_tokens=8704, **SHORT),
    Setting("Qwen2.5-0.5B", full=True, micro_batch_tokens=4096, **SHORT),
    Setting("Qwen2.5-7B", micro_batch_tokens=4096, **SHORT),
    Setting("Qwen2.5-7B", micro_batch_tokens=8704, **SHORT),
    Setting("Qwen2.5-7B", quantization="4bit", micro_batch_tokens=8704, **SHORT),
    Setting("Qwen2.5-3B", micro_batch_tokens=8704, **SHORT),
    Setting("Qwen2.5-1.5B", full=True, micro_batch_tokens=4096, **SHORT),
]


def cache_bytes(setting: Setting, sequences: int = 32) -> int:
    """Bytes of the key-value cache while the completions are sampled."""
    sizes = MODELS[setting.model]
    width = sizes["hidden_size"] // sizes["num_attention_heads"] * KEY_HEADS.get(setting.model, 2)
    return 2 * 2 * sizes["num_hidden_layers"] * width * sequences * (setting.prompt + setting.completion)


def main() -> None:
    """Counts, prints and keeps every step, and the same step with full logits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-keep", action="store_true", help="print only")
    keeps = not parser.parse_args().no_keep
    table = Table("case", "head", "weights, GB", "gradients, optimizer, GB", "peak, GB", "cache of sampling, GB")
    for setting in [replace(step, head=head) for step in STEPS for head in HEADS] + CARDS:
        memory = count(setting)
        numbers = (memory.weights, memory.trained, memory.peak, cache_bytes(setting))
        table.add_row(setting.case, setting.head, *(f"{number / 1e9:.2f}" for number in numbers))
        row = {
            "bench": "memory",
            "contender": setting.head,
            "workload": setting.workload,
            "case": setting.case,
            "seconds": None,
            "peak_memory_mb": memory.peak / 1e6,
            "ratio_to": None,
            "ratio": None,
        }
        if keeps:
            keep(row | row_origin())
    Console(width=200).print(table)


if __name__ == "__main__":
    main()
