"""Whose layer is it? Names for the modules behind a graph, at compile time and again at every call.

One compiled graph serves every module that Dynamo finds alike: all blocks of a class under regional compilation, both experts of a
two-expert pipeline. The graph cannot know which of them is calling, but its inputs do: they hold that module's Parameters. A `Frame`
remembers, for one graph, the module whose forward was captured, the input positions of its Parameters, and every known module of the
same class; `resolve` finds the caller by comparing the live Parameters with `is` (ids are reused, and offloading replaces them).
"""

import re
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch import nn

_ATTENTION_CLASS = re.compile(r"atte?n", re.IGNORECASE)
_WRAPPER_PARTS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_MODULE_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)  # hold what they wrap as `.module`


@dataclass(frozen=True)
class LayerName:
    """A module by name: `path` within its component, e.g. blocks.0.attn1, and the component it was attached under, maybe ""."""

    component: str
    path: str

    @property
    def full(self) -> str:
        return ".".join(part for part in (self.component, self.path) if part)


@dataclass(eq=False)
class KnownModel:
    """A root module, held weakly, and the name of its component."""

    reference: "weakref.ref[nn.Module]"
    name: str

    @property
    def label(self) -> str:
        """What messages call it: the component's name, else the class."""
        return self.name or type(self.reference()).__name__

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """(path, module) of every module of the tree, wrapper parts removed; the first name of a shared module only."""
        root = self.reference()
        if root is not None:
            for path, module in root.named_modules():
                yield clean_path(root, path), module

    def attention_modules(self) -> dict[str, str]:
        """path -> class name, of the modules whose class name says attention (Attention, Attn) and that hold no other such module."""
        named = {path: type(module).__name__ for path, module in self.modules() if _ATTENTION_CLASS.search(type(module).__name__)}
        return {path: name for path, name in named.items() if not any(is_within(other, path) for other in named if other != path)}


_MOST_REMEMBERED = 1024  # callers, by Parameter: offloading replaces these again and again
_NO_MODEL = KnownModel(lambda: None, "")  # type: ignore[arg-type]  # of plain functions


class KnownModels:
    """The models whose layers have names: attached by the user, or seen as the root of a compiled frame."""

    def __init__(self) -> None:
        self._models: list[KnownModel] = []
        self._lock = threading.Lock()
        self.generation = 0  # changes whenever the list does

    def attach(self, model: nn.Module, name: str = "", asker: str = "attach") -> KnownModel:
        if not isinstance(model, nn.Module):
            raise ValueError(f"{asker} needs the torch.nn.Module whose layers are to be named, got {type(model).__name__}")
        if not isinstance(name, str):
            raise ValueError(f"name must be a string, the component's name such as 'transformer', got {name!r}")
        model = unwrap(model)
        with self._lock:
            known = next((m for m in self._models if m.reference() is model), None)
            if known is None:
                known = KnownModel(weakref.ref(model), name)
                self._models.append(known)
            known.name = name
            self.generation += 1
        return known

    def live(self) -> list[KnownModel]:
        with self._lock:
            self._models = [m for m in self._models if m.reference() is not None]
            return list(self._models)

    def holding(self, module: nn.Module) -> KnownModel | None:
        """The model whose tree holds `module`."""
        return next((known for known in self.live() if any(m is module for _, m in known.modules())), None)


@dataclass(frozen=True, eq=False)
class Anchor:
    """A graph input that was a Parameter of the frame's root module: args[position] is <root>.<owner>._parameters[name]."""

    position: int
    owner: str  # path of the owning module within the frame's root
    name: str


@dataclass(frozen=True)
class Candidate:
    """A module that may be running the graph: the frame's root, or another known module of its class. Equal by place, not by facts."""

    model: KnownModel
    path: str  # within the model
    # for each anchor, the owner here and the Parameter's name
    parameters: tuple[tuple["weakref.ref[nn.Module] | None", str], ...] = field(compare=False)

    def holds(self, index: int, tensor: object) -> bool:
        """Is `tensor` the live Parameter of anchor number `index`?"""
        reference, name = self.parameters[index]
        module = reference() if reference is not None else None
        return module is not None and module._parameters.get(name) is tensor

    def layer(self, relative_path: str) -> LayerName:
        return LayerName(self.model.name, join(self.path, relative_path))


