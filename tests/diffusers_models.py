"""The case table of diffusers: every model class with a tiny config, what to call it with, and which of its attention calls may skip.

The weights are random, made such that some tiles can be skipped (see `make_skippable`), and nothing is downloaded. Sizes are the
smallest that the classes allow with four key tiles or more where it counts. Text is padded to whole groups of 64 rows.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import diffusers
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from skip_attn_compile.reference import reference_attention

Inputs = dict[str, Any]
Counts = dict[str, tuple[int, int]]  # attention call -> tiles (visited, skipped)

HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
# HunyuanVideo's refiner: the product of a key mask with itself, but every row has the first key.
GENERAL_MASK = "mask {} is not a key mask [batch|1, 1, 1, keys], nor one and-ed with a query mask [batch|1, 1, queries, 1]"


@dataclass(frozen=True)
class ModelCase:
    """One model class. `rewritten` and `kept` name all the attention calls that Dynamo's graphs hold."""

    name: str
    model_class: type[nn.Module]
    config: Mapping[str, Any]
    inputs: Callable[["Draw"], Inputs]
    rewritten: tuple[str, ...]
    kept: Mapping[str, str] = field(default_factory=dict)  # name -> the reason
    mask: str | None = None  # the argument that says which tokens of encoder_hidden_states (and what follows) are real
    inner: str = "aot_eager"
    skips: bool = True  # some tile is skipped at threshold 0.3
    attach: bool = False  # needed: Dynamo skips the model's own frame, and its graphs belong to parts of the model

    def __str__(self) -> str:
        return self.name

    def build(self, seed: int = 0) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = self.model_class(**self.config).eval().requires_grad_(False)
            make_skippable(model)
        return model

    def draw(self, seed: int = 1) -> Inputs:
        return self.inputs(Draw(seed))


