"""Pretrained models against transformers 5.24: logits, loss, gradients, packed rows, training, continuation, files."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from telic import tree
from telic.interop import load_huggingface, save_huggingface
from telic.interop.huggingface.names import pieces_of
from telic.models import Decoder, stack_layers
from tests.golden import DATA, load

FAMILIES = ("llama", "qwen3", "mixtral", "gpt2")


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def double_precision() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def golden(family: str) -> tuple[dict[str, Any], dict[str, Any]]:
    (case,) = load(f"hf_{family}")["cases"]
    return case["in"], case["out"]


def folder(family: str) -> Path:
    return DATA / f"hf_{family}"


def widened(variables: Any) -> Any:
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), variables)


def cross_entropy(logits: Any, labels: Any) -> Any:
    """Token mean over labels that are not -100, shifted by one."""
    kept = labels[:, 1:] != -100
    targets = jnp.where(kept, labels[:, 1:], 0)
    nll = -jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), targets[..., None], axis=-1)[..., 0]
    return jnp.where(kept, nll, 0).sum() / kept.sum()


def mixtral_aux(router: Any, num_experts: int) -> Any:
    """Pool the layers as transformers does: E · Σ f P over all layers' tokens, f summing to top_k."""
    tokens = router.tokens.sum() * router.counts.shape[0]
    return num_experts * ((router.counts.sum((0, 1)) / tokens) * (router.probabilities.sum((0, 1)) / tokens)).sum()


