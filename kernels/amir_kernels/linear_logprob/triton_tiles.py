"""Tile shapes of the head's Triton kernels, by architecture, dtype and whether tensor descriptors can read the head.

This module does not need triton. Every row of the table compiles without spilled registers, with every option of the
head (`python -m amir_kernels.inspect` shows it).
"""

from typing import NamedTuple

import torch

from .head import Head


class Config(NamedTuple):
    """Shape of a program's tile and its resources."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    programs: int = 1
    """programs that a multiprocessor runs at once"""
    descriptors: bool = False
    """whether operands are read by tensor descriptors, else by pointers"""


TABLE = {
    # Two warpgroups of 64 x 256 sums, half of the registers; three stages of copies in flight beside the one in use.
    ("sm_90", "plain", "descriptors"): Config(128, 256, 64, 8, 4, descriptors=True),
    # The cap's derivative, and the shared memory of the low-rank factors, leave room for half of the columns.
    ("sm_90", "rich", "descriptors"): Config(128, 128, 64, 8, 4, descriptors=True),
    # Pointers take registers of their own.
    ("sm_90", "plain", "pointers"): Config(128, 128, 64, 8, 3),
    ("sm_90", "rich", "pointers"): Config(128, 128, 64, 8, 3),
    # Sums wait in tensor memory, but the statistics take them through registers: 256 columns spill.
    ("sm_100", "plain", "descriptors"): Config(128, 128, 64, 8, 4, descriptors=True),
    ("sm_100", "rich", "descriptors"): Config(128, 128, 64, 8, 4, descriptors=True),
    ("sm_100", "plain", "pointers"): Config(128, 128, 64, 8, 3),
    ("sm_100", "rich", "pointers"): Config(128, 128, 64, 8, 3),
    # 100 KiB of shared memory. Descriptors free registers for a depth of 64: 2.3 instructions a product, pointers 3.9.
    ("sm_120", "plain", "descriptors"): Config(128, 128, 64, 8, 3, descriptors=True),
    ("sm_120", "rich", "descriptors"): Config(128, 128, 64, 8, 3, descriptors=True),
    # Half a wave's registers hold the sums; copies go through registers, so two stages.
    ("gfx942", "plain", "pointers"): Config(128, 128, 64, 8, 2),
    ("gfx942", "rich", "pointers"): Config(128, 128, 64, 8, 2),
    # Waves of 32 with 256 registers: larger tiles spill under a cap.
    ("gfx1100", "plain", "pointers"): Config(128, 64, 32, 8, 3),
    ("gfx1100", "rich", "pointers"): Config(64, 64, 32, 8, 2),
    # sm_80 to sm_89, and what is not named above: the depth of 64 or 256 columns spill, and 64 KiB fit every GPU.
    ("other", "plain", "pointers"): Config(128, 128, 32, 8, 4),
    ("other", "rich", "pointers"): Config(128, 128, 32, 8, 4),
    # Float32 products run on the ordinary units, three programs at once. Squarer tiles spill.
    ("other", "float32", "pointers"): Config(64, 32, 32, 4, 3, programs=3),
    # On sm_80 the compiler aims at four programs, and the taller tile spills.
    ("sm_80", "float32", "pointers"): Config(32, 64, 32, 4, 3, programs=3),
    # gfx942 has float32 matrix instructions.
    ("gfx942", "float32", "pointers"): Config(64, 64, 32, 4, 3),
    ("gfx1100", "float32", "pointers"): Config(64, 32, 16, 4, 2),
}
LARGEST_TILE = 128, 256
"""Multiples of every tile's rows and columns."""
SPLIT_COLUMNS = 4096
"""Vocabulary columns of a split: enough splits to fill a GPU with few rows, few enough that the partials stay small."""


def device_architecture(device: torch.device) -> str:
    """ "sm_90" and the like on NVIDIA, "gfx942" and the like on AMD; "other" elsewhere, and in the interpreter."""
    if device.type != "cuda":
        return "other"
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


FAMILIES = {"sm_9": "sm_90", "sm_10": "sm_100", "sm_11": "sm_100", "sm_12": "sm_120"}
FAMILIES |= {"gfx94": "gfx942", "gfx95": "gfx942", "gfx11": "gfx1100", "gfx12": "gfx1100"}
"""The member of a family that the table has, by how the names of the family start."""


def family(architecture: str) -> str:
    """The architecture whose rows of the table serve this one: "sm_100" for "sm_103", itself for what has no family."""
    starts = (start for start in FAMILIES if architecture.startswith(start) and len(architecture) > len(start))
    return next((FAMILIES[start] for start in starts), architecture)


def describable(head: Head) -> bool:
    """Whether tensor descriptors can read hidden states and head: contiguous, one dtype, rows in steps of 16 bytes."""
    weight, itemsize = head.weight, head.compute.itemsize
    steps = (weight.shape[1] * itemsize, weight.stride(0) * itemsize, weight.data_ptr())
    dense = weight.stride(1) == 1 and weight.stride(0) >= weight.shape[1] > 0
    return head.compute == weight.dtype and dense and not any(step % 16 for step in steps)


def select_config(head: Head, architecture: str) -> Config:
    """The row of the table for a head. It depends on neither the batch nor the results: all share their bits."""
    kind = "float32" if head.compute == torch.float32 else "rich" if head.lora or head.softcap else "plain"
    ways = ["descriptors", "pointers"] if describable(head) else ["pointers"]
    rows = (TABLE.get((name, kind, way)) for name in (family(architecture), "other") for way in ways)
    return next(row for row in rows if row)


def vocabulary_splits(vocabulary: int, config: Config) -> tuple[int, int]:
    """(splits, vocabulary tiles of each). They depend on V alone, so that a row's bits do not depend on the batch."""
    tiles = -(-vocabulary // config.columns)
    tiles_per_split = max(1, SPLIT_COLUMNS // config.columns)
    return -(-tiles // tiles_per_split), tiles_per_split
