"""The operator `skip_attn_compile::attention`: schema, fake, dispatch. Implementations are imported at the first call.

    attention(query, key, value, threshold, attn_mask, query_mask, is_causal, scale, tile_order, implementation)
        -> (out, lse, counts)
    attention.lambda_on_host(...), the same with threshold on the CPU: for kernels that take lambda as a number. Never in a CUDA graph

query [B,Hq,Sq,D], key [B,Hkv,Skv,D], value [B,Hkv,Skv,Dv] (grouped-query attention when Hq is a multiple of Hkv), threshold = lambda,
float32 [] or [B]; out [B,Hq,Sq,Dv] in query's dtype and dimension order, lse float32 [B,Hq,Sq] (natural log), counts int32 [B,Hq,2]
(tiles visited, tiles skipped). A pure function: the counts are an output, never a side effect, so that CUDA graphs stay possible.
"""

import logging
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from skip_attn_compile import kernels
from skip_attn_compile.kernels import Implementation, Problem, RunAttention
from skip_attn_compile.operands import check_inputs
from skip_attn_compile.results import empty_results

log = logging.getLogger(__name__)

_library = torch.library.Library("skip_attn_compile", "DEF")
_SCHEMA = (
    "(Tensor query, Tensor key, Tensor value, Tensor threshold, Tensor? attn_mask, Tensor? query_mask, bool is_causal, "
    "float? scale, str tile_order, str implementation) -> (Tensor out, Tensor lse, Tensor counts)"
)
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
_library.define(f"attention{_SCHEMA}", tags=_TAGS)
_library.define(f"attention.lambda_on_host{_SCHEMA}", tags=(*_TAGS, torch.Tag.cudagraph_unsafe))
attention = torch.ops.skip_attn_compile.attention.default
attention_lambda_on_host = torch.ops.skip_attn_compile.attention.lambda_on_host

Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # size, stride, dtype


class _Plan(NamedTuple):
    """What runs a call, and into what."""

    run: RunAttention
    out: Layout
    lse: Layout
    counts: Layout


# Plans by what the caller and `query` ask for, and of memory that is not aligned apart, since an implementation may want that; only of
# implementations that check the rest themselves. Making one takes 60 us.
_plans: dict[tuple[Any, ...], _Plan] = {}
_PLANS_KEPT = 4096
_MISALIGNED = "misaligned"

# What Inductor's generated code allocates with: on the current GPU, half the host time of torch.empty_strided.
_empty_on_current_gpu = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    threshold: Tensor,
    attn_mask: Tensor | None,
    query_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    tile_order: str,
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    if torch.is_grad_enabled():
        _raise_if_gradient_needed(query, key, value, attn_mask)
    shape, device = query.shape, query.get_device()  # -1 is the CPU
    scale = shape[-1] ** -0.5 if scale is None else scale
    given = (attn_mask is None) + 2 * (query_mask is None) + 4 * query.is_cuda  # an index alone may be of another kind of device
    value_dim = value.shape[-1] if value.ndim else 0  # a scalar is refused later, with words
    call: tuple[Any, ...] = (shape, query.stride(), query.dtype, device, value_dim, given, is_causal, tile_order, implementation)
    plan = _plans.get(call)
    if plan is None and not _is_aligned(query, key, value):
        call = (*call, _MISALIGNED)
        plan = _plans.get(call)
    if plan is not None and _all_on(device, threshold, attn_mask, query_mask):
        results = _allocate(plan, device)
        try:
            plan.run(query, key, value, threshold, attn_mask, query_mask, results, is_causal, scale, tile_order)
            return results
        except ValueError:  # key, value or a mask is not what this implementation takes: another may, or we can say more
            pass
        except Exception:  # it failed
            _plans.pop(call, None)
    return _start(call, query, key, value, threshold, attn_mask, query_mask, is_causal, scale, tile_order, implementation)


