"""What happens when something goes wrong: the error comes through as it is, nothing is counted, and the model still runs dense."""

import subprocess
import sys
import textwrap

import pytest
import torch

from models import dit, reference_sdpa, skip_config, tokens
from skip_attn_compile import backend
from skip_attn_compile.kernels import reference as implementation

CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.mark.parametrize(
    "error", [RuntimeError("a kernel failed"), torch.OutOfMemoryError("out of memory, simulated")], ids=["error", "oom"]
)
@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor"])
def test_an_error_inside_the_operator_comes_through(inner: str, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    model, be = dit(), backend(skip_config(), inner=inner)
    dense = model(tokens())
    compiled = torch.compile(model, backend=be)
    sparse = compiled(tokens())
    before, graphs = be.report().visited, be.report().graphs

    def fail(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(implementation, "reference_attention", fail)
        with pytest.raises(type(error), match=str(error)):
            compiled(tokens())
        assert torch.equal(model(tokens()), dense)  # the model itself is as it was
    assert be.report().visited == before

    be.update(threshold=0.0)
    torch.testing.assert_close(compiled(tokens()), dense, **CLOSE)
    be.update(threshold=0.3)
    assert torch.equal(compiled(tokens()), sparse)
    assert be.report().graphs == graphs  # nothing was compiled again


def test_two_backends_in_one_process_do_not_meet() -> None:
    """Not even with two models of one class, whose graphs Dynamo would otherwise share."""
    models, thresholds = [dit(seed=0), dit(seed=1)], [0.3, 0.05]
    backends = [backend(skip_config(threshold), inner="eager") for threshold in thresholds]
    compiled = [torch.compile(model, backend=be) for model, be in zip(models, backends, strict=True)]

    def check(*lambdas: float) -> None:
        for model, run, be, lam in zip(models, compiled, backends, lambdas, strict=True):
            before = be.report().visited, be.report().skipped
            with reference_sdpa(lam) as counts:
                expected = model(tokens())
            torch.testing.assert_close(run(tokens()), expected, **CLOSE)
            now = be.report().visited, be.report().skipped
            assert tuple(b - a for a, b in zip(before, now, strict=True)) == tuple(sum(column) for column in zip(*counts, strict=True))

    check(0.3, 0.05)
    backends[0].update(threshold=0.0)
    check(0.0, 0.05)
    backends[0].reset()
    assert backends[0].report().sites == []
    assert backends[1].report().visited > 0


def test_beyond_the_recompile_limit_a_frame_is_dense_and_what_was_compiled_stays_sparse() -> None:
    model, be = dit(), backend(skip_config(), inner="eager")
    compiled = torch.compile(model, backend=be, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=2):
        for length in (256, 384):
            compiled(tokens(length=length))
        (note,) = be.report().notes
        assert "any further one runs eager, with plain attention" in note
        before = be.report().visited
        assert torch.equal(compiled(tokens(length=512)), model(tokens(length=512)))
        assert be.report().visited == before
        with reference_sdpa(0.3):
            expected = model(tokens(length=256))
        torch.testing.assert_close(compiled(tokens(length=256)), expected, **CLOSE)
        assert be.report().visited > before


WITHOUT = """
    import sys

    class Absent:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] in {blocked}:
                raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

    sys.meta_path.insert(0, Absent())

    import torch
    import skip_attn_compile
    from skip_attn_compile import SkipConfig

    assert not torch.cuda.is_available()
    assert not {blocked} & {{name.split(".")[0] for name in sys.modules}}

    class Model(torch.nn.Module):
        def forward(self, x):
            return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    x = torch.randn(1, 2, 512, 16)
    be = skip_attn_compile.backend(SkipConfig(threshold=0.0, min_kv_len=0), inner="aot_eager")
    torch.testing.assert_close(torch.compile(Model(), backend=be)(x), Model()(x))
    (site,) = be.report().sites
    assert site.visited > 0, be.report()
    print("ran")
"""


@pytest.mark.parametrize(
    "blocked", [{"diffusers", "transformers", "accelerate", "peft"}, {"flashinfer", "tvm_ffi", "triton"}], ids=["models", "kernels"]
)
def test_the_package_runs_without(blocked: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In an interpreter of its own, without a GPU and without the optional packages."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    script = textwrap.dedent(WITHOUT).format(blocked=blocked)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr
