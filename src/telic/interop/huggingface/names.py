"""Which tensor of a family's files is which parameter of a decoder, and what is turned over on the way."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from telic.models.decoder.config import DecoderConfig

Arrays = Sequence[np.ndarray]


@dataclass(frozen=True)
class Piece:
    """Tensors of a file and the parameters they hold, with the way there and back; both keep every bit.

    Attributes:
      ours: Names under ``params`` of a decoder with unrolled layers.
      theirs: Names in the file, with shapes.
      gather: Their arrays to ours.
      scatter: Ours to theirs.
    """

    ours: tuple[str, ...]
    theirs: tuple[tuple[str, tuple[int, ...]], ...]
    gather: Callable[[Arrays], Arrays]
    scatter: Callable[[Arrays], Arrays]


def _same(arrays: Arrays) -> Arrays:
    return arrays


def _turned(arrays: Arrays) -> Arrays:
    return [array.T for array in arrays]


def _thirds(arrays: Arrays) -> Arrays:
    return np.split(arrays[0], 3, axis=-1)


def _joined(arrays: Arrays) -> Arrays:
    return [np.concatenate(arrays, axis=-1)]


def _stacked(arrays: Arrays) -> Arrays:
    return [np.stack([array.T for array in arrays])]


def _unstacked(arrays: Arrays) -> Arrays:
    return [array.T for array in arrays[0]]


def _plain(ours: str, theirs: str, *shape: int) -> Piece:
    return Piece((ours,), ((theirs, shape),), _same, _same)


def _linear(ours: str, theirs: str, into: int, out: int, *, bias: bool) -> list[Piece]:
    """Give a projection whose file keeps [out, in]."""
    weight = Piece((f"{ours}/kernel",), ((f"{theirs}.weight", (out, into)),), _turned, _turned)
    return [weight, *([_plain(f"{ours}/bias", f"{theirs}.bias", out)] if bias else [])]


def pieces_of(model_type: str, config: DecoderConfig) -> list[Piece]:
    """Give all pieces of a family's checkpoint."""
    return _gpt2(config) if model_type == "gpt2" else _llama_like(model_type, config)


def prefix_of(model_type: str) -> str:
    """Give the word that names begin with, and that files of the bare model lack."""
    return "transformer." if model_type == "gpt2" else "model."


def is_ignored(name: str) -> bool:
    """Say whether a tensor holds no parameter: masks and tables that old files carry."""
    return name.endswith((".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"))


def _llama_like(model_type: str, c: DecoderConfig) -> list[Piece]:
    pieces = [_plain("embedding/embedding", "model.embed_tokens.weight", c.vocab_size, c.d_model)]
    width, kv_width = c.num_heads * c.head_width, c.kv_heads * c.head_width
    for i in range(c.num_layers):
        ours, theirs = f"layers_{i}", f"model.layers.{i}"
        attention, attends = f"{ours}/attention", f"{theirs}.self_attn"
        pieces += [
            _plain(f"{ours}/attention_norm/scale", f"{theirs}.input_layernorm.weight", c.d_model),
            _plain(f"{ours}/mlp_norm/scale", f"{theirs}.post_attention_layernorm.weight", c.d_model),
            *_linear(f"{attention}/query", f"{attends}.q_proj", c.d_model, width, bias=c.qkv_bias),
            *_linear(f"{attention}/key", f"{attends}.k_proj", c.d_model, kv_width, bias=c.qkv_bias),
            *_linear(f"{attention}/value", f"{attends}.v_proj", c.d_model, kv_width, bias=c.qkv_bias),
            *_linear(f"{attention}/output", f"{attends}.o_proj", width, c.d_model, bias=c.output_bias),
        ]
        if c.qk_norm:
            pieces.append(_plain(f"{attention}/query_norm/scale", f"{attends}.q_norm.weight", c.head_width))
            pieces.append(_plain(f"{attention}/key_norm/scale", f"{attends}.k_norm.weight", c.head_width))
        pieces += _mlp(ours, theirs, c) if c.experts is None else _experts(model_type, ours, theirs, c)
    pieces.append(_plain("final_norm/scale", "model.norm.weight", c.d_model))
    return pieces if c.tied else [*pieces, *_linear("head", "lm_head", c.d_model, c.vocab_size, bias=False)]


