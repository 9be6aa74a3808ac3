"""Skip-softmax attention (BLASST) for diffusion transformers, as a torch.compile backend.

model = torch.compile(model, backend=skip_attn_compile.backend(skip_attn_compile.SkipConfig(threshold=0.1)))
"""

from skip_attn_compile.config import Calibration, Rule, SkipConfig

__version__ = "0.1.0"

# Eagerly: some of these functions share a name with the module they come from, and must be set after it.
from skip_attn_compile.backend import backend, report
from skip_attn_compile.calibrate import calibrate
from skip_attn_compile.capture import capture
from skip_attn_compile.frontier import Sensitivity
from skip_attn_compile.functional import skip_softmax_attention
from skip_attn_compile.measurement import Measurement
from skip_attn_compile.pipeline import CompiledPipeline, compile_pipeline
from skip_attn_compile.plan import plan
from skip_attn_compile.schedule import ScheduleTable, cutoff_for_dense_steps, dense_steps, schedule_table
from skip_attn_compile.sensitivity import sensitivity
from skip_attn_compile.timestep import TimestepSpec, timestep

__all__ = [
    "Calibration",
    "CompiledPipeline",
    "Measurement",
    "Rule",
    "ScheduleTable",
    "Sensitivity",
    "SkipConfig",
    "TimestepSpec",
    "backend",
    "calibrate",
    "capture",
    "compile_pipeline",
    "cutoff_for_dense_steps",
    "dense_steps",
    "plan",
    "report",
    "schedule_table",
    "sensitivity",
    "skip_softmax_attention",
    "timestep",
]
