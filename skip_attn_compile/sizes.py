"""Sizes and strides, which may be symbolic, and what is known of them."""

import torch
from torch.fx.experimental.symbolic_shapes import guard_or_false, statically_known_true

Size = int | torch.SymInt


def guarded(condition: bool | torch.SymBool) -> bool:
    """The truth of a condition on sizes. Symbolic ones are guarded on where they have a value, and false where they have none."""
    return condition if isinstance(condition, bool) else guard_or_false(condition)


def provable(condition: bool | torch.SymBool) -> bool:
    """The truth of a condition on sizes, without a guard; a symbolic one that cannot be proven counts as false."""
    return condition if isinstance(condition, bool) else statically_known_true(condition)


def same_size(a: Size, b: Size) -> bool:
    """Without a guard: symbolic sizes are equal when they are the same expression."""
    return provable(a == b)


def is_one(size: Size) -> bool:
    return provable(size == 1)


def static_size(size: Size) -> Size:
    """`size` as an int where it has no free symbol; otherwise as it is. Adds no guard."""
    if isinstance(size, torch.SymInt) and (value := size.node.maybe_as_int()) is not None:
        return value
    return size