def outputs(decoder: Decoder, variables: Any, given: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Give (loss with the auxiliary one, logits, router statistics) of the padded rows."""
    states = decoder.hidden_states(
        variables, jnp.asarray(given["input_ids"]), segment_ids=jnp.asarray(given["attention_mask"])
    )
    logits = decoder.head(variables).logits(states.hidden)
    loss = cross_entropy(logits, jnp.asarray(given["labels"]))
    if decoder.config.experts is not None:
        loss = loss + 0.02 * mixtral_aux(states.router, decoder.config.experts.num_experts)
    return loss, logits, states


@pytest.mark.usefixtures("double_precision")
def test_logits_loss_and_hidden_states_in_float64(family: str) -> None:
    """Catches any difference in architecture: rotation, norms, heads, experts, order of positions, the head."""
    given, out = golden(family)
    decoder, variables = load_huggingface(folder(family))
    loss, logits, states = jax.jit(lambda v: outputs(decoder, v, given))(widened(variables))
    kept = given["attention_mask"] == 1
    np.testing.assert_allclose(logits[kept], out["logits_f64"][kept], rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(states.hidden[kept], out["hidden_states_f64"][-1][kept], rtol=1e-8, atol=1e-10)
    if family == "mixtral":
        np.testing.assert_allclose(mixtral_aux(states.router, 4), out["aux_loss"], rtol=1e-8)
        np.testing.assert_allclose(loss, out["loss_with_aux"], rtol=1e-8)
    else:
        np.testing.assert_allclose(loss, out["loss_f64"], rtol=1e-8)


def test_logits_and_loss_in_float32(family: str) -> None:
    """Catches a computation that needs float64 to be right, and a half that falls to bfloat16."""
    given, out = golden(family)
    decoder, variables = load_huggingface(folder(family))
    loss, logits, _ = jax.jit(lambda v: outputs(decoder, v, given))(variables)
    assert logits.dtype == jnp.float32
    kept = given["attention_mask"] == 1
    np.testing.assert_allclose(logits[kept], out["logits_f32"][kept], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(loss, out["loss_f32"], rtol=1e-4, atol=1e-5)


def their_names(family: str, decoder: Decoder, params: Any) -> dict[str, np.ndarray]:
    """Lay parameters or gradients out under the names of the file; experts as transformers holds them in memory."""
    leaves = tree.named_leaves(params)
    named: dict[str, np.ndarray] = {}
    for piece in pieces_of(family, decoder.config):
        arrays = piece.scatter([np.asarray(leaves[name]) for name in piece.ours])
        named |= {name: array for (name, _), array in zip(piece.theirs, arrays, strict=True)}
    if family == "mixtral":
        for i in range(decoder.config.num_layers):
            room = f"model.layers.{i}.block_sparse_moe"
            new = f"model.layers.{i}.mlp"
            named[f"{new}.gate.weight"] = named.pop(f"{room}.gate.weight")
            w1, w2, w3 = (
                np.stack([named.pop(f"{room}.experts.{e}.{w}.weight") for e in range(4)]) for w in ("w1", "w2", "w3")
            )
            named[f"{new}.experts.gate_up_proj"] = np.concatenate([w1, w3], axis=1)
            named[f"{new}.experts.down_proj"] = w2
    return named


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("remat", ["none", "full"])
def test_gradients(family: str, remat: str) -> None:
    """Catches a stop-gradient too many or too few, a tied weight counted once, and remat that changes the gradient."""
    given, out = golden(family)
    decoder, variables = load_huggingface(folder(family), remat=remat)
    grads = jax.jit(jax.grad(lambda v: outputs(decoder, v, given)[0]))(widened(variables))
    named = their_names(family, decoder, grads["params"])
    assert named.keys() == out["grad"].keys()
    for name, expected in out["grad"].items():
        np.testing.assert_allclose(named[name], expected, rtol=1e-8, atol=1e-10, err_msg=name)
    np.testing.assert_allclose(optax.tree.norm(grads), out["grad_norm"], rtol=1e-8)


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scanned"])
def test_packed_rows_equal_each_document_alone(family: str, scan: bool) -> None:
    """Catches attention across documents, and positions that do not restart, which learned ones would show."""
    given, out = golden(family)
    decoder, variables = load_huggingface(folder(family), scan=scan)
    positions = jnp.asarray(given["packed_position_ids"])
    segments = jnp.cumsum(positions == 0, axis=1)
    tokens = jnp.asarray(given["packed_input_ids"])

    def logits_of(v: Any, where: Any) -> Any:
        states = decoder.hidden_states(v, tokens, positions=where, segment_ids=segments)
        return decoder.head(v).logits(states.hidden)

    logits = jax.jit(logits_of)(widened(variables), positions)
    np.testing.assert_allclose(logits, out["packed"]["logits_each_document_alone_f64"], rtol=1e-8, atol=1e-10)
    loss = cross_entropy(logits, jnp.asarray(given["packed_labels"]))
    np.testing.assert_allclose(loss, out["packed"]["loss_f64"], rtol=1e-8)
    np.testing.assert_array_equal(logits, jax.jit(logits_of)(widened(variables), None))


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_five_steps_of_adamw(family: str) -> None:
    """Catches parameters that are not trained, or trained twice (a tied weight), in the course of training."""
    (case,) = load(f"hf_{family}")["cases"]
    given, out, config = case["in"], case["out"]["adamw"], case["config"]["adamw"]
    decoder, variables = load_huggingface(folder(family))
    clip = optax.stateless(lambda g, _: jax.tree.map(lambda x: x * _torch_clip(g, config), g))
    optimizer = optax.chain(
        clip,
        optax.adamw(
            config["lr"],
            b1=config["betas"][0],
            b2=config["betas"][1],
            eps=config["eps"],
            weight_decay=config["weight_decay"],
            mask=lambda params: jax.tree.map(lambda x: x.ndim >= 2, params),
        ),
    )
    rows = {k: jnp.asarray(given[k]) for k in ("input_ids", "labels", "attention_mask")}
    packed = {"input_ids": jnp.asarray(given["packed_input_ids"]), "labels": jnp.asarray(given["packed_input_ids"])}
    packed["attention_mask"] = jnp.ones_like(packed["input_ids"])

    @jax.jit
    def loss_and_grads(v: Any, batch: Any) -> Any:
        return jax.value_and_grad(lambda v: outputs(decoder, v, batch)[0])(v)

    @jax.jit
    def step(grads: Any, state: Any, v: Any) -> Any:
        updates, state = optimizer.update(grads, state, v)
        return optax.apply_updates(v, updates), state

    v = widened(variables)
    state = optimizer.init(v)
    for i in range(config["steps"]):
        loss, grads = loss_and_grads(v, rows if i % 2 == 0 else packed)
        np.testing.assert_allclose(loss, out["loss"][i], rtol=1e-8)
        np.testing.assert_allclose(optax.tree.norm(grads), out["grad_norm"][i], rtol=1e-7)
        v, state = step(grads, state, v)
    named = their_names(family, decoder, v["params"])
    for name, norm in out["final_parameter_l2"].items():
        np.testing.assert_allclose(np.linalg.norm(named[name]), norm, rtol=1e-7, err_msg=name)


def _torch_clip(grads: Any, config: dict[str, Any]) -> Any:
    return jnp.minimum(config["clip_norm"] / (optax.tree.norm(grads) + config["clip_eps"]), 1)


def test_scanned_equals_unrolled(family: str) -> None:
    """Catches layers stacked in another order, and a scanned block that sees another layer's weights."""
    given, _ = golden(family)
    decoder, variables = load_huggingface(folder(family))
    scanned = Decoder(dataclasses.replace(decoder.config, scan=True))
    one = jax.jit(lambda v: outputs(decoder, v, given)[1])(variables)
    other = jax.jit(lambda v: outputs(scanned, v, given)[1])(stack_layers(variables))
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_saved_files_equal_the_ones_read(family: str, tmp_path: Path) -> None:
    """Catches a tensor that loses a bit, its name or its place on the way through."""
    decoder, variables = load_huggingface(folder(family), scan=True)
    save_huggingface(tmp_path, decoder, variables)
    old, new = folder(family) / "model.safetensors", tmp_path / "model.safetensors"
    assert new.read_bytes() == old.read_bytes()
    again, same = load_huggingface(tmp_path, scan=True)
    assert again == decoder
    jax.tree.map(np.testing.assert_array_equal, same, variables)
