"""State files: what they have in common is to tell which models they are of."""

import hashlib
from collections.abc import Iterable, Mapping

from torch import Tensor, nn


def described(models: Mapping[str, nn.Module]) -> dict[str, str]:
    """By component: class, size, and a digest of some weights, as another fine-tune has the same class and size."""
    return {name: f"{type(model).__name__}, {_parameters(model)}" for name, model in models.items()}


def digest(tensors: Iterable[Tensor | None]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(repr(None if tensor is None else tensor.double().tolist()).encode())
    return found.hexdigest()[:12]


def _parameters(model: nn.Module) -> str:
    """Of each Parameter the first values count; not of what offloading has taken away, or quantisation packed."""
    parameters = list(model.parameters())
    plain = (p.detach().flatten()[:8] for p in parameters if type(p) is nn.Parameter and not p.is_meta)
    return f"{sum(p.numel() for p in parameters):,} parameters, weights {digest(plain)}"
