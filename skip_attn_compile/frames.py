"""What Dynamo is capturing: the modules that its Python frame can see, and which of them the graph was captured from."""

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from torch import nn

from skip_attn_compile.layers import Anchor, Frame, KnownModels, clean_path, unwrap


def captured_code() -> CodeType | None:
    """Of the Python frame that Dynamo is compiling; None where the graph was not captured just now (aot_compile, a traced module)."""
    tx = _transaction()
    return None if tx is None else tx.f_code


def _transaction() -> Any:
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        return InstructionTranslator.current_tx()
    except AttributeError:  # this thread is not inside one
        return None


def frames_of_graph(module_ids: Sequence[tuple[int, ...]], example_inputs: Sequence[object], models: KnownModels) -> list[Frame]:
    """Sort the sites of the graph that Dynamo is compiling into frames, one for each root module (almost always one).

    module_ids: for each site, the ids of the modules it was traced in, innermost first. A root that no known model holds, and that no
    other module on the Python stack contains, is a whole model: it becomes known under the name "". Any other unknown root is a block
    of a model that was not attached: its frame has no candidates until `attach` is called.
    """
    scope = _FrameScope.current(models)
    frames: dict[int, Frame] = {}
    paths: dict[int, dict[int, str]] = {}  # id(root) -> {id(module): its path within the root}
    for index, ids in enumerate(module_ids):
        owner, tree = scope.locate(ids)
        if owner is None or tree is None:
            frames.setdefault(0, Frame(None, scope.code.co_name, scope.code)).sites[index] = ""
            continue
        root = scope.root_of(owner, tree, example_inputs)
        if id(root) not in frames:
            if models.holding(root) is None and not scope.is_part_of_a_larger_model(tree):
                models.attach(tree)
            frames[id(root)] = Frame(type(root), scope.code.co_name, scope.code, _anchors(root, example_inputs))
            paths[id(root)] = {id(module): clean_path(root, path) for path, module in root.named_modules()}
        frames[id(root)].sites[index] = paths[id(root)][id(owner)]
    for frame in frames.values():  # Parameters of the attention modules first: they are the least likely to be shared
        inside = tuple(frame.sites.values())
        frame.anchors = tuple(sorted(frame.anchors, key=lambda a: not any(a.owner == p or a.owner.startswith(p + ".") for p in inside)))
    return list(frames.values())


def _path_within(root: nn.Module, module: nn.Module) -> str:
    return next(clean_path(root, path) for path, m in root.named_modules() if m is module)


def _anchors(root: nn.Module, example_inputs: Sequence[object]) -> tuple[Anchor, ...]:
    owner_of = {
        id(parameter): (parameter, clean_path(root, path), name)
        for path, module in root.named_modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    }
    anchors = []
    for position, tensor in enumerate(example_inputs):
        found = owner_of.get(id(tensor))
        if found is not None and found[0] is tensor:
            anchors.append(Anchor(position, found[1], found[2]))
    return tuple(anchors)


@dataclass
class _FrameScope:
    """The Python frame that Dynamo is capturing: the modules it can see, and those that are running above it."""

    code: CodeType
    local_modules: list[nn.Module]
    running: list[nn.Module]  # modules whose methods are on the Python stack
    found: dict[int, tuple[nn.Module, nn.Module]]  # id(module) -> (module, the tree it was found in)
    known: dict[int, nn.Module]  # id(module) -> the known model that holds it

    @classmethod
    def current(cls, models: KnownModels) -> "_FrameScope":
        tx = _transaction()
        if tx is None:
            raise ValueError(
                "the backend needs a graph that Dynamo is capturing, to tell whose attention it holds, and got one captured before"
                " (aot_compile, a traced or exported module); use torch.compile(model, backend=...)"
            )
        local_modules = _modules_in(tx.output.local_scope.values())
        # Largest trees first among the locals: `self` before the blocks that a loop variable may also hold.
        local_modules.sort(key=lambda m: -sum(1 for _ in m.modules()))
        known = [m for k in models.live() if (m := k.reference()) is not None]
        found: dict[int, tuple[nn.Module, nn.Module]] = {}
        for tree in (*local_modules, *known, *_modules_in(tx.f_globals.values())):
            for module in tree.modules():
                found.setdefault(id(module), (module, tree))
        models_of = {id(module): model for model in reversed(known) for module in model.modules()}
        return cls(tx.f_code, local_modules, _running_modules(), found, models_of)

    def locate(self, ids: tuple[int, ...]) -> tuple[nn.Module | None, nn.Module | None]:
        """(the module that made a call, the tree that holds it); (None, None) for a plain function."""
        for wanted in ids:
            if wanted in self.found:
                return self.found[wanted]
        if self.local_modules:  # no module stack: the frame's own module made the call
            return self.local_modules[0], self.local_modules[0]
        return None, None

    def root_of(self, owner: nn.Module, tree: nn.Module, example_inputs: Sequence[object]) -> nn.Module:
        """The module whose forward the frame is: the local one above `owner`, else the lowest one above every Parameter used.

        Where the local one is a wrapper around a model that was attached, that model.
        """
        if any(m is tree for m in self.local_modules):
            model = self.known.get(id(owner))
            return model if model is not None and any(m is model for m in tree.modules()) else tree
        owners = [anchor.owner for anchor in _anchors(tree, example_inputs)] + [_path_within(tree, owner)]
        common = owners[0].split(".")
        for path in owners:
            parts = path.split(".")
            common = [a for n, a in enumerate(common) if parts[: n + 1] == common[: n + 1]]
        return next(m for path, m in tree.named_modules() if clean_path(tree, path) == ".".join(common))

    def is_part_of_a_larger_model(self, tree: nn.Module) -> bool:
        return any(m is not tree and any(child is tree for child in m.modules()) for m in self.running)


def _modules_in(values: Iterable[Any]) -> list[nn.Module]:
    return [unwrap(value) for value in values if isinstance(value, nn.Module)]


def self_of(frame: FrameType) -> object:
    """The local `self` of a running frame."""
    values = frame.f_locals
    found = values.get("self")
    if isinstance(values, dict):
        values.clear()  # before Python 3.13 it is a copy that the frame keeps: what the caller deletes would live on in it
    return found


def calls_around(module: nn.Module) -> Counter[int]:
    """id(module) -> how many of its calls are on this thread's Python stack, around the call of `module` that is beginning."""
    found: dict[str, Counter[int]] = {"_wrapped_call_impl": Counter(), "_call_impl": Counter()}  # a class may call the latter itself
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name in found:
            found[frame.f_code.co_name][id(self_of(frame))] += 1
        frame = frame.f_back  # type: ignore[assignment]
    around = found["_wrapped_call_impl"] | found["_call_impl"]  # the larger of both
    around[id(module)] -= 1
    return around


def _running_modules() -> list[nn.Module]:
    running: dict[int, nn.Module] = {}
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("self",):
            module = self_of(frame)
            if isinstance(module, nn.Module):
                module = unwrap(module)
                running[id(module)] = module
        frame = frame.f_back  # type: ignore[assignment]
    return list(running.values())