class Draw:
    """Random inputs."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator)


def make_skippable(model: nn.Module, bias: float = 16.0, gain: float = 8.0) -> None:
    """Give all queries of a head one direction, long enough that whole key tiles weigh nothing, and attention a large part in the output.

    A tile is skipped only if all 64 rows of a group agree, and the rows of random weights never do. Here scores differ by key more than
    by row, with a standard deviation of several nats: through the bias, or where queries are normalised, through the norm's weight.
    """
    for module in model.modules():
        parts = dict(module.named_children())
        for name in filter(parts.__contains__, ("to_q", "add_q_proj")):
            parts[name].bias = nn.Parameter(bias * torch.randn(parts[name].out_features), requires_grad=False)
        for name in filter(parts.__contains__, ("norm_q", "norm_added_q", "to_v", "add_v_proj")):
            if getattr(parts[name], "weight", None) is not None:
                parts[name].weight.mul_(gain)


def padding_mask(*lengths: int, size: int) -> Tensor:
    """Boolean [B, size]: the first `length` tokens of each item are real."""
    return torch.arange(size) < torch.tensor(lengths)[:, None]


def poisoned(case: ModelCase, inputs: Inputs) -> Inputs:
    """Large numbers wherever the mask says that there is no token."""
    assert case.mask is not None
    text = inputs["encoder_hidden_states"]
    real = inputs[case.mask][:, : text.shape[1], None]
    return {**inputs, "encoder_hidden_states": torch.where(real, text, 100 * Draw(7)(*text.shape).to(text))}


def cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """`inputs` with every floating-point tensor in `dtype`."""
    return {name: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in inputs.items()}


@contextlib.contextmanager
def attention_by_reference(model: nn.Module, thresholds: Mapping[str, float]) -> Iterator[Counts]:
    """Inside, the eager model's attention calls that `thresholds` names are the reference at that lambda; the others stay SDPA.

    A name is the module's, with #1, #2 ... for its second, third ... call. Yields a dict that gets each one's (visited, skipped) tiles.
    """
    names = {module: name for name, module in model.named_modules()}
    running: list[str] = []
    calls: Counter[str] = Counter()
    counts: Counts = {}
    original = F.scaled_dot_product_attention

    def replaced(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        module = running[-1]
        name = f"{module}#{calls[module]}" if calls[module] else module
        calls[module] += 1
        if name not in thresholds:
            return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        assert dropout_p == 0
        threshold = torch.tensor(thresholds[name])
        out, _, tiles = reference_attention(query, key, value, threshold, attn_mask, is_causal=is_causal, scale=scale)
        visited, skipped = tiles.sum((0, 1)).tolist()
        before = counts.get(name, (0, 0))
        counts[name] = (before[0] + visited, before[1] + skipped)
        return out

    def enter(module: nn.Module, _: object) -> None:
        running.append(names[module])

    def leave(*_: object) -> None:
        running.pop()

    hooks = register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)
    F.scaled_dot_product_attention = replaced
    try:
        yield counts
    finally:
        F.scaled_dot_product_attention = original
        for hook in hooks:
            hook.remove()


def _wan(draw: Draw) -> Inputs:
    return {
        "hidden_states": draw(1, 4, 3, 28, 28),  # 588 tokens
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": draw(1, 160, 16),
    }


def _wan_i2v(draw: Draw) -> Inputs:
    return {**_wan(draw), "encoder_hidden_states": draw(1, 512, 16), "encoder_hidden_states_image": draw(1, 257, 24)}


def _flux(draw: Draw) -> Inputs:
    rows, columns = torch.meshgrid(torch.arange(16.0), torch.arange(32.0), indexing="ij")
    return {
        "hidden_states": draw(1, 512, 4),
        "encoder_hidden_states": draw(1, 48, 16),
        "pooled_projections": draw(1, 8),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.stack([torch.zeros(16, 32), rows, columns], -1).flatten(0, 1),
        "txt_ids": torch.zeros(48, 3),
    }


def _chroma(draw: Draw) -> Inputs:
    """With a boolean mask. The one that diffusers' pipeline makes is of the model's dtype, and added to the scores."""
    inputs = {name: x for name, x in _flux(draw).items() if name != "pooled_projections"}
    text = {"encoder_hidden_states": draw(1, 64, 16), "txt_ids": torch.zeros(64, 3)}
    return {**inputs, **text, "attention_mask": F.pad(padding_mask(20, size=64), (0, 512), value=True)}


def _cogvideox(draw: Draw) -> Inputs:
    return {
        "hidden_states": draw(1, 3, 4, 24, 32),  # 576 tokens
        "encoder_hidden_states": draw(1, 32, 16),
        "timestep": torch.tensor([500]),
    }


def _hunyuan_video(draw: Draw) -> Inputs:
    return {
        "hidden_states": draw(2, 4, 2, 32, 32),  # 512 tokens
        "timestep": torch.tensor([500.0, 500.0]),
        "encoder_hidden_states": draw(2, 128, 16),
        "encoder_attention_mask": padding_mask(64, 128, size=128),
        "pooled_projections": draw(2, 8),
    }


def _hunyuan_video_15(draw: Draw) -> Inputs:
    return {
        "hidden_states": draw(2, 4, 2, 16, 16),  # 512 tokens
        "timestep": torch.tensor([500.0, 500.0]),
        "encoder_hidden_states": draw(2, 96, 16),
        "encoder_attention_mask": padding_mask(40, 96, size=96),
        "encoder_hidden_states_2": draw(2, 29, 8),
        "encoder_attention_mask_2": padding_mask(10, 29, size=29),
        "image_embeds": torch.zeros(2, 3, 8),  # none: 96 + 29 + 3 tokens of text
    }


def _ltx(draw: Draw) -> Inputs:
    return {
        "hidden_states": draw(2, 512, 8),
        "encoder_hidden_states": draw(2, 64, 16),
        "timestep": torch.tensor([500.0, 500.0]),
        "encoder_attention_mask": padding_mask(20, 64, size=64),
        "num_frames": 2,
        "height": 16,
        "width": 16,
    }


def _sd3(draw: Draw) -> Inputs:
    return {
        "hidden_states": draw(1, 4, 64, 32),  # 512 tokens
        "encoder_hidden_states": draw(1, 40, 16),
        "pooled_projections": draw(1, 8),
        "timestep": torch.tensor([500.0]),
    }


def _qwen_image(draw: Draw) -> Inputs:
    return {
        "hidden_states": draw(2, 512, 16),
        "encoder_hidden_states": draw(2, 128, 16),
        "encoder_hidden_states_mask": padding_mask(64, 128, size=128),
        "timestep": torch.tensor([0.5, 0.5]),
        "img_shapes": [[(1, 16, 32)]] * 2,
    }


def _pixart(draw: Draw) -> Inputs:
    return {
        "hidden_states": draw(2, 4, 64, 32),  # 512 tokens
        "encoder_hidden_states": draw(2, 64, 16),
        "encoder_attention_mask": padding_mask(20, 64, size=64),
        "timestep": torch.tensor([500, 500]),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


def _sana(draw: Draw) -> Inputs:
    return {"hidden_states": draw(1, 4, 16, 16), "encoder_hidden_states": draw(1, 520, 16), "timestep": torch.tensor([500.0])}


def _sana_masked(draw: Draw) -> Inputs:
    return {**_sana(draw), "encoder_attention_mask": padding_mask(300, size=520)}


def _auraflow(draw: Draw) -> Inputs:
    # The norm of its queries has no weight, so the keys must differ by tile: every 8 rows of 16 tokens have a level.
    levels = 2 * draw(1, 4, 4, 1).repeat_interleave(16, dim=2)
    return {
        "hidden_states": draw(1, 4, 64, 32) + levels,  # 512 tokens
        "encoder_hidden_states": draw(1, 40, 16),
        "timestep": torch.tensor([0.5]),
    }


def _lumina2(draw: Draw) -> Inputs:
    return {
        "hidden_states": draw(2, 4, 64, 32),  # 512 tokens
        "encoder_hidden_states": draw(2, 128, 16),
        "encoder_attention_mask": padding_mask(64, 128, size=128),
        "timestep": torch.tensor([0.5, 0.5]),
    }


def _mochi(draw: Draw) -> Inputs:
    return {
        "hidden_states": draw(1, 4, 2, 32, 32),  # 512 tokens
        "encoder_hidden_states": draw(1, 64, 16),
        "encoder_attention_mask": padding_mask(20, size=64),
        "timestep": torch.tensor([500]),
    }


def _names(*patterns: str, blocks: int = 2) -> tuple[str, ...]:
    """blocks.{}.attn1 for every block, in call order."""
    return tuple(pattern.format(n) for n in range(blocks) for pattern in patterns)


WAN = ModelCase(
    "Wan",
    diffusers.WanTransformer3DModel,
    {**HEADS, "in_channels": 4, "out_channels": 4, "text_dim": 16, "freq_dim": 16, "ffn_dim": 64, "num_layers": 2},
    _wan,
    rewritten=_names("blocks.{}.attn1", "blocks.{}.attn2"),
    inner="inductor",
)

MODELS = [
    WAN,
    ModelCase(
        "WanI2V",
        diffusers.WanTransformer3DModel,
        {**WAN.config, "num_layers": 1, "image_dim": 24, "added_kv_proj_dim": 32},
        _wan_i2v,
        rewritten=_names("blocks.{}.attn1", "blocks.{}.attn2", "blocks.{}.attn2#1", blocks=1),
    ),
    ModelCase(
        "Flux",
        diffusers.FluxTransformer2DModel,
        {
            **HEADS,
            "in_channels": 4,
            "num_layers": 1,
            "num_single_layers": 2,
            "joint_attention_dim": 16,
            "pooled_projection_dim": 8,
            "axes_dims_rope": (4, 6, 6),
        },
        _flux,
        rewritten=("transformer_blocks.0.attn", *_names("single_transformer_blocks.{}.attn")),
        inner="inductor",
    ),
    ModelCase(
        "Chroma",
        diffusers.ChromaTransformer2DModel,
        {
            **HEADS,
            "in_channels": 4,
            "num_layers": 1,
            "num_single_layers": 2,
            "joint_attention_dim": 16,
            "axes_dims_rope": (4, 6, 6),
            "approximator_num_channels": 8,
            "approximator_hidden_dim": 16,
            "approximator_layers": 1,
        },
        _chroma,
        rewritten=("transformer_blocks.0.attn", *_names("single_transformer_blocks.{}.attn")),
        mask="attention_mask",
    ),
    ModelCase(
        "CogVideoX",
        diffusers.CogVideoXTransformer3DModel,
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "time_embed_dim": 8,
            "text_embed_dim": 16,
            "num_layers": 2,
            "sample_width": 32,
            "sample_height": 24,
            "sample_frames": 9,
            "max_text_seq_length": 32,
        },
        _cogvideox,
        rewritten=_names("transformer_blocks.{}.attn1"),
        inner="inductor",
    ),
    ModelCase(
        "HunyuanVideo",
        diffusers.HunyuanVideoTransformer3DModel,
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 1,
            "num_single_layers": 2,
            "num_refiner_layers": 1,
            "guidance_embeds": False,
            "text_embed_dim": 16,
            "pooled_projection_dim": 8,
            "rope_axes_dim": (4, 6, 6),
        },
        _hunyuan_video,
        rewritten=("transformer_blocks.0.attn", *_names("single_transformer_blocks.{}.attn")),
        kept={"context_embedder.token_refiner.refiner_blocks.0.attn": GENERAL_MASK.format("[2, 2, 128, 128]")},
        mask="encoder_attention_mask",
    ),
    ModelCase(
        "HunyuanVideo15",
        diffusers.HunyuanVideo15Transformer3DModel,
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "num_refiner_layers": 1,
            "text_embed_dim": 16,
            "text_embed_2_dim": 8,
            "image_embed_dim": 8,
            "rope_axes_dim": (4, 6, 6),
        },
        _hunyuan_video_15,
        rewritten=("context_embedder.token_refiner.refiner_blocks.0.attn", *_names("transformer_blocks.{}.attn")),
        mask="encoder_attention_mask",
        attach=True,
    ),
    ModelCase(
        "LTX",
        diffusers.LTXVideoTransformer3DModel,
        {**HEADS, "in_channels": 8, "out_channels": 8, "cross_attention_dim": 32, "num_layers": 2, "caption_channels": 16},
        _ltx,
        rewritten=_names("transformer_blocks.{}.attn1", "transformer_blocks.{}.attn2"),
        mask="encoder_attention_mask",
    ),
    ModelCase(
        "SD3",
        diffusers.SD3Transformer2DModel,
        {
            **HEADS,
            "sample_size": 64,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "joint_attention_dim": 16,
            "caption_projection_dim": 32,
            "pooled_projection_dim": 8,
            "pos_embed_max_size": 32,
            "dual_attention_layers": (0,),
            "qk_norm": "rms_norm",
        },
        _sd3,
        rewritten=("transformer_blocks.0.attn", "transformer_blocks.0.attn2", "transformer_blocks.1.attn"),
    ),
    ModelCase(
        "QwenImage",
        diffusers.QwenImageTransformer2DModel,
        {**HEADS, "in_channels": 16, "out_channels": 4, "num_layers": 2, "joint_attention_dim": 16, "axes_dims_rope": (4, 6, 6)},
        _qwen_image,
        rewritten=_names("transformer_blocks.{}.attn"),
        mask="encoder_hidden_states_mask",
    ),
    ModelCase(
        "PixArt",
        diffusers.PixArtTransformer2DModel,
        {
            **HEADS,
            "num_layers": 2,
            "cross_attention_dim": 32,
            "sample_size": 64,
            "caption_channels": 16,
            "use_additional_conditions": False,
        },
        _pixart,
        rewritten=_names("transformer_blocks.{}.attn1", "transformer_blocks.{}.attn2"),
        mask="encoder_attention_mask",
    ),
    *(
        ModelCase(
            name,
            diffusers.SanaTransformer2DModel,  # its attn1 is linear attention, not SDPA
            {
                **HEADS,
                "in_channels": 4,
                "out_channels": 4,
                "num_layers": 2,
                "num_cross_attention_heads": 2,
                "cross_attention_head_dim": 16,
                "cross_attention_dim": 32,
                "caption_channels": 16,
                "sample_size": 16,
            },
            inputs,
            rewritten=_names("transformer_blocks.{}.attn2"),
            mask=mask,
        )
        for name, inputs, mask in (("Sana", _sana, None), ("SanaMasked", _sana_masked, "encoder_attention_mask"))
    ),
    ModelCase(
        "AuraFlow",
        diffusers.AuraFlowTransformer2DModel,
        {
            **HEADS,
            "sample_size": 64,
            "in_channels": 4,
            "out_channels": 4,
            "num_mmdit_layers": 1,
            "num_single_dit_layers": 2,
            "joint_attention_dim": 16,
            "caption_projection_dim": 32,
        },
        _auraflow,
        rewritten=("joint_transformer_blocks.0.attn", *_names("single_transformer_blocks.{}.attn")),
    ),
    ModelCase(
        "Lumina2",
        diffusers.Lumina2Transformer2DModel,
        {
            "sample_size": 64,
            "in_channels": 4,
            "hidden_size": 32,
            "num_layers": 2,
            "num_refiner_layers": 1,
            "num_attention_heads": 2,
            "num_kv_heads": 1,
            "multiple_of": 16,
            "axes_dim_rope": (4, 6, 6),
            "axes_lens": (160, 64, 64),
            "cap_feat_dim": 16,
        },
        _lumina2,
        rewritten=("context_refiner.0.attn", "noise_refiner.0.attn", *_names("layers.{}.attn")),
        mask="encoder_attention_mask",
    ),
    ModelCase(
        "Mochi",
        diffusers.MochiTransformer3DModel,  # Dynamo leaves the processor of attn1 to eager Python (nonzero), and no backend sees it
        {
            **HEADS,
            "num_layers": 2,
            "pooled_projection_dim": 16,
            "in_channels": 4,
            "text_embed_dim": 16,
            "time_embed_dim": 8,
            "max_sequence_length": 64,
        },
        _mochi,
        rewritten=("time_embed.pooler",),
        skips=False,
        attach=True,
    ),
]
