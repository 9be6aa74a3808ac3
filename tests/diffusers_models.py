"""A tiny model of every diffusers transformer: its configuration, and what to call it with. Nothing is downloaded.

`transformer_classes()` asks the installed diffusers; `CASES` says how to make each class small. The classes need nothing else of ours.
Weights are random and inputs are drawn such that some key tiles can be skipped: see `Draw` and `randomize`.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

Inputs = dict[str, Any]

HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
ROPE = (4, 6, 6)  # of 16
TEXT = 64  # tokens: whole groups of 64 rows, so that those of a joint sequence are of one kind
T = torch.tensor([500.0])
SIGMA = torch.tensor([0.5])


def transformer_classes() -> dict[str, type[nn.Module]]:
    """Every transformer class that the installed diffusers exports, and the UNet with transformer blocks in it."""
    exported = {name: getattr(diffusers, name) for name in diffusers._import_structure["models"]}
    return {
        name: value
        for name, value in exported.items()
        if inspect.isclass(value)
        and issubclass(value, nn.Module)
        and (value.__module__.startswith("diffusers.models.transformers.") or name == "UNet2DConditionModel")
    }


class Draw:
    """Random inputs in four levels: along the tokens of [B, N, C], or along frames and rows of [B, C, (F,) H, W].

    A tile is skipped only if all 64 rows of a group agree, and those of plain noise never do. Here neighbours are alike, as they are in
    pictures: the rows of a group point the same way, and the keys of another level do not.
    """

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        noise = torch.randn(shape, generator=self._generator)
        along = {2: (), 3: (1,), 4: (2,), 5: (2, 3)}.get(len(shape), ())
        coarse = [min(size, 4) if dim in along else 1 if dim > 1 and len(shape) > 3 else size for dim, size in enumerate(shape)]
        levels = torch.randn(coarse, generator=self._generator)
        for dim in along:
            levels = levels.repeat_interleave(-(-shape[dim] // coarse[dim]), dim).narrow(dim, 0, shape[dim])
        return 0.5 * noise + 2 * levels if along else noise


@dataclass(frozen=True)
class Case:
    """One model.

    inputs(draw, rows): what to call it with at `rows` rows of 16 image tokens.
    mask: the argument that masks the text. outside: patterns of the attention calls that no graph of torch.compile holds.
    attends: by scaled_dot_product_attention, as nearly all do.
    """

    class_name: str
    config: Mapping[str, Any]
    inputs: Callable[[Draw, int], Inputs]
    variant: str = ""
    mask: str | None = None
    outside: tuple[str, ...] = ()
    attends: bool = True

    def __str__(self) -> str:
        return self.class_name + (f"-{self.variant}" if self.variant else "")

    @property
    def model_class(self) -> type[nn.Module]:
        return getattr(diffusers, self.class_name)

    def build(self, seed: int = 0) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = self.model_class(**self.config).float().eval().requires_grad_(False)
            randomize(model)
        return model

    def draw(self, rows: int = 32, seed: int = 1) -> Inputs:
        return self.inputs(Draw(seed), rows)


def randomize(model: nn.Module, gain: float = 2.0) -> None:
    """Weights that keep magnitudes, twice over: scores spread over nats, and no gate that training starts at zero hides attention."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and parameter.numel():
            parameter.normal_(0, gain * parameter[0].numel() ** -0.5)
        elif name.endswith(("weight", "gamma")):  # of a norm
            parameter.mul_(gain)


def cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """`inputs` with every floating-point tensor in `dtype`."""
    return pytree.tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, inputs)


