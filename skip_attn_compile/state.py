"""State files: what they have in common is to tell which models they are of."""

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn


def described(models: Mapping[str, nn.Module]) -> dict[str, str]:
    """By component: class, size, and a digest of some weights, as another fine-tune has the same class and size."""
    return {name: f"{type(model).__name__}, {_parameters(model)}" for name, model in models.items()}


def digest(tensors: Iterable[Tensor | None]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(repr(tensor if tensor is None else (tuple(tensor.shape), tensor.dtype)).encode())
        if tensor is not None and _is_plain(tensor):
            found.update(tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:12]


def _parameters(model: nn.Module) -> str:
    """Of each Parameter the first values count; not of what offloading has taken away, or quantisation packed."""
    parameters = [p for p in model.parameters() if not isinstance(p, nn.UninitializedParameter)]
    plain = (p.detach().flatten()[:8] for p in parameters if _is_plain(p))
    return f"{sum(p.numel() for p in parameters):,} parameters, weights {digest(plain)}"


def _is_plain(tensor: Tensor) -> bool:
    """Not on the meta device, sparse, or of a class that holds its values in another way."""
    return type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta and tensor.layout is torch.strided