@dataclass(eq=False)
class Frame:
    """What one graph knows about the module it was captured from. `sites` maps a site's index to its path within that module."""

    root_class: type | None  # None: a plain function, which is the only layer that it can be
    function: str  # whose code Dynamo captured
    code: CodeType
    anchors: tuple[Anchor, ...] = ()
    sites: dict[int, str] = field(default_factory=dict)
    timestep_input: tuple[str, int] | None = (
        None  # (argument, position) where the graph holds a whole model and sees how noisy its input is
    )
    _candidates: tuple[Candidate, ...] = ()
    _generation: int = -1
    _by_id: dict[int, Candidate] = field(default_factory=dict)

    def candidates(self, models: KnownModels) -> tuple[Candidate, ...]:
        """Every known module that may run this graph."""
        if self._generation != models.generation:
            generation = models.generation
            self._candidates = tuple(self._find_candidates(models))
            self._by_id = {}
            self._generation = generation
        return self._candidates

    def resolve(self, arguments: Sequence[object], models: KnownModels) -> Candidate | None:
        """The module that is calling, or None where the inputs do not tell. About 0.5 us when it has called before."""
        candidates = self.candidates(models)
        for index, anchor in enumerate(self.anchors):
            tensor = arguments[anchor.position]
            cached = self._by_id.get(id(tensor))
            if cached is not None and cached.holds(index, tensor):
                return cached
            owners = [c for c in candidates if c.holds(index, tensor)]
            if len(owners) == 1:  # a Parameter that two candidates share tells nothing: try the next
                if len(self._by_id) >= _MOST_REMEMBERED:
                    self._by_id.clear()
                self._by_id[id(tensor)] = owners[0]
                return owners[0]
        # A graph without any Parameter has nothing to compare; with one candidate there is nothing to tell apart either.
        return candidates[0] if not self.anchors and len(candidates) == 1 else None

    def _find_candidates(self, models: KnownModels) -> Iterator[Candidate]:
        if self.root_class is None:
            yield Candidate(_NO_MODEL, self.function, ())
            return
        trees = {known: [(path, m) for path, m in known.modules() if type(m) is self.root_class] for known in models.live()}
        for known, tree in trees.items():
            if any(_wraps(known, other, tree, trees[other]) for other in trees):
                continue
            for path, module in tree:
                # Every name of a shared module: who shares the owner of a Parameter must be seen to hold it too.
                parts = {clean_path(module, name): m for name, m in module.named_modules(remove_duplicate=False)}
                if all(site in parts for site in self.sites.values()):
                    owners = (parts.get(anchor.owner) for anchor in self.anchors)
                    references = (None if owner is None else weakref.ref(owner) for owner in owners)
                    yield Candidate(known, path, tuple(zip(references, (anchor.name for anchor in self.anchors), strict=True)))


def _wraps(known: KnownModel, other: KnownModel, own: list[tuple[str, nn.Module]], others: list[tuple[str, nn.Module]]) -> bool:
    """Is `other` a model inside `known`, with all of its candidates in it? Then it names them."""
    root, inner = known.reference(), other.reference()
    inside = root is not None and inner is not root and any(module is inner for _, module in known.modules())
    return inside and {id(module) for _, module in own} <= {id(module) for _, module in others}


def unwrap(module: nn.Module) -> nn.Module:
    """The user's module inside torch.compile's and data-parallel wrappers."""
    while isinstance(module, (torch._dynamo.OptimizedModule, *_MODULE_WRAPPERS)):
        module = module._orig_mod if isinstance(module, torch._dynamo.OptimizedModule) else module.module
    return module


def is_compiled(model: nn.Module) -> bool:
    """Has torch.compile wrapped `model`, or compiled it or a part of it in place?"""
    return isinstance(model, torch._dynamo.OptimizedModule) or any(m._compiled_call_impl is not None for m in model.modules())


def forward_codes(model: nn.Module) -> list[CodeType]:
    """The code of a model's forward and of the decorators around it, outermost first: the frame that Dynamo compiles is one of them."""
    codes: list[CodeType] = []
    forward: Any = type(model).forward
    while forward is not None:
        codes.append(forward.__code__)
        forward = getattr(forward, "__wrapped__", None)
    return codes


def clean_path(root: nn.Module, path: str) -> str:
    """`path` without the parts that wrappers add (_orig_mod, data-parallel's module, ...)."""
    parts, module = [], root
    for part in path.split(".") if path else []:
        wrapper = part in _WRAPPER_PARTS or (part == "module" and isinstance(module, _MODULE_WRAPPERS))
        if not wrapper:
            parts.append(part)
        module = module._modules[part]  # type: ignore[assignment]
    return ".".join(parts)


def is_within(path: str, outer: str) -> bool:
    """Is the module at `path` the one at `outer`, or inside it?"""
    return not outer or path == outer or path.startswith(f"{outer}.")


def join(*paths: str) -> str:
    return ".".join(path for path in paths if path)
