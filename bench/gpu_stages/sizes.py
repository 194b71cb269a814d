"""What is measured: real sizes on a GPU, by its memory, and tiny ones in a rehearsal on a CPU."""

from dataclasses import dataclass, replace

import torch

from amir_kernels.linear_logprob.triton_tiles import Config
from contenders import HeadSize

LARGE_CARD_BYTES = 60 * 10**9


@dataclass(frozen=True)
class StepSize:
    """A training step: a model of `bench_memory.MODELS`, and its tokens."""

    model: str
    prompt: int
    completion: int
    rows: int
    new_tokens: int
    """sampled for each completion"""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a check."""

    device: str
    backend: str
    """of our ops, where they are checked"""
    dtype: torch.dtype
    """of what is timed"""
    half: torch.dtype
    """the 16-bit dtype of autocast"""
    dtypes: tuple[torch.dtype, ...]
    """of the numerics"""
    checked_head: HeadSize
    checked_rows: int
    odd_head: HeadSize
    huge_head: HeadSize
    """of more than 2^31 elements"""
    timed_heads: tuple[HeadSize, ...]
    tokens: tuple[int, ...]
    kernel_tokens: tuple[int, ...]
    splits: tuple[int, ...]
    tiles: tuple[Config, ...]
    """swept, beside the one in the table"""
    groups: tuple[tuple[int, int], ...]
    """(rows, group size)"""
    copied_bytes: int
    product: int
    """edge of the square product that gives the card's rate"""
    repeats: int
    launches: int
    """timed on the host"""
    step: StepSize
    drop_in_model: str
    drop_in_tokens: tuple[int, int]
    """of prompt and completion"""

    def bound(self, value: float | None) -> float | None:
        """A bound of a time or of memory: none in a rehearsal, whose figures mean nothing."""
        return value if self.device == "cuda" else None


REAL = Sizes(
    device="cuda",
    backend="triton",
    dtype=torch.bfloat16,
    half=torch.bfloat16,
    dtypes=(torch.bfloat16, torch.float16, torch.float32),
    checked_head=HeadSize("Qwen2.5-1.5B", 1536, 151_936),
    checked_rows=300,
    odd_head=HeadSize("odd", 1001, 50_257),
    huge_head=HeadSize("huge", 8200, 262_147),
    timed_heads=(HeadSize("Qwen2.5-7B", 3584, 152_064), HeadSize("Llama-3-8B", 4096, 128_256)),
    tokens=(8192,),
    kernel_tokens=(128, 1024, 8192),
    splits=(512, 1024, 2048, 4096, 8192),
    tiles=(
        Config(128, 256, 64, 8, 3, descriptors=True),
        Config(128, 128, 64, 4, 4, descriptors=True),
        Config(64, 256, 64, 4, 4, programs=2, descriptors=True),
        Config(128, 128, 64, 8, 3),
    ),
    groups=((4096, 16), (4096, 512), (65_536, 8)),
    copied_bytes=2**30,
    product=8192,
    repeats=7,
    launches=20,
    step=StepSize("Qwen2.5-1.5B", prompt=512, completion=1024, rows=8, new_tokens=128),
    drop_in_model="Qwen2.5-0.5B",
    drop_in_tokens=(256, 256),
)
"""For cards of 64 GB and more."""

REHEARSAL = Sizes(
    device="cpu",
    backend="triton",
    dtype=torch.float32,
    half=torch.float16,
    dtypes=(torch.float16, torch.float32),
    checked_head=HeadSize("tiny", 32, 150),
    checked_rows=20,
    odd_head=HeadSize("tiny, odd", 27, 101),
    huge_head=HeadSize("tiny", 24, 137),
    timed_heads=(HeadSize("tiny", 32, 150),),
    tokens=(64,),
    kernel_tokens=(16, 40),
    splits=(64, 128),
    tiles=(Config(32, 32, 16, 4, 2),),
    groups=((16, 4),),
    copied_bytes=2**20,
    product=128,
    repeats=2,
    launches=1,
    step=StepSize("tiny", prompt=6, completion=9, rows=4, new_tokens=4),
    drop_in_model="tiny",
    drop_in_tokens=(4, 6),
)
"""Kernels run in Triton's interpreter, and timed ops with the torch backend."""


def real_sizes() -> Sizes:
    """The sizes for the current card: smaller ones below 60 GB."""
    if torch.cuda.get_device_properties(0).total_memory >= LARGE_CARD_BYTES:
        return REAL
    return replace(
        REAL,
        checked_head=HeadSize("Qwen2.5-0.5B", 896, 151_936),
        timed_heads=(HeadSize("Qwen2.5-3B", 2048, 151_936),),
        tokens=(2048,),
        kernel_tokens=(128, 1024, 2048),
        copied_bytes=2**28,
        step=replace(REAL.step, model="Qwen2.5-0.5B"),
    )
