"""The families of Hugging Face: config.json read into a `DecoderConfig` and written from one.

Keys that change the computation and that a `Decoder` lacks are refused by name; keys that do not are left.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from telic.errors import PretrainedError, unknown_name
from telic.interop.huggingface.settings import Settings, read_rotary, written_rotary
from telic.models.decoder.config import DecoderConfig, Experts
from telic.models.decoder.rotary import Rotary

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
_OURS_TO_THEIRS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu"}


@dataclass(frozen=True)
class Family:
    """How one ``model_type`` says what a decoder is.

    Attributes:
      model_type: Its name in config.json.
      architecture: Its class there.
      read: config.json to a `DecoderConfig`.
      write: The way back. What a family cannot say is found by reading it again.
    """

    model_type: str
    architecture: str
    read: Callable[["Settings"], DecoderConfig]
    write: Callable[[DecoderConfig], dict[str, Any]]


def _common(s: Settings, *, tied: bool = False) -> dict[str, Any]:
    """Read what every family says by the same names."""
    eos = s.get("eos_token_id", [])
    eos = [eos] if isinstance(eos, int) else eos
    if not isinstance(eos, list) or not all(isinstance(token, int) for token in eos):  # pyright: ignore
        raise PretrainedError(f"config.json: eos_token_id must be a token or a list of tokens, got {eos!r}")
    return {
        "vocab_size": s.whole("vocab_size"),
        "tied": s.flag("tie_word_embeddings", tied),
        "init_std": float(s.number("initializer_range", 0.02)),
        "bos_token": s.get("bos_token_id"),
        "eos_tokens": tuple(eos),  # pyright: ignore[reportUnknownArgumentType]
        "pad_token": s.get("pad_token_id"),
    }


def _activation(s: Settings, name: str, default: str) -> str:
    value = s.get(name, default)
    if value not in _ACTIVATIONS:
        raise PretrainedError(f"config.json: {unknown_name(name, value, _ACTIVATIONS)}")
    return _ACTIVATIONS[value]


def _written_common(c: DecoderConfig) -> dict[str, Any]:
    eos: Any = None if not c.eos_tokens else c.eos_tokens[0] if len(c.eos_tokens) == 1 else list(c.eos_tokens)
    return {
        "vocab_size": c.vocab_size,
        "tie_word_embeddings": c.tied,
        "initializer_range": c.init_std,
        "bos_token_id": c.bos_token,
        "eos_token_id": eos,
        "pad_token_id": c.pad_token,
    }


def _llama_like(
    s: Settings, *, theta: float = 10000.0, epsilon: float = 1e-6, head_dim: int | None = None
) -> dict[str, Any]:
    """Read what the families after Llama share."""
    num_heads = s.whole("num_attention_heads")
    return {
        **_common(s),
        "d_model": s.whole("hidden_size"),
        "num_layers": s.whole("num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": s.whole("num_key_value_heads", num_heads),
        "head_dim": s.whole("head_dim", head_dim or s.whole("hidden_size") // num_heads),
        "d_ff": s.whole("intermediate_size"),
        "max_length": s.whole("max_position_embeddings"),
        "norm_epsilon": float(s.number("rms_norm_eps", epsilon)),
        "activation": _activation(s, "hidden_act", "silu"),
        "rotary": read_rotary(s, theta),
        "attention_dropout": float(s.number("attention_dropout", 0.0)),
    }


def _written_llama_like(c: DecoderConfig) -> dict[str, Any]:
    return {
        **_written_common(c),
        "hidden_size": c.d_model,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_width,
        "intermediate_size": c.ff_width,
        "max_position_embeddings": c.max_length,
        "rms_norm_eps": c.norm_epsilon,
        "hidden_act": _OURS_TO_THEIRS[c.activation],
        "attention_dropout": c.attention_dropout,
        "use_cache": True,
        **written_rotary(c.rotary),
    }


def _biases(s: Settings) -> dict[str, Any]:
    value = s.flag("attention_bias", False)
    return {"qkv_bias": value, "output_bias": value}


def _layer_windows(s: Settings, window: int | None, first: int) -> dict[str, Any]:
    """Read which layers have a sliding window: layer_types, or those from a layer on."""
    num_layers = s.whole("num_hidden_layers")
    kinds = s.get("layer_types")
    if kinds is None:
        flags = [window is not None and i >= first for i in range(num_layers)]
    else:
        if not isinstance(kinds, list) or len(kinds) != num_layers:  # pyright: ignore[reportUnknownArgumentType]
            raise PretrainedError(f"config.json: layer_types must name each of {num_layers} layers, got {kinds!r}")
        for kind in kinds:  # pyright: ignore[reportUnknownVariableType]
            if kind not in ("full_attention", "sliding_attention"):
                raise PretrainedError(f"config.json: layer_types holds {kind!r}, which is not supported")
        flags = [kind == "sliding_attention" for kind in kinds]  # pyright: ignore[reportUnknownVariableType]
    if any(flags) and window is None:
        raise PretrainedError("config.json: layer_types name sliding_attention, and sliding_window is null or unused")
    if not any(flags):
        return {}
    return {"sliding_window": window, "window_layers": None if all(flags) else tuple(flags)}


def _written_layer_windows(c: DecoderConfig) -> dict[str, Any]:
    return {
        "use_sliding_window": c.sliding_window is not None,
        "sliding_window": c.sliding_window,
        "max_window_layers": c.num_layers if c.sliding_window is None else 0,
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in c.windows],
    }


def _qwen_window(s: Settings) -> int | None:
    return s.whole("sliding_window", 4096) if s.flag("use_sliding_window", False) else None


def _read_llama(s: Settings) -> DecoderConfig:
    return DecoderConfig(**_llama_like(s), **_biases(s), mlp_bias=s.flag("mlp_bias", False))


def _write_llama(c: DecoderConfig) -> dict[str, Any]:
    return {**_written_llama_like(c), "attention_bias": c.qkv_bias, "mlp_bias": c.mlp_bias, "pretraining_tp": 1}


def _read_mistral(s: Settings) -> DecoderConfig:
    # A null window is none; an absent one is the family's default.
    window = s.whole("sliding_window", 4096) if s.values.get("sliding_window", 0) is not None else None
    return DecoderConfig(**_llama_like(s), sliding_window=window)


def _write_mistral(c: DecoderConfig) -> dict[str, Any]:
    return {**_written_llama_like(c), "sliding_window": c.sliding_window}


def _read_qwen2(s: Settings) -> DecoderConfig:
    windows = _layer_windows(s, _qwen_window(s), s.whole("max_window_layers", 28))
    return DecoderConfig(**_llama_like(s), **windows, qkv_bias=True)


def _write_qwen2(c: DecoderConfig) -> dict[str, Any]:
    return {**_written_llama_like(c), **_written_layer_windows(c)}


def _read_qwen3(s: Settings) -> DecoderConfig:
    windows = _layer_windows(s, _qwen_window(s), s.whole("max_window_layers", 28))
    return DecoderConfig(**_llama_like(s, head_dim=128), **_biases(s), **windows, qk_norm=True)


def _write_qwen3(c: DecoderConfig) -> dict[str, Any]:
    return {**_written_llama_like(c), **_written_layer_windows(c), "attention_bias": c.qkv_bias}


def _read_qwen3_moe(s: Settings) -> DecoderConfig:
    s.only("decoder_sparse_step", 1)
    s.only("mlp_only_layers", [])
    experts = Experts(
        num_experts=s.whole("num_experts", s.get("num_local_experts", 128)),
        top_k=s.whole("num_experts_per_tok", 8),
        normalize=s.flag("norm_topk_prob", False),
    )
    shared = {**_llama_like(s), "d_ff": s.whole("moe_intermediate_size", 768)}
    return DecoderConfig(**shared, **_biases(s), sliding_window=_qwen_window(s), qk_norm=True, experts=experts)


def _write_qwen3_moe(c: DecoderConfig) -> dict[str, Any]:
    experts = c.experts or Experts(num_experts=1, top_k=1)
    return {
        **_written_llama_like(c),
        "moe_intermediate_size": c.ff_width,
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "norm_topk_prob": experts.normalize,
        "attention_bias": c.qkv_bias,
        "use_sliding_window": c.sliding_window is not None,
        "sliding_window": c.sliding_window,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _read_mixtral(s: Settings) -> DecoderConfig:
    s.only("router_jitter_noise", 0, 0.0)
    experts = Experts(num_experts=s.whole("num_local_experts", 8), top_k=s.whole("num_experts_per_tok", 2))
    shared = _llama_like(s, theta=1e6, epsilon=1e-5)
    return DecoderConfig(**shared, sliding_window=s.get("sliding_window"), experts=experts)


def _write_mixtral(c: DecoderConfig) -> dict[str, Any]:
    experts = c.experts or Experts(num_experts=1, top_k=1)
    return {
        **_written_llama_like(c),
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "sliding_window": c.sliding_window,
        "router_jitter_noise": 0.0,
    }


def _read_gpt2(s: Settings) -> DecoderConfig:
    s.only("scale_attn_by_inverse_layer_idx", False)
    s.only("add_cross_attention", False)
    d_model, drop = s.whole("n_embd", 768), s.number("resid_pdrop", 0.1)
    return DecoderConfig(
        **_common(s, tied=True),
        d_model=d_model,
        num_layers=s.whole("n_layer", 12),
        num_heads=s.whole("n_head", 12),
        d_ff=s.whole("n_inner", 4 * d_model),
        max_length=s.whole("n_positions", 1024),
        norm="layer",
        norm_epsilon=float(s.number("layer_norm_epsilon", 1e-5)),
        positions="learned",
        gated=False,
        activation=_activation(s, "activation_function", "gelu_new"),  # pyright: ignore[reportArgumentType] of the table
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        attention_scale=None if s.flag("scale_attn_weights", True) else 1.0,
        embedding_dropout=float(s.number("embd_pdrop", 0.1)),
        attention_dropout=float(s.number("attn_pdrop", 0.1)),
        residual_dropout=float(drop),
    )


def _write_gpt2(c: DecoderConfig) -> dict[str, Any]:
    return {
        **_written_common(c),
        "n_embd": c.d_model,
        "n_layer": c.num_layers,
        "n_head": c.num_heads,
        "n_inner": None if c.ff_width == 4 * c.d_model else c.ff_width,
        "n_positions": c.max_length,
        "layer_norm_epsilon": c.norm_epsilon,
        "activation_function": _OURS_TO_THEIRS[c.activation],
        "scale_attn_weights": c.attention_scale is None,
        "embd_pdrop": c.embedding_dropout,
        "attn_pdrop": c.attention_dropout,
        "resid_pdrop": c.residual_dropout,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
        "use_cache": True,
    }


FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        Family("llama", "LlamaForCausalLM", _read_llama, _write_llama),
        Family("mistral", "MistralForCausalLM", _read_mistral, _write_mistral),
        Family("qwen2", "Qwen2ForCausalLM", _read_qwen2, _write_qwen2),
        Family("qwen3", "Qwen3ForCausalLM", _read_qwen3, _write_qwen3),
        Family("qwen3_moe", "Qwen3MoeForCausalLM", _read_qwen3_moe, _write_qwen3_moe),
        Family("mixtral", "MixtralForCausalLM", _read_mixtral, _write_mixtral),
        Family("gpt2", "GPT2LMHeadModel", _read_gpt2, _write_gpt2),
    )
}
"""Families by ``model_type``. In this order they are tried for a decoder that came from nowhere."""


def read_settings(values: Mapping[str, Any]) -> tuple[Family, DecoderConfig]:
    """Give the family and the architecture that a config.json describes.

    Raises:
      PretrainedError: The family is unknown, a key is missing or impossible, or one asks for what a decoder lacks.
    """
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise PretrainedError(f"config.json: {unknown_name('model_type', kind, FAMILIES)}")
    settings = Settings(values)
    if settings.get("quantization_config") is not None:
        raise PretrainedError("config.json: quantization_config: quantised weights are not supported")
    try:
        return FAMILIES[kind], FAMILIES[kind].read(settings)
    except PretrainedError:
        raise
    except ValueError as error:
        raise PretrainedError(f"config.json describes an impossible {kind} model: {error}") from error


def write_settings(config: DecoderConfig, model_type: str | None = None) -> tuple[Family, dict[str, Any]]:
    """Give the family and the config.json that describe an architecture.

    A family fits when what it writes reads back as the same architecture.

    Args:
      config: The architecture. How it is run (scan, remat, attention kernel, dispatch of experts) is not written.
      model_type: The family to write; None takes the first that fits.
    Raises:
      PretrainedError: No family, or not that one, can say it; what gets lost is named.
      ValueError: `model_type` is unknown.
    """
    if model_type is not None and model_type not in FAMILIES:
        raise unknown_name("model_type", model_type, FAMILIES)
    wanted = _resolved(config)
    lost: dict[str, list[str]] = {}
    for family in FAMILIES.values() if model_type is None else [FAMILIES[model_type]]:
        written = {"model_type": family.model_type, "architectures": [family.architecture], **family.write(config)}
        again = _resolved(family.read(Settings(written)))
        lost[family.model_type] = [name for name, value in vars(wanted).items() if getattr(again, name) != value]
        if not lost[family.model_type]:
            return family, written
    nearest = min(lost, key=lambda name: len(lost[name]))
    differences = ", ".join(f"{name}={getattr(wanted, name)!r}" for name in lost[nearest])
    raise PretrainedError(f"no Hugging Face family has this architecture; {nearest} would lose {differences}")


def _resolved(config: DecoderConfig) -> DecoderConfig:
    """Say outright what None stands for, and leave out how a decoder is run."""
    experts = config.experts
    if experts is not None:
        experts = dataclasses.replace(experts, dispatch="dense")
    default = 1 / config.head_width**0.5
    return config.replace(
        num_kv_heads=config.kv_heads,
        head_dim=config.head_width,
        d_ff=config.ff_width,
        rotary=config.rotary if config.positions == "rotary" else Rotary(),
        sliding_window=config.sliding_window if any(config.windows) else None,
        window_layers=None if len(set(config.windows)) == 1 else config.window_layers,
        attention_scale=None if config.attention_scale == default else config.attention_scale,
        experts=experts,
        attention="dot_product",
        scan=False,
        remat="none",
    )