def run(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """All tensors that the model returns."""
    inputs = pytree.tree_map(lambda x: x, inputs)  # some models change the lists they are given
    if "return_dict" in inspect.signature(getattr(model, "_orig_mod", model).forward).parameters:
        inputs["return_dict"] = False
    with torch.no_grad():
        return [x for x in pytree.tree_leaves(model(**inputs)) if isinstance(x, Tensor)]


def run_exact(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """The same of a float64 model; where it insists on float32 inside, it goes on in float64 after that."""

    def widen(module: nn.Module, args: tuple[Any, ...]) -> Any:
        if next(module.parameters(recurse=False), torch.empty(0)).dtype == torch.float64:
            return pytree.tree_map_only(Tensor, lambda x: x.double() if x.dtype == torch.float32 else x, args)
        return None

    hook = register_module_forward_pre_hook(widen)
    try:
        return run(model, cast(inputs, torch.float64))
    finally:
        hook.remove()


def poisoned(case: Case, inputs: Inputs) -> Inputs:
    """Large numbers wherever the mask says that there is no token."""
    assert case.mask is not None
    text = inputs["encoder_hidden_states"]
    real = inputs[case.mask][:, : text.shape[1], None]
    return {**inputs, "encoder_hidden_states": torch.where(real, text, 10 * torch.ones_like(text).cumsum(1).sin())}


def padding_mask(*lengths: int, size: int = TEXT) -> Tensor:
    """Boolean [B, size]: the first `length` tokens of each item are real."""
    return torch.arange(size) < torch.tensor(lengths)[:, None]


def _video(draw: Draw, rows: int, channels: int = 4, batch: int = 1) -> Tensor:
    """Latents of two frames, for patches of 2 x 2."""
    return draw(batch, channels, 2, rows, 32)


def _image(draw: Draw, rows: int, channels: int = 4, batch: int = 1) -> Tensor:
    """Latents for patches of 2 x 2."""
    return draw(batch, channels, 2 * rows, 32)


def _grid(rows: int, axes: int = 3) -> Tensor:
    """Positions of `rows` rows of 16 tokens, [N, axes]."""
    row, column = torch.meshgrid(torch.arange(float(rows)), torch.arange(16.0), indexing="ij")
    return torch.stack([*[torch.zeros_like(row)] * (axes - 3), torch.zeros_like(row), row, column], -1).flatten(0, 1)


def _wan(draw: Draw, rows: int) -> Inputs:
    return {"hidden_states": _video(draw, rows), "timestep": T, "encoder_hidden_states": draw(1, 160, 16)}


def _frames_first(draw: Draw, rows: int) -> Inputs:
    """[B, F, C, H, W], and a timestep for each frame."""
    return {"hidden_states": _video(draw, rows).transpose(1, 2).contiguous(), "timestep": T.expand(1, 2), "r_timestep": T.expand(1, 2)}


def _wan_animate2(draw: Draw, rows: int) -> Inputs:
    from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache

    return {
        "hidden_states": [_video(draw, rows)[0]],
        "timestep": T,
        "encoder_hidden_states": [draw(1, TEXT, 16)[0]],
        "condition_latents": [_video(draw, rows)[0]],
        "encoder_hidden_states_image": draw(1, 257, 1280),
        "kv_cache": WanAnimate2KVCache(2),
        "kv_cache_mode": "extract",
        "seq_len": 16 * rows,
        "offset_grid_sizes": torch.tensor([[2, rows // 2, 16]]),
    }


def _flux(draw: Draw, rows: int, axes: int = 3) -> Inputs:
    return {
        "hidden_states": draw(1, 16 * rows, 4),
        "encoder_hidden_states": draw(1, TEXT, 16),
        "timestep": SIGMA,
        "img_ids": _grid(rows, axes),
        "txt_ids": torch.zeros(TEXT, axes),
    }


def _masked_video(draw: Draw, rows: int) -> Inputs:
    return {
        "hidden_states": _video(draw, rows, batch=2),
        "timestep": T.repeat(2),
        "encoder_hidden_states": draw(2, 128, 16),
        "encoder_attention_mask": padding_mask(64, 128, size=128),
    }


def _masked_image(draw: Draw, rows: int) -> Inputs:
    return {**_masked_video(draw, 2), "hidden_states": _image(draw, rows, batch=2)}


def _cogvideo(draw: Draw, rows: int) -> Inputs:
    return {"hidden_states": draw(1, 2, 4, rows, 32), "encoder_hidden_states": draw(1, 32, 16), "timestep": T.long()}


def _cogview(draw: Draw, rows: int) -> Inputs:
    size = torch.tensor([[32.0 * rows, 512.0]])
    return {
        "hidden_states": _image(draw, rows),
        "encoder_hidden_states": draw(1, TEXT, 16),
        "timestep": T,
        "original_size": size,
        "target_size": size,
        "crop_coords": torch.zeros(1, 2),
    }


WAN_CONFIG = {
    **HEADS,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 16,
    "freq_dim": 16,
    "ffn_dim": 64,
    "num_layers": 2,
}
FLUX = {
    **HEADS,
    "in_channels": 4,
    "num_layers": 1,
    "num_single_layers": 2,
    "joint_attention_dim": 16,
    "axes_dims_rope": ROPE,
}
HUNYUAN = {
    **HEADS,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 1,
    "num_single_layers": 2,
    "num_refiner_layers": 1,
    "text_embed_dim": 16,
    "rope_axes_dim": ROPE,
}
COGVIDEO = {
    **HEADS,
    "in_channels": 4,
    "out_channels": 4,
    "time_embed_dim": 8,
    "text_embed_dim": 16,
    "num_layers": 2,
    "sample_width": 32,
    "sample_height": 32,
    "sample_frames": 5,
    "max_text_seq_length": 32,
}
LTX2 = {
    **HEADS,
    "in_channels": 4,
    "out_channels": 4,
    "cross_attention_dim": 32,
    "audio_in_channels": 4,
    "audio_out_channels": 4,
    "audio_num_attention_heads": 2,
    "audio_attention_head_dim": 8,
    "audio_cross_attention_dim": 16,
    "num_layers": 1,
    "caption_channels": 16,
    "rope_double_precision": False,
}
SANA = {
    **HEADS,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 16,
    "cross_attention_dim": 32,
    "caption_channels": 16,
    "sample_size": 16,
}
BLOCK_2D = {**HEADS, "in_channels": 32, "cross_attention_dim": 16, "norm_num_groups": 8}

WAN = Case("WanTransformer3DModel", WAN_CONFIG, _wan)

CASES = [
    WAN,
    Case(
        "WanTransformer3DModel",
        {**WAN_CONFIG, "num_layers": 1, "image_dim": 24, "added_kv_proj_dim": 32},
        lambda draw, rows: {
            **_wan(draw, rows),
            "encoder_hidden_states": draw(1, 512, 16),  # the model takes the last 512 for the text, the others for the image
            "encoder_hidden_states_image": draw(1, 257, 24),
        },
        variant="I2V",
    ),
    Case(
        "WanVACETransformer3DModel",
        {**WAN_CONFIG, "vace_layers": [0], "vace_in_channels": 4},
        lambda draw, rows: {**_wan(draw, rows), "control_hidden_states": _video(draw, rows)},
    ),
    Case(
        "WanAnimateTransformer3DModel",
        {
            **WAN_CONFIG,
            "in_channels": 12,
            "latent_channels": 4,
            "image_dim": 24,
            "added_kv_proj_dim": 32,
            "num_layers": 1,
            "motion_encoder_channel_sizes": {"4": 8, "8": 8, "16": 8},
            "motion_encoder_size": 16,
            "motion_style_dim": 8,
            "motion_dim": 4,
            "motion_encoder_dim": 16,
            "face_encoder_hidden_dim": 16,
            "face_encoder_num_heads": 2,
            "inject_face_latents_blocks": 1,
        },
        lambda draw, rows: {
            **_wan(draw, rows),
            "hidden_states": _video(draw, rows, 12),
            "encoder_hidden_states_image": draw(1, 257, 24),
            "pose_hidden_states": draw(1, 4, 1, rows, 32),
            "face_pixel_values": draw(1, 3, 1, 16, 16),
        },
    ),
    Case("ChronoEditTransformer3DModel", WAN_CONFIG, _wan),
    Case("SkyReelsV2Transformer3DModel", WAN_CONFIG, _wan),
    Case("AnyFlowTransformer3DModel", WAN_CONFIG, lambda draw, rows: {**_wan(draw, rows), **_frames_first(draw, rows)}),
    Case(
        "AnyFlowFARTransformer3DModel",  # self-attention is flex_attention
        {**WAN_CONFIG, "full_chunk_limit": 3},
        lambda draw, rows: {**_wan(draw, rows), **_frames_first(draw, rows), "chunk_partition": [1, 1]},
    ),
    Case(
        "WanAnimate2Transformer3DModel",
        {
            "text_len": TEXT,
            "in_dim": 8,
            "dim": 32,
            "ffn_dim": 64,
            "freq_dim": 16,
            "text_dim": 16,
            "out_dim": 4,
            "num_heads": 2,
            "num_layers": 2,
        },
        _wan_animate2,
    ),
    Case(
        "HeliosTransformer3DModel",
        {**WAN_CONFIG, "rope_dim": (4, 6, 6), "num_layers": 1},
        lambda draw, rows: {
            **_wan(draw, rows),
            "indices_hidden_states": torch.ones(1, 2),
            "indices_latents_history_short": torch.ones(1, 1),
            "indices_latents_history_mid": torch.ones(1, 1),
            "indices_latents_history_long": torch.ones(1, 4),
            "latents_history_short": draw(1, 4, 1, rows, 32),
            "latents_history_mid": draw(1, 4, 1, rows, 32),
            "latents_history_long": draw(1, 4, 4, rows, 32),
        },
    ),
    Case(
        "FluxTransformer2DModel",
        {**FLUX, "pooled_projection_dim": 8},
        lambda draw, rows: {**_flux(draw, rows), "pooled_projections": draw(1, 8)},
    ),
    Case(
        "Flux2Transformer2DModel",
        {**FLUX, "timestep_guidance_channels": 16, "axes_dims_rope": (4, 4, 4, 4), "guidance_embeds": False},
        lambda draw, rows: _flux(draw, rows, axes=4),
    ),
    Case(
        "Flux3Transformer2DModel",
        {**FLUX, "cond_in_channels": 4, "timestep_channels": 16, "axes_dims_rope": (4, 4, 4, 4)},
        lambda draw, rows: _flux(draw, rows, axes=4),
    ),
    Case(
        "ChromaTransformer2DModel",
        {**FLUX, "approximator_num_channels": 8, "approximator_hidden_dim": 16, "approximator_layers": 1},
        # Boolean. The mask that diffusers' pipeline makes is of the model's dtype, and added to the scores.
        lambda draw, rows: {**_flux(draw, rows), "attention_mask": F.pad(padding_mask(20), (0, 16 * rows), value=True)},
        mask="attention_mask",
    ),
    Case("BriaTransformer2DModel", FLUX, _flux),
    Case(
        "BriaFiboTransformer2DModel",
        {**FLUX, "text_encoder_dim": 16},
        lambda draw, rows: {**_flux(draw, rows), "text_encoder_layers": [draw(1, TEXT, 16) for _ in range(3)]},
    ),
    Case(
        "BriaFibo2Transformer2DModel",
        {
            "in_channels": 4,
            "dim": 32,
            "n_layers": 2,
            "n_refiner_layers": 1,
            "n_heads": 2,
            "cap_feat_dim": 24,
            "injection_layer_ids": (1,),
            "perceiver_num_layers": 1,
            "min_num_gist_tokens": 64,
            "max_num_gist_tokens": 64,
            "gist_step": 64,
            "gist_min_text_len": 4,
            "gist_max_text_len": TEXT,
            "axes_dims": ROPE,
            "axes_lens": (128, 64, 64),
        },
        lambda draw, rows: {"hidden_states": _image(draw, rows), "timestep": SIGMA, "encoder_hidden_states": draw(1, 2, TEXT, 24)},
    ),
    Case(
        "OvisImageTransformer2DModel",
        {**FLUX, "out_channels": 4},
        _flux,
    ),
    Case("LongCatImageTransformer2DModel", {**FLUX, "pooled_projection_dim": 8, "axes_dims_rope": list(ROPE)}, _flux),
    Case(
        "QwenImageTransformer2DModel",
        {**HEADS, "in_channels": 16, "out_channels": 4, "num_layers": 2, "joint_attention_dim": 16, "axes_dims_rope": ROPE},
        lambda draw, rows: {
            "hidden_states": draw(2, 16 * rows, 16),
            "encoder_hidden_states": draw(2, 128, 16),
            "encoder_hidden_states_mask": padding_mask(64, 128, size=128),
            "timestep": SIGMA.repeat(2),
            "img_shapes": [[(1, rows, 16)]] * 2,
        },
        mask="encoder_hidden_states_mask",
    ),
    Case(
        "QwenImage21Transformer2DModel",
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "context_in_dim": 8,
            "mlp_ratio": 2,
            "axes_dims_rope": ROPE,
            "causal_condition": False,
        },
        lambda draw, rows: {
            "hidden_states": draw(1, 16 * rows, 4),
            "encoder_hidden_states": draw(1, TEXT, 8),
            "encoder_hidden_states_mask": torch.ones(1, TEXT, dtype=torch.long),
            "img_mask": torch.arange(TEXT + 4 * rows)[None] >= TEXT,
            "timestep": SIGMA,
            "img_shapes": [[(1, rows, 16)]],
        },
    ),
    Case(
        "HunyuanVideoTransformer3DModel",
        {**HUNYUAN, "guidance_embeds": False, "pooled_projection_dim": 8},
        lambda draw, rows: {**_masked_video(draw, rows), "pooled_projections": draw(2, 8)},
        mask="encoder_attention_mask",
    ),
    Case(
        "HunyuanVideo15Transformer3DModel",
        {
            **{k: v for k, v in HUNYUAN.items() if k != "num_single_layers"},
            "num_layers": 2,
            "text_embed_2_dim": 8,
            "image_embed_dim": 12,
            "task_type": "t2v",
        },
        lambda draw, rows: {
            "hidden_states": draw(1, 4, 2, rows // 2, 16),
            "timestep": T,
            "encoder_hidden_states": draw(1, TEXT, 16),
            "encoder_attention_mask": padding_mask(40),
            "encoder_hidden_states_2": draw(1, TEXT, 8),
            "encoder_attention_mask_2": padding_mask(20),
            "image_embeds": torch.zeros(1, 8, 12),  # none
        },
        mask="encoder_attention_mask",
    ),
    Case(
        "HunyuanImageTransformer2DModel",
        {**HUNYUAN, "rope_axes_dim": (8, 8), "text_embed_2_dim": 8},
        lambda draw, rows: {
            "hidden_states": draw(1, 4, rows, 16),
            "timestep": T,
            "encoder_hidden_states": draw(1, TEXT, 16),
            "encoder_attention_mask": padding_mask(40),
            "encoder_hidden_states_2": draw(1, TEXT, 8),
            "encoder_attention_mask_2": padding_mask(20),
        },
    ),
    Case(
        "HunyuanVideoFramepackTransformer3DModel",
        {
            **HUNYUAN,
            "guidance_embeds": False,
            "pooled_projection_dim": 8,
            "has_image_proj": True,
            "image_proj_dim": 16,
            "has_clean_x_embedder": True,
        },
        lambda draw, rows: {
            "hidden_states": _video(draw, rows),
            "timestep": T,
            "encoder_hidden_states": draw(1, TEXT, 16),
            "encoder_attention_mask": padding_mask(40),
            "pooled_projections": draw(1, 8),
            "image_embeds": draw(1, 8, 16),
            "indices_latents": torch.arange(2),
            "latents_clean": draw(1, 4, 1, rows, 32),
            "indices_latents_clean": torch.arange(1),
            "latents_history_2x": draw(1, 4, 2, rows, 32),
            "indices_latents_history_2x": torch.arange(2),
            "latents_history_4x": draw(1, 4, 4, rows, 32),
            "indices_latents_history_4x": torch.arange(4),
        },
    ),
    Case(
        "MotifVideoTransformer3DModel",
        {name: value for name, value in HUNYUAN.items() if name != "num_refiner_layers"},
        lambda draw, rows: {
            "hidden_states": _video(draw, rows),
            "timestep": T,
            "encoder_hidden_states": draw(1, 2 * TEXT, 16),
            "encoder_attention_mask": padding_mask(TEXT, size=2 * TEXT),  # whole groups: a padded row has a vote in its group
        },
        mask="encoder_attention_mask",
    ),
    Case(
        "CogVideoXTransformer3DModel",
        COGVIDEO,
        _cogvideo,
    ),
    Case(
        "ConsisIDTransformer3DModel",
        {**COGVIDEO, "is_train_face": False},
        _cogvideo,
    ),
    Case(
        "EasyAnimateTransformer3DModel",
        {
            **HEADS,
            "attention_head_dim": 16,
            "in_channels": 4,
            "out_channels": 4,
            "patch_size": 2,
            "num_layers": 2,
            "mmdit_layers": 1,
            "time_embed_dim": 8,
            "text_embed_dim": 16,
            "sample_width": 32,
            "sample_height": 32,
        },
        lambda draw, rows: {"hidden_states": _video(draw, rows), "timestep": T, "encoder_hidden_states": draw(1, TEXT, 16)},
    ),
    Case(
        "CogView3PlusTransformer2DModel",
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "text_embed_dim": 16,
            "time_embed_dim": 8,
            "condition_dim": 4,
            "pos_embed_max_size": 32,
            "sample_size": 32,
        },
        _cogview,
    ),
    Case(
        "CogView4Transformer2DModel",
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "text_embed_dim": 16,
            "time_embed_dim": 8,
            "condition_dim": 4,
            "rope_axes_dim": (64, 64),
        },
        _cogview,
    ),
    Case(
        "GlmImageTransformer2DModel",
        {
            **HEADS,
            "num_attention_heads": 4,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "text_embed_dim": 16,
            "time_embed_dim": 8,
            "condition_dim": 4,
            "prior_vq_quantizer_codebook_size": 64,
        },
        lambda draw, rows: {
            **{k: v for k, v in _cogview(draw, rows).items() if k != "original_size"},
            "prior_token_id": torch.arange(16 * rows)[None] // 64,
            "prior_token_drop": torch.zeros(1, 16 * rows, dtype=torch.bool),
        },
    ),
    Case(
        "SD3Transformer2DModel",
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
        lambda draw, rows: {
            "hidden_states": _image(draw, rows),
            "encoder_hidden_states": draw(1, TEXT, 16),
            "pooled_projections": draw(1, 8),
            "timestep": T,
        },
    ),
    Case(
        "LTXVideoTransformer3DModel",
        {**HEADS, "in_channels": 8, "out_channels": 8, "cross_attention_dim": 32, "num_layers": 2, "caption_channels": 16},
        lambda draw, rows: {
            "hidden_states": draw(2, 16 * rows, 8),
            "encoder_hidden_states": draw(2, TEXT, 16),
            "timestep": T.repeat(2),
            "encoder_attention_mask": padding_mask(20, 64),
            "num_frames": 2,
            "height": rows // 2,
            "width": 16,
        },
        mask="encoder_attention_mask",
    ),
    Case(
        "LTX2VideoTransformer3DModel",
        LTX2,
        lambda draw, rows: {
            "hidden_states": draw(1, 16 * rows, 4),
            "audio_hidden_states": draw(1, 160, 4),
            "encoder_hidden_states": draw(1, TEXT, 16),
            "audio_encoder_hidden_states": draw(1, TEXT, 16),
            "timestep": T,
            "encoder_attention_mask": padding_mask(20),
            "audio_encoder_attention_mask": padding_mask(20),
            "num_frames": 2,
            "height": rows // 2,
            "width": 16,
            "audio_num_frames": 160,
        },
        mask="encoder_attention_mask",
    ),
    Case(
        "PixArtTransformer2DModel",
        {
            **HEADS,
            "num_layers": 2,
            "cross_attention_dim": 32,
            "sample_size": 64,
            "caption_channels": 16,
            "use_additional_conditions": False,
        },
        lambda draw, rows: {
            **_masked_image(draw, rows),
            "timestep": T.long().repeat(2),
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        },
        mask="encoder_attention_mask",
    ),
    Case(
        "AllegroTransformer3DModel",
        {
            **HEADS,
            "attention_head_dim": 24,
            "num_layers": 2,
            "cross_attention_dim": 48,
            "caption_channels": 16,
            "sample_height": 32,
            "sample_width": 32,
            "sample_frames": 2,
        },
        lambda draw, rows: {
            "hidden_states": _video(draw, rows),
            "encoder_hidden_states": draw(1, TEXT, 16),
            "timestep": T.long(),
            "encoder_attention_mask": padding_mask(20),
            "image_rotary_emb": _allegro_rope(rows),
        },
    ),
    Case(
        "LatteTransformer3DModel",
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 1,
            "cross_attention_dim": 32,
            "sample_size": 64,
            "patch_size": 2,
            "norm_type": "ada_norm_single",
            "norm_elementwise_affine": False,
            "activation_fn": "gelu-approximate",
            "caption_channels": 16,
            "video_length": 2,
            "num_embeds_ada_norm": 1000,
            "attention_bias": True,
        },
        lambda draw, rows: {"hidden_states": draw(1, 4, 2, 2 * rows, 32), "encoder_hidden_states": draw(1, TEXT, 16), "timestep": T.long()},
    ),
    Case(
        "SanaTransformer2DModel",  # attn1 is linear attention, not SDPA
        SANA,
        lambda draw, rows: {"hidden_states": draw(1, 4, rows, 16), "encoder_hidden_states": draw(1, 520, 16), "timestep": T},
    ),
    Case(
        "SanaTransformer2DModel",
        SANA,
        lambda draw, rows: {
            "hidden_states": draw(1, 4, rows, 16),
            "encoder_hidden_states": draw(1, 520, 16),
            "timestep": T,
            "encoder_attention_mask": padding_mask(500, size=520),
        },
        variant="masked",
        mask="encoder_attention_mask",
    ),
    Case(
        "SanaVideoTransformer3DModel",
        SANA,
        lambda draw, rows: {"hidden_states": _video(draw, rows), "encoder_hidden_states": draw(1, 520, 16), "timestep": T},
    ),
    Case(
        "SanaWMTransformer3DModel",
        {
            "in_channels": 4,
            "num_layers": 2,
            "hidden_size": 32,
            "num_attention_heads": 2,
            "softmax_every_n": 2,
            "linear_head_dim": 16,
            "caption_channels": 8,
            "mlp_ratio": 2.0,
            "chunk_plucker_channels": 8,
            "chunk_plucker_post_attn_blocks": 2,
        },
        lambda draw, rows: {
            "hidden_states": draw(1, 4, 2, rows // 2, 16),
            "timestep": T.expand(1, 1, 2),
            "encoder_hidden_states": draw(1, 1, TEXT, 8),
            "encoder_attention_mask": torch.ones(1, TEXT, dtype=torch.long),
            "camera_conditions": torch.cat([torch.eye(4).flatten(), torch.tensor([16.0, rows // 2, 8.0, rows // 4])]).repeat(1, 2, 1),
            "chunk_plucker": draw(1, 8, 2, rows // 2, 16),
        },
    ),
    Case(
        "SanaWMLTX2RefinerTransformer3DModel",
        LTX2,
        lambda draw, rows: {
            "hidden_states": draw(1, 16 * rows, 4),
            "encoder_hidden_states": draw(1, TEXT, 16),
            "timestep": T[None].repeat(1, 16 * rows),
            "video_rotary_emb": (torch.ones(1, 16 * rows, 32), torch.zeros(1, 16 * rows, 32)),
        },
    ),
    Case(
        "AuraFlowTransformer2DModel",
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
        lambda draw, rows: {
            "hidden_states": _image(draw, rows),
            "encoder_hidden_states": draw(1, TEXT - 8, 16),
            "timestep": SIGMA,
        },  # 8 registers
    ),
    Case(
        "Lumina2Transformer2DModel",
        {
            "sample_size": 64,
            "in_channels": 4,
            "hidden_size": 32,
            "num_layers": 2,
            "num_refiner_layers": 1,
            "num_attention_heads": 2,
            "num_kv_heads": 1,
            "multiple_of": 16,
            "axes_dim_rope": ROPE,
            "axes_lens": (160, 64, 64),
            "cap_feat_dim": 16,
        },
        lambda draw, rows: {**_masked_image(draw, rows), "timestep": SIGMA.repeat(2)},
        mask="encoder_attention_mask",
    ),
    Case(
        "LuminaNextDiT2DModel",
        {
            "sample_size": 64,
            "hidden_size": 32,
            "num_layers": 2,
            "num_attention_heads": 2,
            "num_kv_heads": 2,
            "multiple_of": 16,
            "cross_attention_dim": 16,
        },
        lambda draw, rows: {
            "hidden_states": _image(draw, rows),
            "timestep": SIGMA,
            "encoder_hidden_states": draw(1, TEXT, 16),
            "encoder_mask": padding_mask(40),
            "image_rotary_emb": _lumina_rope(),
            "cross_attention_kwargs": {},
        },
    ),
    Case(
        "ZImageTransformer2DModel",
        {
            "in_channels": 4,
            "dim": 32,
            "n_layers": 2,
            "n_refiner_layers": 1,
            "n_heads": 2,
            "n_kv_heads": 2,
            "cap_feat_dim": 16,
            "axes_dims": list(ROPE),
            "axes_lens": [128, 64, 64],
        },
        lambda draw, rows: {"x": [_image(draw, rows)[0][:, None]], "t": SIGMA, "cap_feats": [draw(1, TEXT, 16)[0]]},
    ),
    Case(
        "HiDreamImageTransformer2DModel",
        {
            "patch_size": 2,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 1,
            "num_single_layers": 1,
            **HEADS,
            "caption_channels": [16, 16],
            "text_emb_dim": 8,
            "num_routed_experts": 2,
            "num_activated_experts": 1,
            "axes_dims_rope": ROPE,
            "max_resolution": (64, 64),
            "llama_layers": (0, 1),
            "force_inference_output": True,
        },
        lambda draw, rows: {
            "hidden_states": draw(1, 4, 64, 64) if rows == 32 else draw(1, 4, 48, 64),
            "timesteps": T,
            "encoder_hidden_states_t5": draw(1, TEXT, 16),
            "encoder_hidden_states_llama3": draw(2, 1, TEXT, 16),
            "pooled_embeds": draw(1, 8),
        },
    ),
    Case(
        "MochiTransformer3DModel",  # Dynamo leaves the processor of attn1 to eager Python (nonzero), and no backend sees it
        {
            **HEADS,
            "num_layers": 2,
            "pooled_projection_dim": 16,
            "in_channels": 4,
            "text_embed_dim": 16,
            "time_embed_dim": 8,
            "max_sequence_length": TEXT,
        },
        lambda draw, rows: {
            "hidden_states": _video(draw, rows),
            "encoder_hidden_states": draw(1, TEXT, 16),
            "encoder_attention_mask": padding_mask(20),
            "timestep": T.long(),
        },
        outside=("transformer_blocks.*.attn1",),
    ),
    Case(
        "HunyuanDiT2DModel",
        {
            **HEADS,
            "in_channels": 4,
            "patch_size": 2,
            "sample_size": 64,
            "hidden_size": 32,
            "num_layers": 2,
            "mlp_ratio": 2.0,
            "cross_attention_dim": 8,
            "cross_attention_dim_t5": 8,
            "pooled_projection_dim": 4,
            "text_len": 32,
            "text_len_t5": 32,
        },
        lambda draw, rows: {
            "hidden_states": _image(draw, rows),
            "timestep": T,
            "encoder_hidden_states": draw(1, 32, 8),
            "text_embedding_mask": padding_mask(20, size=32),
            "encoder_hidden_states_t5": draw(1, 32, 8),
            "text_embedding_mask_t5": padding_mask(20, size=32),
            "image_meta_size": torch.ones(1, 6),
            "style": torch.zeros(1, dtype=torch.long),
            "image_rotary_emb": [torch.ones(16 * rows, 16), torch.zeros(16 * rows, 16)],
        },
    ),
    Case(
        "DiTTransformer2DModel",
        {**HEADS, "num_layers": 2, "sample_size": 32, "norm_num_groups": 8},
        lambda draw, rows: {
            "hidden_states": draw(1, 4, 48, 48) if rows == 32 else draw(1, 4, 32, 32),
            "timestep": T.long(),
            "class_labels": torch.tensor([1]),
        },
    ),
    Case(
        "PRXTransformer2DModel",
        {"in_channels": 4, "context_in_dim": 16, "hidden_size": 32, "num_heads": 2, "depth": 2, "axes_dim": [8, 8]},
        lambda draw, rows: {
            "hidden_states": _image(draw, rows),
            "timestep": SIGMA,
            "encoder_hidden_states": draw(1, TEXT, 16),
            "attention_mask": padding_mask(40),
        },
        mask="attention_mask",
    ),
    Case(
        "CosmosTransformer3DModel",
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "mlp_ratio": 2.0,
            "text_embed_dim": 16,
            "adaln_lora_dim": 4,
            "max_size": (4, 64, 64),
            "concat_padding_mask": False,
            "extra_pos_embed_type": None,
        },
        lambda draw, rows: {"hidden_states": _video(draw, rows), "timestep": SIGMA, "encoder_hidden_states": draw(1, TEXT, 16), "fps": 30},
    ),
    Case(
        "Cosmos3OmniTransformer",
        {
            "head_dim": 16,
            "hidden_size": 32,
            "intermediate_size": 32,
            "latent_channel": 4,
            "latent_patch_size": 1,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "num_key_value_heads": 1,
            "patch_latent_dim": 4,
            "rope_axes_dim": [2, 3, 3],
            "vocab_size": 32,
        },
        lambda draw, rows: {
            "input_ids": torch.arange(TEXT) % 32,
            "text_indexes": torch.arange(TEXT),
            "position_ids": torch.cat([torch.arange(TEXT)[:, None].expand(-1, 3), _grid(rows).long()]).T.contiguous(),
            "und_len": TEXT,
            "sequence_length": TEXT + 16 * rows,
            "vision_tokens": [draw(1, 4, 1, rows, 16)],
            "vision_token_shapes": [(1, rows, 16)],
            "vision_sequence_indexes": torch.arange(TEXT, TEXT + 16 * rows),
            "vision_mse_loss_indexes": torch.arange(TEXT, TEXT + 16 * rows),
            "vision_timesteps": torch.ones(16 * rows),
            "vision_noisy_frame_indexes": [torch.tensor([0])],
        },
    ),
    Case(
        "Kandinsky5Transformer3DModel",
        {
            "in_visual_dim": 4,
            "in_text_dim": 16,
            "in_text_dim2": 8,
            "time_dim": 16,
            "model_dim": 32,
            "ff_dim": 64,
            "num_text_blocks": 1,
            "num_visual_blocks": 2,
            "axes_dims": ROPE,
        },
        lambda draw, rows: {
            "hidden_states": _video(draw, rows).permute(0, 2, 3, 4, 1).contiguous(),
            "encoder_hidden_states": draw(1, TEXT, 16),
            "timestep": T,
            "pooled_projections": draw(1, 8),
            "visual_rope_pos": [torch.arange(2), torch.arange(rows // 2), torch.arange(16)],
            "text_rope_pos": torch.arange(TEXT),
        },
    ),
    Case(
        "Kandinsky6Transformer3DModel",
        {
            "in_visual_dim": 4,
            "out_visual_dim": 4,
            "in_text_dim": 16,
            "in_text_dim2": 8,
            "time_dim": 16,
            "model_dim": 32,
            "ff_dim": 64,
            "num_text_blocks": 1,
            "num_visual_blocks": 2,
            "axes_dims": ROPE,
            "visual_cond": False,
            "in_audio_dim": 4,
            "out_audio_dim": 4,
        },
        lambda draw, rows: {
            "hidden_states": _video(draw, rows).permute(0, 2, 3, 4, 1).contiguous(),
            "encoder_hidden_states": draw(1, TEXT, 16),
            "timestep": T,
            "pooled_projections": draw(1, 8),
        },
    ),
    Case(
        "Kandinsky6SRTransformer3DModel",
        {
            "in_visual_dim": 4,
            "out_visual_dim": 8,
            "time_dim": 16,
            "patch_size": (1, 2, 2),
            "model_dim": 32,
            "ff_dim": 32,
            "num_visual_blocks": 2,
            "axes_dims": ROPE,
        },
        lambda draw, rows: {"hidden_states": draw(1, 2, 32 if rows == 32 else 16, 32, 9), "timestep": T},
        attends=False,
    ),
    Case(
        "Krea2Transformer2DModel",
        {
            **HEADS,
            "in_channels": 4,
            "num_layers": 2,
            "num_key_value_heads": 1,
            "intermediate_size": 32,
            "timestep_embed_dim": 16,
            "text_hidden_dim": 16,
            "num_text_layers": 2,
            "text_num_attention_heads": 2,
            "text_num_key_value_heads": 1,
            "text_intermediate_size": 32,
            "num_layerwise_text_blocks": 1,
            "num_refiner_text_blocks": 1,
            "axes_dims_rope": ROPE,
        },
        lambda draw, rows: {
            "hidden_states": draw(1, 16 * rows, 4),
            "encoder_hidden_states": draw(1, TEXT, 32).unflatten(2, (2, 16)),
            "timestep": SIGMA,
            "position_ids": torch.cat([torch.zeros(TEXT, 3), _grid(rows)]),
            "encoder_attention_mask": padding_mask(40),
        },
    ),
    Case(
        "ErnieImageTransformer2DModel",
        {
            "hidden_size": 32,
            "num_attention_heads": 2,
            "num_layers": 2,
            "ffn_hidden_size": 32,
            "in_channels": 4,
            "out_channels": 4,
            "text_in_dim": 16,
            "rope_axes_dim": ROPE,
        },
        lambda draw, rows: {
            "hidden_states": draw(1, 4, rows, 16),
            "timestep": T,
            "text_bth": draw(1, TEXT, 16),
            "text_lens": torch.tensor([40]),
        },
    ),
    Case(
        "Ideogram4Transformer2DModel",
        {
            **HEADS,
            "in_channels": 4,
            "num_layers": 2,
            "intermediate_size": 32,
            "adaln_dim": 16,
            "llm_features_dim": 16,
            "rope_theta": 10_000,
            "mrope_section": (4, 2, 2),
        },
        lambda draw, rows: {
            "hidden_states": draw(1, TEXT + 16 * rows, 4),
            "timestep": SIGMA,
            "encoder_hidden_states": draw(1, TEXT + 16 * rows, 16),
            "position_ids": torch.cat([torch.arange(TEXT)[:, None].expand(-1, 3), 65536 + _grid(rows).long()])[None],
            "segment_ids": torch.ones(1, TEXT + 16 * rows, dtype=torch.long),
            "indicator": torch.where(torch.arange(TEXT + 16 * rows) < TEXT, 3, 2)[None],
        },
    ),
    Case(
        "JoyImageEditTransformer3DModel",
        {
            "in_channels": 4,
            "hidden_size": 32,
            "num_attention_heads": 2,
            "text_dim": 16,
            "mlp_width_ratio": 2.0,
            "num_layers": 2,
            "rope_dim_list": list(ROPE),
        },
        lambda draw, rows: {"hidden_states": _video(draw, rows), "timestep": T, "encoder_hidden_states": draw(1, TEXT, 16)},
    ),
    Case(
        "JoyImageEditPlusTransformer3DModel",
        {
            "in_channels": 4,
            "hidden_size": 32,
            "num_attention_heads": 2,
            "text_dim": 16,
            "mlp_width_ratio": 2.0,
            "num_layers": 2,
            "rope_dim_list": list(ROPE),
        },
        lambda draw, rows: {
            "hidden_states": draw(1, 16 * rows, 16).unflatten(2, (4, 1, 2, 2)),
            "timestep": T,
            "encoder_hidden_states": draw(1, TEXT, 16),
            "encoder_hidden_states_mask": padding_mask(40),
            "shape_list": [[(1, rows, 16)]],
        },
    ),
    Case(
        "NucleusMoEImageTransformer2DModel",
        {
            **HEADS,
            "in_channels": 16,
            "out_channels": 4,
            "num_layers": 2,
            "num_key_value_heads": 1,
            "joint_attention_dim": 16,
            "axes_dims_rope": ROPE,
            "moe_enabled": False,
        },
        lambda draw, rows: {
            "hidden_states": draw(1, 16 * rows, 16),
            "img_shapes": [(1, rows, 16)],
            "encoder_hidden_states": draw(1, TEXT, 16),
            "encoder_hidden_states_mask": padding_mask(40),
            "timestep": SIGMA,
        },
        mask="encoder_hidden_states_mask",
    ),
    Case(
        "OmniGenTransformer2DModel",
        {
            "hidden_size": 32,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "intermediate_size": 32,
            "num_layers": 2,
            "pad_token_id": 0,
            "vocab_size": 100,
            "time_step_dim": 16,
            "pos_embed_max_size": 64,
            "rope_scaling": {"long_factor": list(range(1, 9)), "short_factor": list(range(1, 9))},
        },
        lambda draw, rows: {
            "hidden_states": _image(draw, rows),
            "timestep": SIGMA,
            "input_ids": torch.arange(TEXT)[None],
            "input_img_latents": [],
            "input_image_sizes": {},
            "attention_mask": torch.ones(1, TEXT + 1 + 16 * rows, TEXT + 1 + 16 * rows),
            "position_ids": torch.arange(TEXT + 1 + 16 * rows)[None],
        },
    ),
    Case(
        "StableAudioDiTModel",
        {
            **HEADS,
            "sample_size": 512,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "num_key_value_attention_heads": 1,
            "cross_attention_dim": 16,
            "time_proj_dim": 8,
            "global_states_input_dim": 8,
            "cross_attention_input_dim": 16,
        },
        lambda draw, rows: {
            "hidden_states": draw(1, 16 * rows, 4).mT.contiguous(),
            "timestep": SIGMA,
            "encoder_hidden_states": draw(1, TEXT, 16),
            "global_hidden_states": draw(1, 1, 8),
            "rotary_embedding": (torch.ones(16 * rows + 1, 8), torch.zeros(16 * rows + 1, 8)),
        },
    ),
    Case(
        "StableAudio3DiTModel",
        {
            "io_channels": 4,
            "embed_dim": 32,
            "depth": 2,
            "num_heads": 2,
            "cond_token_dim": 16,
            "global_cond_dim": 8,
            "local_add_cond_dim": 4,
            "timestep_features_dim": 16,
            "ff_mult": 2.0,
            "num_memory_tokens": 64,
        },
        lambda draw, rows: {
            "hidden_states": draw(1, 16 * rows, 4).mT.contiguous(),
            "timestep": SIGMA,
            "encoder_hidden_states": draw(1, TEXT, 16),
            "global_hidden_states": draw(1, 8),
        },
    ),
    Case(
        "AceStepTransformer1DModel",
        {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "in_channels": 12,
            "audio_acoustic_hidden_dim": 4,
            "encoder_hidden_size": 16,
        },
        lambda draw, rows: {
            "hidden_states": draw(1, 32 * rows, 4),
            "timestep": SIGMA,
            "timestep_r": SIGMA,
            "encoder_hidden_states": draw(1, TEXT, 16),
            "context_latents": draw(1, 32 * rows, 8),
        },
    ),
    Case(
        "LongCatAudioDiTTransformer",
        {"dit_dim": 32, "dit_depth": 2, "dit_heads": 2, "dit_text_dim": 16, "latent_dim": 4},
        lambda draw, rows: {
            "hidden_states": draw(1, 16 * rows, 4),
            "encoder_hidden_states": draw(1, TEXT, 16),
            "encoder_attention_mask": padding_mask(40),
            "timestep": SIGMA,
            "attention_mask": torch.ones(1, 16 * rows, dtype=torch.bool),
            "latent_cond": draw(1, 16 * rows, 4),
        },
    ),
    Case(
        "MiniMaxH3Transformer3DModel",
        {
            **HEADS,
            "hidden_size": 32,
            "num_layers": 2,
            "num_refiner_layers": 1,
            "ffn_dim": 32,
            "in_channels": 4,
            "audio_in_channels": 4,
            "text_dim": 16,
            "freq_dim": 8,
            "time_embed_hidden_dim": 16,
            "time_embed_dim": 16,
            "rope_freq_dim": 2,
        },
        lambda draw, rows: {
            "hidden_states": draw(1, 16 * rows, 16),
            "audio_hidden_states": draw(1, TEXT, 4),
            "encoder_hidden_states": draw(1, TEXT, 16),
            "timestep": torch.tensor([0.7, 0.3]),
            "timestep_indices": torch.arange(2 * TEXT + 16 * rows) // TEXT % 2 * (torch.arange(2 * TEXT + 16 * rows) < 2 * TEXT),
            "token_tags": torch.cat([torch.ones(TEXT), torch.full((TEXT,), 2.0), torch.zeros(16 * rows)]).long(),
            "position_ids": torch.cat([torch.arange(2.0 * TEXT)[:, None] * torch.tensor([1.0, 0, 0]), _grid(rows)]),
            "text_indices": torch.arange(TEXT),
            "audio_indices": torch.arange(TEXT, 2 * TEXT),
            "video_indices": torch.arange(2 * TEXT, 2 * TEXT + 16 * rows),
        },
    ),
    Case(
        "MiniMaxMusic3Transformer1DModel",
        {**HEADS, "in_channels": 4, "condition_dim": 16, "num_layers": 2, "ff_inner_dim": 32, "rotary_dim": 8, "fourier_embedding_dim": 16},
        lambda draw, rows: {
            "hidden_states": draw(1, 16 * rows, 4).mT.contiguous(),
            "timestep": SIGMA,
            "encoder_hidden_states": draw(1, 16 * rows, 16),
        },
    ),
    Case(
        "MiniMaxMusic3RVQDepthDecoder",
        {
            "hidden_size": 32,
            "num_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "audio_vocab_size": 16,
            "max_position_embeddings": 512,
        },
        lambda draw, rows: {"inputs_embeds": draw(1, 16 * rows, 32)},
    ),
    Case(
        "PriorTransformer",
        {**HEADS, "num_layers": 2, "embedding_dim": 16, "num_embeddings": 512},
        lambda draw, rows: {
            "hidden_states": draw(1, 16),
            "timestep": T,
            "proj_embedding": draw(1, 16),
            "encoder_hidden_states": draw(1, 512, 16),
            "attention_mask": None,
        },
    ),
    Case(
        "Transformer2DModel",
        BLOCK_2D,
        lambda draw, rows: {"hidden_states": draw(1, 32, rows, 16), "encoder_hidden_states": draw(1, TEXT, 16)},
    ),
    Case(
        "DreamLiteTransformer2DModel",
        BLOCK_2D,
        lambda draw, rows: {"hidden_states": draw(1, 32, rows, 16), "encoder_hidden_states": draw(1, TEXT, 16)},
    ),
    Case(
        "TransformerTemporalModel",
        {**HEADS, "in_channels": 32, "norm_num_groups": 8},
        lambda draw, rows: {"hidden_states": draw(1, 16 * rows, 32)[0][..., None, None], "num_frames": 16 * rows},
    ),
    Case(
        "RFD4ProteinaTransformer",
        {
            "nlayers": 2,
            "token_dim": 32,
            "nheads": 2,
            "dim_cond": 16,
            "pair_repr_dim": 8,
            "latent_dim": 4,
            "tri_mult_c": 4,
            "feats_seq": ("xt_bb_ca", "xt_local_latents"),
            "feats_cond_seq": ("time_emb_bb_ca",),
            "feats_pair_repr": ("xt_bb_ca_pair_dists",),
            "feats_pair_cond": ("time_emb_bb_ca",),
            "t_emb_dim": 16,
        },
        lambda draw, rows: {
            "bb_ca": draw(1, 16 * rows, 3),
            "local_latents": draw(1, 16 * rows, 4),
            "bb_ca_time": SIGMA,
            "local_latents_time": SIGMA,
            "padding_mask": torch.ones(1, 16 * rows, dtype=torch.bool),
            "conditioning": {"is_in_context_conditioning": torch.zeros(1, 16 * rows), "supports_local_latent": torch.ones(1, 16 * rows)},
        },
    ),
    Case(
        "T5FilmDecoder",
        {"input_dims": 4, "targets_length": 512, "d_model": 32, "num_layers": 2, "num_heads": 2, "d_kv": 16, "d_ff": 32},
        lambda draw, rows: {
            "encodings_and_masks": [(draw(1, TEXT, 32), torch.ones(1, TEXT))],
            "decoder_input_tokens": draw(1, 512, 4),
            "decoder_noise_time": SIGMA,
        },
        attends=False,
    ),
    Case(
        "UNet2DConditionModel",
        {
            "block_out_channels": (16, 32),
            "norm_num_groups": 8,
            "layers_per_block": 1,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
            "cross_attention_dim": 16,
            "attention_head_dim": 2,
            "transformer_layers_per_block": 1,
            "use_linear_projection": True,
        },
        lambda draw, rows: {"sample": _image(draw, rows), "timestep": T[0], "encoder_hidden_states": draw(1, TEXT, 16)},
    ),
]


def _allegro_rope(rows: int) -> Any:
    from diffusers.models.embeddings import get_3d_rotary_pos_embed_allegro

    freqs_t, freqs_h, freqs_w, grid_t, grid_h, grid_w = get_3d_rotary_pos_embed_allegro(
        embed_dim=24, crops_coords=((0, 0), (rows // 2, 16)), grid_size=(rows // 2, 16), temporal_size=2
    )
    return (freqs_t, freqs_h, freqs_w), tuple(torch.cartesian_prod(grid_t, grid_h, grid_w).long().T[:, None].contiguous())


def _lumina_rope() -> Tensor:
    from diffusers.models.embeddings import get_2d_rotary_pos_embed_lumina

    return get_2d_rotary_pos_embed_lumina(16, 64, 64)