def _start(
    call: tuple[Any, ...] | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    threshold: Tensor,
    attn_mask: Tensor | None,
    query_mask: Tensor | None,
    is_causal: bool,
    scale: float,
    tile_order: str,
    implementation: str,
    *,
    lambda_on_host: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Check and run a call of a new kind, and remember what ran it under `call`."""
    check_inputs(query, key, value, threshold, attn_mask, query_mask, lambda_on_host=lambda_on_host)
    results = empty_results(query, value)
    problem = problem_of(query, key, value, attn_mask, query_mask is not None, is_causal, tile_order)
    problem = problem._replace(lambda_on_host=threshold.is_cpu)

    def run(by: Implementation) -> None:
        of_its_device = threshold if by.lambda_on_host else threshold.to(query.device)  # where the first choice could not be started
        by.run(query, key, value, of_its_device, attn_mask, query_mask, results, is_causal, scale, tile_order)

    chosen = start(problem, implementation, run)
    if call is not None and not problem.aligned and call[-1] is not _MISALIGNED:  # the plan for the others has refused it
        call = (*call, _MISALIGNED)
    if call is not None and call not in _plans and chosen.checks_arguments:
        if len(_plans) >= _PLANS_KEPT:
            _plans.clear()
        _plans[call] = _Plan(chosen.run, *((tuple(x.shape), x.stride(), x.dtype) for x in results))
    return results


def _attention_lambda_on_host(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    threshold: Tensor,
    attn_mask: Tensor | None,
    query_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    tile_order: str,
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    _raise_if_gradient_needed(query, key, value, attn_mask)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return _start(
        None, query, key, value, threshold, attn_mask, query_mask, is_causal, scale, tile_order, implementation, lambda_on_host=True
    )


def _all_on(device: int, threshold: Tensor, attn_mask: Tensor | None, query_mask: Tensor | None) -> bool:
    """Kernels read these through pointers, whose device they cannot see."""
    return (
        threshold.get_device() == device
        and (attn_mask is None or attn_mask.get_device() == device)
        and (query_mask is None or query_mask.get_device() == device)
    )


def _allocate(plan: _Plan, device: int) -> tuple[Tensor, Tensor, Tensor]:
    if _empty_on_current_gpu is not None and device >= 0 and device == torch.cuda.current_device():
        return _empty_on_current_gpu(*plan.out), _empty_on_current_gpu(*plan.lse), _empty_on_current_gpu(*plan.counts)
    place = torch.device("cuda", device) if device >= 0 else torch.device("cpu")
    out, lse, counts = (torch.empty_strided(size, stride, dtype=dtype, device=place) for size, stride, dtype in plan[1:])
    return out, lse, counts


def problem_of(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, query_mask: bool, is_causal: bool, tile_order: str
) -> Problem:
    """The problem of a call with real tensors: where they start is known, too."""
    problem = kernels.Problem.of(query, key, value, attn_mask, query_mask, is_causal, tile_order)
    return problem._replace(aligned=problem.aligned and _starts_aligned(query, key, value))


def _is_aligned(query: Tensor, key: Tensor, value: Tensor) -> bool:
    return all(x.ndim == 4 and kernels.is_aligned(x) for x in (query, key, value)) and _starts_aligned(query, key, value)


def _starts_aligned(query: Tensor, key: Tensor, value: Tensor) -> bool:
    return (query.data_ptr() | key.data_ptr() | value.data_ptr()) % 16 == 0


def start(problem: Problem, name: str, run: Callable[[Implementation], None]) -> Implementation:
    """Run the implementation that serves `problem`, and return it. Logs where that is the reference though it is a kernel's work.

    name: "auto", under which one that cannot be started gives way to the next, or an implementation's. ValueError where nothing serves.
    """
    while True:
        chosen = kernels.choose(problem, name, explicit_call=True)
        if isinstance(chosen, list):
            raise ValueError(f"implementation {name!r} cannot run this attention: {'; '.join(chosen) or 'no such implementation'}")
        if chosen.name == "reference" and name == "auto" and problem.device_type != "cpu":
            _warn_slow(problem)
        if kernels.start(chosen, problem, name, partial(run, chosen)):
            return chosen


@lru_cache(maxsize=256)
def _warn_slow(problem: Problem) -> None:
    """Once for each kind of problem."""
    why = kernels.choose(problem)
    log.warning("skip-softmax attention runs on the slow reference implementation: %s", "; ".join(why) if isinstance(why, list) else "")


def _raise_if_gradient_needed(*inputs: Tensor | None) -> None:
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in inputs):
        raise RuntimeError(
            "skip_attn_compile::attention has no derivative, but grad mode is on and an input requires grad; "
            "run under torch.no_grad() or torch.inference_mode(), or use F.scaled_dot_product_attention for training"
        )


# Autograd adds nothing: kernel and fake raise where a gradient would be needed. A kernel of its own for that, in Python, takes 6 us.
for _name, _kernel in (("attention", _attention), ("attention.lambda_on_host", _attention_lambda_on_host)):
    for _device in ("CPU", "CUDA", "MPS", "XPU"):
        _library.impl(_name, _kernel, _device)
    _library.impl(_name, torch.library.fallthrough_kernel, "Autograd")


def _attention_fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    threshold: Tensor,
    attn_mask: Tensor | None,
    query_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    tile_order: str,
    implementation: str,
    *,
    lambda_on_host: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    _raise_if_gradient_needed(query, key, value, attn_mask)
    check_inputs(query, key, value, threshold, attn_mask, query_mask, lambda_on_host=lambda_on_host)
    return empty_results(query, value)


torch.library.register_fake("skip_attn_compile::attention", _attention_fake, lib=_library)
torch.library.register_fake("skip_attn_compile::attention.lambda_on_host", partial(_attention_fake, lambda_on_host=True), lib=_library)
