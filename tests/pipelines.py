"""Diffusers pipelines with tiny random weights, built from configs: the transformers of `diffusers_models`, text encoders, no VAE.

Without a VAE a pipeline gives latents; the denoising loop, the scheduler and the text encoders are the real ones.
"""

from collections.abc import Callable, Mapping
from typing import Any

import diffusers
import torch
import transformers
from diffusers import DiffusionPipeline
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn

from diffusers_models import CASES

WIDTH = 16  # of the text encoders

_CASES = {str(case): case for case in CASES}


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Words to one of 64 tokens; the same word to the same token. With the start and end that CLIP wants."""
    vocabulary = {"<pad>": 0, "</s>": 1, "<unk>": 2} | {chr(ord("a") + n): 3 + n for n in range(26)}
    fast = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # letters
    fast.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=fast, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=32
    )


def t5(seed: int = 10) -> nn.Module:
    config = transformers.T5Config(vocab_size=64, d_model=WIDTH, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    return _seeded(seed, lambda: transformers.T5EncoderModel(config))


def clip(width: int, seed: int = 11) -> nn.Module:
    config = transformers.CLIPTextConfig(
        vocab_size=64,
        hidden_size=width,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        projection_dim=width,
        max_position_embeddings=77,
        eos_token_id=1,
    )
    return _seeded(seed, lambda: transformers.CLIPTextModel(config))


def wan22(scheduler: Any = None, boundary_ratio: float = 0.875) -> DiffusionPipeline:
    """Two experts of one class; the first serves timesteps from boundary_ratio * 1000 on."""
    return diffusers.WanPipeline(
        tokenizer=tokenizer(),
        text_encoder=t5(),
        vae=None,
        scheduler=scheduler or diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0),
        transformer=_transformer("WanTransformer3DModel"),
        transformer_2=_transformer("WanTransformer3DModel", seed=1),
        boundary_ratio=boundary_ratio,
    )


def flux() -> DiffusionPipeline:
    return diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=None,
        text_encoder=clip(8),
        tokenizer=tokenizer(),
        text_encoder_2=t5(),
        tokenizer_2=tokenizer(),
        transformer=_transformer("FluxTransformer2DModel"),
    )


def ltx() -> DiffusionPipeline:
    return diffusers.LTXPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift_terminal=0.1),
        vae=None,
        text_encoder=t5(),
        tokenizer=tokenizer(),
        transformer=_transformer("LTXVideoTransformer3DModel"),
    )


def cogvideox() -> DiffusionPipeline:
    return diffusers.CogVideoXPipeline(
        tokenizer=tokenizer(),
        text_encoder=t5(),
        vae=None,
        transformer=_transformer("CogVideoXTransformer3DModel"),
        scheduler=diffusers.CogVideoXDPMScheduler(timestep_spacing="trailing", rescale_betas_zero_snr=True, prediction_type="v_prediction"),
    )


# What each is called with; [height, width, frames] give a few key tiles.
CALLS: Mapping[Callable[[], DiffusionPipeline], Mapping[str, Any]] = {
    wan22: {"height": 128, "width": 256, "num_frames": 9, "guidance_scale": 3.0, "negative_prompt": "no", "max_sequence_length": 16},
    flux: {"height": 256, "width": 256, "guidance_scale": 3.0, "max_sequence_length": 16},
    ltx: {"height": 256, "width": 512, "num_frames": 25, "guidance_scale": 3.0, "max_sequence_length": 64},
    cogvideox: {"height": 192, "width": 256, "num_frames": 9, "guidance_scale": 3.0, "max_sequence_length": 32},
}


def run(pipe: DiffusionPipeline, steps: int = 8, seed: int = 0, **kwargs: Any) -> Tensor:
    """The latents of one call with a fixed prompt."""
    pipe.set_progress_bar_config(disable=True)
    call = next(given for build, given in CALLS.items() if build.__name__ == _NAMES[type(pipe).__name__])
    generator = torch.Generator().manual_seed(seed)
    arguments = {"prompt": "a cat", "num_inference_steps": steps, "output_type": "latent", "return_dict": False, **call, **kwargs}
    return pipe(generator=generator, **arguments)[0]


_NAMES = {"WanPipeline": "wan22", "FluxPipeline": "flux", "LTXPipeline": "ltx", "CogVideoXPipeline": "cogvideox"}


def _seeded(seed: int, build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build().eval().requires_grad_(False)


def _transformer(name: str, seed: int = 0) -> nn.Module:
    """With queries of a head in one direction, long enough that whole key tiles weigh nothing, whatever the input.

    A tile is skipped only if all 64 rows of a group agree, and the rows of random weights and inputs never do. Here scores differ by key
    more than by row: through the bias, or where queries are normalised, through the norm's weight.
    """
    model = _seeded(seed, lambda: _CASES[name].model_class(**_CASES[name].config))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for module in model.modules():
            parts = dict(module.named_children())
            for part in filter(parts.__contains__, ("to_q", "add_q_proj")):
                parts[part].bias = nn.Parameter(16 * torch.randn(parts[part].out_features), requires_grad=False)
            for part in filter(parts.__contains__, ("norm_q", "norm_added_q", "to_v", "add_v_proj")):
                if getattr(parts[part], "weight", None) is not None:
                    parts[part].weight.mul_(8)
    return model
