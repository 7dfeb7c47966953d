"""Files of pretrained models: what is refused and how it is said, sharded and narrow files, every setting both ways."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from telic.errors import PretrainedError
from telic.interop import load_huggingface, save_huggingface
from telic.interop.huggingface.families import FAMILIES, read_settings, write_settings
from telic.interop.huggingface.tensors import TensorFile, write_tensors
from telic.models import Decoder, DecoderConfig, Experts, LinearScaling, Llama3Scaling, Rotary, YarnScaling
from tests.golden import DATA

LLAMA = DATA / "hf_llama"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Give a copy of a small Llama that may be broken."""
    return Path(shutil.copytree(LLAMA, tmp_path / "model", copy_function=shutil.copyfile))


def set_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def table_of(path: Path) -> tuple[dict[str, Any], bytes]:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write_raw(path: Path, table: Any, body: bytes) -> None:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24], **changes}


HOSTILE: dict[str, tuple[Any, str]] = {
    "no JSON": (b"{" * 50, "no JSON"),
    "nested without end": (b"[" * 100_000, "no JSON"),
    "not UTF-8": (b'{"\xff": 1}', "no JSON"),
    "a list": (b"[1, 2]", "must be a JSON object, got list"),
    "a name twice": (b'{"a": 1, "a": 2}', "names 'a' twice"),
    "no offsets": ({"a": {"dtype": "F32", "shape": [2]}}, "'a' needs dtype, shape and data_offsets"),
    "unknown dtype": ({"a": entry(dtype="X9")}, "has the dtype 'X9'"),
    "a shape of words": ({"a": entry(shape=["2", 3])}, "which is none"),
    "a negative shape": ({"a": entry(shape=[-2, -3])}, "which is none"),
    "a true shape": ({"a": entry(shape=[True, 6])}, "which is none"),
    "many dimensions": ({"a": entry(shape=[1] * 100 + [6])}, "has 101 dimensions"),
    "a huge shape": ({"a": entry(shape=[2**40, 2**40])}, r"needs \d+ bytes and has 24"),
    "bytes past the end": ({"a": entry(data_offsets=[0, 10**15], shape=[10**15])}, "the file has 24"),
    "bytes backwards": ({"a": entry(data_offsets=[24, 0])}, "bytes 24 to 0"),
    "bytes before the start": ({"a": entry(data_offsets=[-24, 0])}, "bytes -24 to 0"),
    "too few bytes": ({"a": entry(shape=[2, 4])}, "needs 32 bytes and has 24"),
    "shared bytes": ({"a": entry(), "b": entry()}, "overlaps the tensor before it"),
    "a gap": ({"a": entry(shape=[2, 2], data_offsets=[8, 24])}, "leaves a gap"),
    "bytes of nobody": ({"a": entry(shape=[2, 2], data_offsets=[0, 16])}, "end at byte 16, and the file has 24"),
    "metadata of numbers": ({"__metadata__": {"a": 1}, "b": entry()}, "__metadata__"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_tables_are_refused(kind: str, tmp_path: Path) -> None:
    """Catches a table that is believed: memory taken by its word, bytes read twice or from elsewhere."""
    table, message = HOSTILE[kind]
    path = tmp_path / "x.safetensors"
    write_raw(path, table, bytes(24))
    with pytest.raises(PretrainedError, match=message):
        TensorFile.open(path)


@pytest.mark.parametrize("kept", [0, 7, 8, 100, -1])
def test_files_cut_short_are_refused(kept: int, copy: Path) -> None:
    """Catches a download that stopped and is read as far as it goes."""
    path = copy / "model.safetensors"
    raw = path.read_bytes()
    path.write_bytes(raw[:kept])
    with pytest.raises(PretrainedError, match="cut short"):
        load_huggingface(copy)


def test_a_length_of_the_table_beyond_the_file_takes_no_memory(tmp_path: Path) -> None:
    """Catches an allocation of as many bytes as eight bytes can say."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"\xff" * 8 + b"{}")
    with pytest.raises(PretrainedError, match="cut short, or no safetensors file"):
        TensorFile.open(path)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "int8", "bool", "float8_e4m3fn"])
def test_every_dtype_and_shape_comes_back(dtype: str, tmp_path: Path) -> None:
    """Catches tensors without elements or without dimensions, and unaligned ones, that come back as others."""
    values = np.arange(6).reshape(2, 3) % 2
    tensors = {
        "b": values.astype(jnp.dtype(dtype)),
        "a": np.asarray(1).astype(jnp.dtype(dtype)),
        "empty": np.zeros((0, 3), jnp.dtype(dtype)),
        "odd": np.ones(3, np.int8),
    }
    write_tensors(tmp_path / "x.safetensors", tensors, metadata={"made": "here"})
    file = TensorFile.open(tmp_path / "x.safetensors")
    assert file.metadata == {"made": "here"}
    for name, tensor in tensors.items():
        found = file.read(name)
        assert found.dtype == tensor.dtype
        np.testing.assert_array_equal(found, tensor)


def sharded(folder: Path, **options: Any) -> None:
    decoder, variables = load_huggingface(LLAMA)
    save_huggingface(folder, decoder, variables, shard_bytes=20_000, **options)


def test_shards_hold_the_same_model(tmp_path: Path) -> None:
    """Catches a tensor lost between files, and shards that are larger than asked."""
    sharded(tmp_path)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    assert all((tmp_path / name).stat().st_size < 24_000 for name in files)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    assert index["metadata"]["total_size"] == sum(len(table_of(tmp_path / name)[1]) for name in files)
    one, other = load_huggingface(tmp_path), load_huggingface(LLAMA)
    assert one[0] == other[0]
    jax.tree.map(np.testing.assert_array_equal, one[1], other[1])


def test_another_model_takes_the_place_of_the_files_alone(tmp_path: Path) -> None:
    """Catches shards of the old model that stay beside the new, and files of somebody else that go with them."""
    sharded(tmp_path)
    (tmp_path / "adapters.safetensors").write_bytes(b"kept")
    decoder, variables = load_huggingface(LLAMA)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        save_huggingface(tmp_path, decoder, variables)
    save_huggingface(tmp_path, decoder, variables, overwrite=True)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["adapters.safetensors", "config.json", "model.safetensors"]
    sharded(tmp_path, overwrite=True)
    assert not (tmp_path / "model.safetensors").exists()
    jax.tree.map(np.testing.assert_array_equal, load_huggingface(tmp_path)[1], variables)


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "", 3, ".safetensors"])
def test_an_index_that_leads_out_of_the_folder_is_refused(file: Any, tmp_path: Path) -> None:
    """Catches a path of somebody else that is followed."""
    sharded(tmp_path)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = file
    path.write_text(json.dumps(index))
    with pytest.raises(PretrainedError, match="only safetensors files beside it are read"):
        load_huggingface(tmp_path)


def test_an_index_and_its_files_must_agree(tmp_path: Path) -> None:
    """Catches a missing shard read as a smaller model."""
    sharded(tmp_path)
    first = min(tmp_path.glob("*.safetensors"))
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    moved = next(name for name, file in index["weight_map"].items() if file != first.name)
    path.write_text(json.dumps({"weight_map": {**index["weight_map"], moved: first.name}}))
    with pytest.raises(PretrainedError, match=f"{first.name} lacks {moved}"):
        load_huggingface(tmp_path)
    path.write_text(json.dumps(index))
    first.unlink()
    with pytest.raises(FileNotFoundError, match=first.name):
        load_huggingface(tmp_path)


def test_tensors_that_do_not_fit_are_all_named(copy: Path) -> None:
    """Catches the first of many problems told alone, and a shape that is found out when it is multiplied."""
    path = copy / "model.safetensors"
    table, body = table_of(path)
    table["model.layers.0.mlp.up_projection.weight"] = table.pop("model.layers.0.mlp.up_proj.weight")
    table["model.norm.weight"]["shape"] = [4, 8]
    write_raw(path, table, body)
    with pytest.raises(PretrainedError) as caught:
        load_huggingface(copy)
    text = str(caught.value)
    assert "missing are model.layers.0.mlp.up_proj.weight" in text
    assert "not of this model are model.layers.0.mlp.up_projection.weight" in text
    assert "model.norm.weight (4, 8) where the config says (32,)" in text


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "lama"}, r"unknown model_type 'lama'. Did you mean 'llama'\?"),
    ({"model_type": None}, "unknown model_type None"),
    ({"quantization_config": {"bits": 4}}, "quantised"),
    ({"hidden_size": None}, "lacks hidden_size, a whole number"),
    ({"hidden_size": "32"}, "hidden_size must be a whole number, got '32'"),
    ({"num_hidden_layers": True}, "num_hidden_layers must be a whole number, got True"),
    ({"num_key_value_heads": 3}, "num_kv_heads=3 must divide num_heads=4"),
    ({"hidden_act": "mish"}, "unknown hidden_act 'mish'"),
    ({"rope_parameters": {"rope_type": "longrope"}}, "'longrope' are not supported"),
    ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "lacks low_freq_factor"),
    ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "drop one"),
    ({"rope_scaling": 3}, "rope_scaling must be a mapping"),
    ({"eos_token_id": "</s>"}, "eos_token_id"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=str)
def test_settings_that_mean_another_model_are_refused(changes: dict[str, Any], message: str, copy: Path) -> None:
    """Catches a key that is passed over though it changes the computation, and one that fails somewhere inside."""
    set_config(copy, **changes)
    with pytest.raises(PretrainedError, match=message):
        load_huggingface(copy)


def test_both_spellings_of_rotary_settings_are_one(copy: Path) -> None:
    """Catches the settings of one version of transformers passed over in silence, so that the base is the default's."""
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    set_config(copy, rope_parameters={"rope_theta": 5e5, "rope_type": "llama3", **scaling}, dtype="float32")
    new = load_huggingface(copy)[0].config
    set_config(copy, rope_parameters=None, rope_theta=5e5, rope_scaling={"type": "llama3", **scaling}, dtype=None)
    old = load_huggingface(copy)[0].config
    assert old == new
    assert new.rotary == Rotary(
        theta=5e5,
        scaling=Llama3Scaling(factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_length=16),
    )


def test_yarn_with_two_scales_has_their_quotient(copy: Path) -> None:
    """Catches scales of attention that are passed over; the number is that of transformers 5.24."""
    yarn = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
    set_config(copy, rope_parameters={**yarn, "rope_theta": 1e4, "mscale": 0.707, "mscale_all_dim": 1.2})
    scaling = load_huggingface(copy)[0].config.rotary.scaling
    assert isinstance(scaling, YarnScaling)
    np.testing.assert_allclose(scaling.amplitude, 0.8739404576185121, rtol=1e-12)


SMALL: dict[str, Any] = {"vocab_size": 8, "d_model": 8, "num_layers": 3, "num_heads": 2, "max_length": 16, "d_ff": 12}
WRITABLE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_kv_heads": 1, "eos_tokens": (3, 5), "bos_token": 1}),
    "llama with biases": ("llama", {"mlp_bias": True, "qkv_bias": True, "output_bias": True, "tied": True}),
    "linear": ("llama", {"rotary": Rotary(scaling=LinearScaling(factor=2.0))}),
    "yarn": (
        "llama",
        {"rotary": Rotary(theta=1e6, scaling=YarnScaling(factor=4.0, original_length=8, truncate=False))},
    ),
    "mistral": ("mistral", {"sliding_window": 4}),
    "qwen2": ("qwen2", {"qkv_bias": True}),
    "qwen2 with windows": ("qwen2", {"qkv_bias": True, "sliding_window": 4, "window_layers": (False, True, True)}),
    "qwen3": ("qwen3", {"qk_norm": True, "head_dim": 6}),
    "qwen3_moe": ("qwen3_moe", {"qk_norm": True, "experts": Experts(num_experts=4, top_k=2, normalize=False)}),
    "mixtral": ("mixtral", {"experts": Experts(num_experts=4, top_k=2), "norm_epsilon": 1e-5}),
    "gpt2": (
        "gpt2",
        {
            "norm": "layer",
            "positions": "learned",
            "gated": False,
            "activation": "gelu_tanh",
            "tied": True,
            "qkv_bias": True,
            "output_bias": True,
            "mlp_bias": True,
            "residual_dropout": 0.1,
        },
    ),
}


@pytest.mark.parametrize("kind", WRITABLE)
def test_every_family_is_written_and_read_back(kind: str, tmp_path: Path) -> None:
    """Catches a setting that is read under one name and written under another, and a tensor without a place."""
    family, options = WRITABLE[kind]
    decoder = Decoder(DecoderConfig(**SMALL, **options))
    shapes = jax.eval_shape(lambda key: decoder.init_variables(key, np.zeros((1, 2), np.int32)), jax.random.key(0))
    rng = np.random.default_rng(0)
    variables = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.bfloat16), shapes)
    save_huggingface(tmp_path, decoder, variables, extra={"note": "kept"})
    settings = json.loads((tmp_path / "config.json").read_text())
    assert settings["model_type"] == family
    assert (settings["dtype"], settings["torch_dtype"], settings["note"]) == ("bfloat16", "bfloat16", "kept")
    again, same = load_huggingface(tmp_path)
    assert write_settings(again.config) == write_settings(decoder.config)
    assert jax.tree.structure(same) == jax.tree.structure(variables)
    jax.tree.map(np.testing.assert_array_equal, same, variables)
    wide = load_huggingface(tmp_path, dtype="float32")[1]
    assert {x.dtype for x in jax.tree.leaves(wide)} == {jnp.dtype("float32")}
    with pytest.raises(FileExistsError, match="overwrite=True"):
        save_huggingface(tmp_path, decoder, variables)