def _mlp(ours: str, theirs: str, c: DecoderConfig) -> list[Piece]:
    return [
        *_linear(f"{ours}/mlp/gate", f"{theirs}.mlp.gate_proj", c.d_model, c.ff_width, bias=c.mlp_bias),
        *_linear(f"{ours}/mlp/up", f"{theirs}.mlp.up_proj", c.d_model, c.ff_width, bias=c.mlp_bias),
        *_linear(f"{ours}/mlp/down", f"{theirs}.mlp.down_proj", c.ff_width, c.d_model, bias=c.mlp_bias),
    ]


def _experts(model_type: str, ours: str, theirs: str, c: DecoderConfig) -> list[Piece]:
    """Give a mixture of experts: files keep each expert apart, a decoder keeps them stacked."""
    is_mixtral = model_type == "mixtral"
    room = f"{theirs}.block_sparse_moe" if is_mixtral else f"{theirs}.mlp"
    words = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    num_experts = c.experts.num_experts if c.experts else 0
    pieces = _linear(f"{ours}/experts/router", f"{room}.gate", c.d_model, num_experts, bias=False)
    for mine, word in zip(("gate", "up", "down"), words, strict=True):
        shape = (c.d_model, c.ff_width) if mine == "down" else (c.ff_width, c.d_model)
        names = tuple((f"{room}.experts.{e}.{word}.weight", shape) for e in range(num_experts))
        pieces.append(Piece((f"{ours}/experts/{mine}/kernel",), names, _stacked, _unstacked))
    return pieces


def _gpt2(c: DecoderConfig) -> list[Piece]:
    """Give GPT-2: its projections keep [in, out], and query, key and value lie in one."""
    d, ff = c.d_model, c.ff_width
    pieces = [
        _plain("embedding/embedding", "transformer.wte.weight", c.vocab_size, d),
        _plain("positions/embedding", "transformer.wpe.weight", c.max_length, d),
    ]
    for i in range(c.num_layers):
        ours, theirs = f"layers_{i}", f"transformer.h.{i}"
        for mine, name in (("attention_norm", "ln_1"), ("mlp_norm", "ln_2")):
            pieces.append(_plain(f"{ours}/{mine}/scale", f"{theirs}.{name}.weight", d))
            pieces.append(_plain(f"{ours}/{mine}/bias", f"{theirs}.{name}.bias", d))
        for leaf, word, shape in (("kernel", "weight", (d, 3 * d)), ("bias", "bias", (3 * d,))):
            names = tuple(f"{ours}/attention/{part}/{leaf}" for part in ("query", "key", "value"))
            pieces.append(Piece(names, ((f"{theirs}.attn.c_attn.{word}", shape),), _thirds, _joined))
        for mine, name, into, out in (
            ("attention/output", "attn.c_proj", d, d),
            ("mlp/up", "mlp.c_fc", d, ff),
            ("mlp/down", "mlp.c_proj", ff, d),
        ):
            pieces.append(_plain(f"{ours}/{mine}/kernel", f"{theirs}.{name}.weight", into, out))
            pieces.append(_plain(f"{ours}/{mine}/bias", f"{theirs}.{name}.bias", out))
    pieces.append(_plain("final_norm/scale", "transformer.ln_f.weight", d))
    pieces.append(_plain("final_norm/bias", "transformer.ln_f.bias", d))
    return pieces if c.tied else [*pieces, *_linear("head", "lm_head", d, c.vocab_size, bias=False)]
