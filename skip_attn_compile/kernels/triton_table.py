"""How the Triton kernel is compiled for which problem: by which launches, each in which configuration."""

from typing import NamedTuple

from torch import Tensor

TILE_Q, TILE_K = 64, 128
HOPPER = (9, 0)
LARGE_SHARED_MEMORY = ((8, 0), (9, 0), (10, 0), (10, 3))  # 163 KB or more a program; all others are taken to have 99 KB


class Config(NamedTuple):
    """How the kernel is compiled for one kind of problem. Chosen from tables: timing candidates at run time would wait for the device."""

    block_q: int  # query rows of a program: TILE_Q, or a multiple of it where nothing votes
    num_warps: int
    num_stages: int  # key tiles in flight
    chunk: int  # dimensions of a row that are in shared memory at a time, a power of 2
    tma: bool = False  # as TMA and EARLY of the kernel
    early: bool = False


def config(capability: tuple[int, int] | None, element_size: int, dim: int, vote: bool, described: bool) -> Config:
    """dim: the larger of head_dim and value_dim; vote: as in the kernel; described: K and V can be had by tensor descriptor.

    Measured on an H200 alone (`tests/gpu/RESULTS.md`). There the dense kernel is faster without descriptors at dimensions of 65 to 128.
    """
    if element_size == 4:  # products on the ordinary cores, whose operands need many registers
        return Config(64, 8, 1, 32)
    if capability not in LARGE_SHARED_MEMORY:
        return Config(64, 4, 2 if vote and dim <= 128 else 1, 128)
    if described and dim > 128:
        return Config(64, 4, 1, 256, tma=True)
    if dim > 128:
        return Config(64, 8, 1, 256)
    if vote:
        return Config(64, 4, 2 if dim > 64 else 3, 128, tma=described, early=capability == HOPPER)
    if described and dim <= 64:
        return Config(128, 4, 3, 128, tma=True)
    return Config(128, 8, 2 if dim > 64 and capability == (8, 0) else 3, 128)  # three stages are 229 KB at 128


def is_described(capability: tuple[int, int] | None, *tensors: Tensor) -> bool:
    """Whether the kernel may have these by tensor descriptor. Newer GPUs than Hopper have them, too; there nothing was measured."""
    return capability == HOPPER and all(x.element_size() == 2 and is_describable(x) for x in tensors)


def is_describable(x: Tensor) -> bool:
    """Whether the copy engine can address x: all in multiples of 16 bytes, and no row in another."""
    *outer, inner = x.stride()
    steps = all(step > 0 and step * x.element_size() % 16 == 0 for step in outer)
    return steps and inner == 1 and outer[-1] >= x.shape[-1] and x.data_ptr() % 16 == 0 and x.numel() > 0


class Launch(NamedTuple):
    vote: bool  # as VOTE and WHICH of the kernel
    which: str
    config: Config


def attending(capability: tuple[int, int] | None, element_size: int, dim: int, masked: bool, described: bool) -> tuple[Launch, ...]:
    """How to attend. Without a mask by two kernels, each of which returns at once in the batch items that are the other's: one votes, one
    knows that lambda is 0 and loads V ahead."""
    votes, dense = (config(capability, element_size, dim, vote, described) for vote in (True, False))
    return (Launch(True, "all", votes),) if masked else (Launch(True, "sparse", votes), Launch(False, "dense", dense))


def measuring(
    capability: tuple[int, int] | None, element_size: int, dim: int, tile_q: int, masked: bool, described: bool
) -> tuple[Launch, ...]:
    """How to measure: in blocks of one group, of `tile_q` rows. Where a tile can be masked, V must wait for the vote."""
    if tile_q == TILE_Q:  # V waits anyway: without tiles of V that are loaded ahead, two programs fit a multiprocessor
        return (Launch(True, "all", config(capability, element_size, dim, True, described)),)
    if element_size == 4:
        chosen = Config(tile_q, 8, 1, 32)
    elif capability not in LARGE_SHARED_MEMORY:
        chosen = Config(tile_q, 8, 1, 64)
    elif described:
        chosen = Config(tile_q, 8, 3, 128, tma=True) if dim <= 128 else Config(tile_q, 8, 1, 256, tma=True)
    else:
        chosen = Config(tile_q, 8, 2 if dim <= 128 else 1, 128)
    return (Launch(masked, "all", chosen),)