def test_what_no_family_can_say_is_refused() -> None:
    """Catches a soft cap that is lost on the way to a file, so that the model there is another."""
    with pytest.raises(PretrainedError, match=r"llama would lose final_soft_cap=30.0"):
        write_settings(DecoderConfig(**SMALL, final_soft_cap=30.0))
    with pytest.raises(PretrainedError, match=r"gpt2 would lose"):
        write_settings(DecoderConfig(**SMALL), "gpt2")
    with pytest.raises(ValueError, match="unknown model_type 'lama'"):
        write_settings(DecoderConfig(**SMALL), "lama")
    assert set(FAMILIES) >= {"llama", "qwen3", "mixtral", "gpt2"}


def test_a_head_beside_a_tied_embedding_must_be_the_same(copy: Path) -> None:
    """Catches one of two different tensors dropped in silence."""
    set_config(copy, tie_word_embeddings=True)
    with pytest.raises(PretrainedError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        load_huggingface(copy)


def test_files_of_the_bare_model_and_old_tables_are_read(tmp_path: Path) -> None:
    """Catches GPT-2's original files, which lack the prefix and carry masks."""
    shutil.copytree(DATA / "hf_gpt2", tmp_path / "m", copy_function=shutil.copyfile)
    path = tmp_path / "m" / "model.safetensors"
    file = TensorFile.open(path)
    tensors = {name.removeprefix("transformer."): file.read(name).copy() for name in file.entries}
    write_tensors(path, {**tensors, "h.0.attn.bias": np.ones((1, 1, 32, 32), np.float32)})
    found, expected = load_huggingface(tmp_path / "m"), load_huggingface(DATA / "hf_gpt2")
    jax.tree.map(np.testing.assert_array_equal, found[1], expected[1])


def test_folders_without_weights_say_what_is_read(copy: Path) -> None:
    """Catches a folder of another format that fails with a bare file name."""
    (copy / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="convert them to safetensors"):
        load_huggingface(copy)


def test_float64_files_ask_for_a_dtype(copy: Path) -> None:
    """Catches weights halved in silence where JAX holds no float64."""
    path = copy / "model.safetensors"
    file = TensorFile.open(path)
    write_tensors(path, {name: file.read(name).astype(np.float64) for name in file.entries})
    with pytest.raises(PretrainedError, match="load it with dtype='float32'"):
        load_huggingface(copy)
    assert load_huggingface(copy, dtype="float32")[1]["params"]["head"]["kernel"].dtype == jnp.float32


def test_variables_of_another_decoder_are_named(tmp_path: Path) -> None:
    """Catches a file without a layer, and adapters that vanish."""
    decoder, variables = load_huggingface(LLAMA)
    params = {**variables["params"]}
    layer = params.pop("layers_1")
    with pytest.raises(PretrainedError, match="variables lack layers_1/attention/key/kernel"):
        save_huggingface(tmp_path, decoder, {"params": params})
    query = {**layer["attention"]["query"], "kernel_lora_a": jnp.ones((32, 2))}
    params["layers_1"] = {**layer, "attention": {**layer["attention"], "query": query}}
    with pytest.raises(PretrainedError, match=r"hold layers_1/attention/query/kernel_lora_a.*merge adapters first"):
        save_huggingface(tmp_path, decoder, {"params": params})
    assert not list(tmp_path.iterdir())


def test_only_what_runs_the_model_is_changed_on_loading() -> None:
    """Catches an unknown field that is swallowed."""
    decoder, variables = load_huggingface(LLAMA, scan=True, remat="dots")
    assert decoder.config.scan
    assert variables["params"]["layers"]["mlp"]["up"]["kernel"].shape == (2, 32, 48)
    with pytest.raises(TypeError, match="scann"):
        load_huggingface(LLAMA, scann=True)
    assert read_settings(json.loads((LLAMA / "config.json").read_text()))[0].model_type == "llama"
