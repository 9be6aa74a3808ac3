"""Skip-softmax attention (BLASST) for diffusion transformers, as a torch.compile backend.

    model = torch.compile(model, backend=skip_attn_compile.backend(skip_attn_compile.SkipConfig(threshold=0.1)))
"""

from skip_attn_compile.config import Rule, SkipConfig

__version__ = "0.1.0"

# Eagerly: these functions share a name with the modules they come from, and must be set after those.
from skip_attn_compile.backend import backend, report
from skip_attn_compile.functional import skip_softmax_attention

__all__ = ["Rule", "SkipConfig", "backend", "report", "skip_softmax_attention"]
