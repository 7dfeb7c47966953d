"""Loop states as bytes: what comes back, what is refused, and a run that goes on with the same bits."""

import hashlib
import json
import struct
import subprocess
import sys
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import telic
from telic.loop import serialize
from telic.loop.state import LoopState

PREFIX = serialize._PREFIX.size


def round_trip(value: Any, **options: Any) -> Any:
    return telic.deserialize_state(telic.serialize_state(LoopState(step_state=value)), **options).step_state


VALUES = {
    "float32": jnp.arange(6, dtype=jnp.float32).reshape(2, 3),
    "bfloat16": jnp.asarray([1.5, -0.0, jnp.nan, jnp.inf], jnp.bfloat16),
    "float16": jnp.asarray([1.5], jnp.float16),
    "float8": jnp.asarray([0.5, 2.0], jnp.float8_e4m3fn),
    "bool": jnp.asarray([True, False]),
    "int": jnp.asarray(-3, jnp.int32),
    "uint8": np.arange(256, dtype=np.uint8),
    "int4": jnp.asarray([-8, 7], jnp.int4),
    "complex": np.asarray([1 + 2j], np.complex64),
    "numpy float64": np.asarray([0.1, 1e300]),
    "big endian": np.asarray([1, 2], ">i4"),
    "strided": np.arange(10)[::3],
    "scalar": np.float64(0.1),
    "empty": np.zeros((0, 3), np.float32),
    "key": jax.random.key(7),
    "keys": jax.random.split(jax.random.key(7), 3),
    "rbg key": jax.random.key(7, impl="rbg"),
}


@pytest.mark.parametrize("name", VALUES)
def test_arrays_come_back_bit_for_bit(name: str) -> None:
    """A dtype that is narrowed, a NaN that is changed, a key that becomes numbers, a byte order that is lost."""
    value = VALUES[name]
    back = round_trip({"x": value})["x"]
    assert isinstance(back, jax.Array) == isinstance(value, jax.Array)
    if name.endswith(("key", "keys")):
        assert back.dtype == value.dtype
        back, value = jax.random.key_data(back), jax.random.key_data(value)
    value = (
        np.asarray(value).astype(np.asarray(value).dtype.newbyteorder("="))
        if name == "big endian"
        else np.asarray(value)
    )
    assert (np.asarray(back).dtype, np.shape(back)) == (value.dtype, value.shape)
    assert np.asarray(back).tobytes() == value.tobytes()


PLAIN = [
    {},
    [],
    (),
    None,
    {"a": {}, "b": [], "c": (), "d": None},
    {"a": [1, 2.5, "x", True, None, b"\x00\xff"], 3: ({"": 0},)},
    {"float": float("inf"), "tiny": 5e-324, "big": 2**80},
]


@pytest.mark.parametrize("value", PLAIN, ids=str)
def test_plain_containers_come_back_as_they_were(value: Any) -> None:
    """An empty container that disappears, a tuple that becomes a list, a key that becomes text, a rounded float."""
    back = round_trip(value)
    assert back == value
    assert repr(back) == repr(value)


def test_every_field_comes_back() -> None:
    """A field that is forgotten, or an epoch that becomes text."""
    state = LoopState(
        step_state=1.0,
        epoch=3,
        max_epoch=None,
        iteration=0,
        max_iteration=7,
        total_iterations=21,
        max_steps=None,
        history={0: {"loss": 1.5}, 2: {"loss": float("nan")}},
        times={0: 0.25},
        handler_state={"m": {"best": None, "best_state": [jnp.ones(2)], "wait": 2}},
        status="completed",
        position={"batches": 5, "columns": "x"},
    )
    state.counts.total["epoch_completed"] = 3
    state.metrics.add({"accuracy": 0.5, "per_class": np.arange(3)})
    back = telic.deserialize_state(telic.serialize_state(state))
    for name in ("step_state", "epoch", "max_epoch", "iteration", "max_iteration", "total_iterations", "max_steps"):
        assert getattr(back, name) == getattr(state, name)
    assert repr(back.history) == repr(state.history)
    assert (back.times, back.status, back.position) == (state.times, state.status, state.position)
    assert back.counts == state.counts
    assert dict(back.metrics)["accuracy"] == 0.5
    np.testing.assert_array_equal(back.metrics["per_class"], np.arange(3))
    assert repr(back.handler_state) == repr(state.handler_state)


def test_equal_states_give_equal_bytes() -> None:
    """Bytes that depend on when they are written, so that two runs cannot be compared."""
    state = LoopState(step_state={"w": jnp.ones(3)})
    assert telic.serialize_state(state) == telic.serialize_state(state)


def test_compression_changes_the_size_only() -> None:
    """A compressed state that is read as raw bytes."""
    state = LoopState(step_state={"w": np.zeros(10_000)})
    small, large = telic.serialize_state(state, compress=True), telic.serialize_state(state)
    assert len(small) < 2_000 < 80_000 < len(large)
    assert (telic.deserialize_state(small).step_state["w"] == 0).all()


# -- trees of other kinds ----------------------------------------------------------------------------------------------

X = np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32)
Y = X.sum(1, keepdims=True)


class Net(nn.Module):
    """Dropout and batch statistics: what a resume loses first."""

    width: int = 4

    @nn.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(self.width)(x))
        return nn.Dense(1)(nn.Dropout(0.3, deterministic=not train)(x))


def step(width: int = 4, optimizer: Any = None, accumulate: int = 2) -> Any:
    return telic.train_step(
        Net(width), "mean_squared_error", optimizer or telic.optimizers.adam(1e-2), accumulate=accumulate
    )


def example(**options: Any) -> telic.TrainState:
    return step(**options).init({"inputs": X[:4], "targets": Y[:4]})


def leaves(tree: Any) -> list[bytes]:
    """Give a tree's leaves as bytes."""
    plain = [
        jax.random.key_data(x) if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key) else x
        for x in jax.tree.leaves(tree)
    ]
    return [np.asarray(x).tobytes() for x in plain]


def test_a_train_state_comes_back_into_its_structure() -> None:
    """XS057: a collection, a key or an optimizer state that falls out silently."""
    state = example()
    back = round_trip(state, like=example())
    assert isinstance(back, telic.TrainState)
    assert jax.tree.structure(back) == jax.tree.structure(state)
    assert leaves(back) == leaves(state)


def test_a_structure_that_is_not_in_the_bytes_is_asked_for() -> None:
    """A TrainState that comes back as nested dictionaries."""
    with pytest.raises(ValueError, match="'TrainState', whose structure is not in the bytes: pass like="):
        round_trip(example())


def test_differences_are_named_by_leaf() -> None:
    """Another model or optimizer that is filled with what fits."""
    with pytest.raises(
        ValueError, match=r"'variables/batch_stats/.*' was saved with shape \(4,\).*example has shape \(5,\)"
    ):
        round_trip(example(), like=example(width=5))
    with pytest.raises(ValueError, match=r"It has learner/opt_state/.*which the example lacks"):
        round_trip(example(), like=example(optimizer=optax.sgd(0.1)))
    with pytest.raises(ValueError, match="it lacks learner/opt_state"):
        round_trip(example(optimizer=optax.sgd(0.1)), like=example())
    with pytest.raises(ValueError, match=r"dtype float64 and the example has .*float32"):
        round_trip({"w": np.ones(2)}, like={"w": np.ones(2, np.float32)})
    with pytest.raises(ValueError, match=r"dtype key<fry> and the example has .*uint32"):
        round_trip({"k": jax.random.key(0)}, like={"k": jnp.zeros(2, jnp.uint32)})


def test_custom_functions_for_the_step_state() -> None:
    """A custom serializer that is not used, or whose inverse is not asked for."""

    class Own:
        value = 5

    blob = telic.serialize_state(LoopState(step_state=Own()), serialize_step_state=lambda own: bytes([own.value]))
    assert telic.deserialize_state(blob, deserialize_step_state=lambda data: data[0]).step_state == 5
    with pytest.raises(ValueError, match="pass deserialize_step_state"):
        telic.deserialize_state(blob)
    with pytest.raises(ValueError, match="does not apply"):
        round_trip(1.0, deserialize_step_state=len)
    with pytest.raises(TypeError, match="must give bytes, got int"):
        telic.serialize_state(LoopState(step_state=1), serialize_step_state=lambda value: 5)


def test_what_cannot_be_written_is_named() -> None:
    """An object that is pickled, or written as its repr."""
    with pytest.raises(TypeError, match=r"step_state holds a object.*serialize_step_state="):
        telic.serialize_state(LoopState(step_state=object()))
    with pytest.raises(TypeError, match="handler_state/a/b holds a OrderedDict"):
        telic.serialize_state(LoopState(handler_state={"a": {"b": OrderedDict()}}))
    with pytest.raises(TypeError, match="handler_state has the key"):
        telic.serialize_state(LoopState(handler_state={(1, 2): 0}))
    with pytest.raises(TypeError, match=r"step_state/x has dtype <U1"):
        telic.serialize_state(LoopState(step_state={"x": np.asarray(["a"])}))
    deep: Any = 0
    for _ in range(serialize.MAX_DEPTH + 2):
        deep = [deep]
    with pytest.raises(ValueError, match="nested more than"):
        telic.serialize_state(LoopState(handler_state={"deep": deep}))
    with pytest.raises(TypeError, match="takes a LoopState, got dict"):
        telic.serialize_state({})  # type: ignore[arg-type]


# -- bytes that are refused --------------------------------------------------------------------------------------------

GOOD = telic.serialize_state(LoopState(step_state={"w": np.arange(20.0)}, history={0: {"loss": 1.0}}))


def forged(header: Any, payload: bytes = b"", *, flags: int = 0, raw: int | None = None, schema: int = 1) -> bytes:
    """Give bytes with a right digest around any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(payload) if raw is None else raw
    prefix = serialize._PREFIX.pack(b"telicLS\x00", schema, flags, len(text), len(payload), size)
    return prefix + hashlib.sha256(prefix + text + payload).digest() + text + payload


@pytest.mark.parametrize(
    "size", [0, 1, 7, 8, PREFIX - 1, PREFIX, PREFIX + 31, PREFIX + 32, len(GOOD) // 2, len(GOOD) - 1]
)
def test_truncated_bytes_are_refused(size: int) -> None:
    """B51: a truncated file that fails with whatever the reader trips over."""
    with pytest.raises(ValueError, match=r"truncated|no loop state"):
        telic.deserialize_state(GOOD[:size])


def test_every_flipped_bit_is_noticed() -> None:
    """Silent corruption: a weight, a counter or a length that is changed and read."""
    for i in range(len(GOOD)):
        damaged = bytearray(GOOD)
        damaged[i] ^= 1 << (i % 8)
        with pytest.raises(ValueError, match="loop state"):
            telic.deserialize_state(bytes(damaged))


def test_other_schemas_and_foreign_bytes_are_refused() -> None:
    """B51: a version that stays 1 while the layout changes, and foreign bytes that match anything."""
    changed = bytearray(GOOD)
    struct.pack_into("<H", changed, 8, 2)
    with pytest.raises(ValueError, match="schema 2, this version of Telic reads schema 1"):
        telic.deserialize_state(bytes(changed))
    with pytest.raises(ValueError, match="followed by other bytes"):
        telic.deserialize_state(GOOD + b"\0")
    for foreign in (b"PK\x03\x04" + bytes(100), b"\x80\x04\x95" + bytes(100), b"{}" * 60):
        with pytest.raises(ValueError, match="no loop state"):
            telic.deserialize_state(foreign)
    with pytest.raises(TypeError, match=r"takes bytes, got str; pass path.read_bytes"):
        telic.deserialize_state("checkpoint")  # type: ignore[arg-type]


def test_sizes_are_bounded_before_anything_is_allocated() -> None:
    """A few bytes that claim terabytes, or unpack to them."""
    huge = serialize._PREFIX.pack(b"telicLS\x00", 1, 0, 2**31, 0, 0) + bytes(32)
    with pytest.raises(ValueError, match="more than the"):
        telic.deserialize_state(huge)
    with pytest.raises(ValueError, match="cannot hold"):
        telic.deserialize_state(forged({}, zlib.compress(b"x"), flags=1, raw=2**40))
    with pytest.raises(ValueError, match="does not unpack to 10 bytes"):
        telic.deserialize_state(forged({}, zlib.compress(bytes(10**6)), flags=1, raw=10))
    with pytest.raises(ValueError, match="cannot be unpacked"):
        telic.deserialize_state(forged({}, b"no zlib", flags=1, raw=10))
    table = {"buffers": [{"dtype": "float64", "shape": [10**6, 10**6]}], "fields": {}, "step_state": {}}
    with pytest.raises(ValueError, match="only 8 are left"):
        telic.deserialize_state(forged(table, bytes(8)))


def _with(change: Any) -> bytes:
    """Give the good bytes with a changed header and a right digest."""
    _, _, _, size, _, _ = serialize._PREFIX.unpack_from(GOOD)
    start = PREFIX + 32
    header = json.loads(GOOD[start : start + size])
    change(header)
    return forged(header, GOOD[start + size :])


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h.pop("fields"),
        lambda h: h["fields"].pop("epoch"),
        lambda h: h["fields"].update(epoch=-1),
        lambda h: h["fields"].update(epoch="3"),
        lambda h: h["fields"].update(epoch=True),
        lambda h: h["fields"].update(history={"t": "dict", "v": [["0", {"t": "dict", "v": []}]]}),
        lambda h: h["fields"].update(counts=None),
        lambda h: h["fields"].update(status=5),
        lambda h: h["fields"].update(position={"t": "os.system", "v": ["x"]}),
        lambda h: h["fields"].update(position={"t": "numpy", "b": 99}),
        lambda h: h["fields"].update(position={"t": "numpy", "b": -1}),
        lambda h: h["fields"].update(position={"t": "scalar", "b": 0}),
        lambda h: h["fields"].update(position={"t": "key", "impl": "evil", "b": 0}),
        lambda h: h["fields"].update(position={"t": "key", "impl": "rbg", "b": 0}),
        lambda h: h["fields"].update(position={"t": "dict", "v": [[[], 1]]}),
        lambda h: h["fields"].update(position={"t": "dict", "v": [["a", 1], ["a", 2]]}),
        lambda h: h.update(buffers=[]),
        lambda h: h["buffers"][0].update(dtype="object"),
        lambda h: h["buffers"][0].update(shape=[-20]),
        lambda h: h["buffers"][0].update(shape=[19]),
        lambda h: h["buffers"][0].update(shape=[2.5]),
        lambda h: h["step_state"].update(kind="pickle"),
        lambda h: h["step_state"].update(value={"t": "leaves", "v": [5]}),
    ],
)
def test_hostile_headers_are_refused(change: Any) -> None:
    """A header with a right digest that leads the reader out of its table or its types."""
    with pytest.raises(ValueError, match="no loop state"):
        telic.deserialize_state(_with(change))


@pytest.mark.parametrize("text", [b"[" * 100_000, b"\xff", b"{", b"NaN", b"[]", b'{"fields": NaN}'])
def test_headers_that_are_no_json_object_are_refused(text: bytes) -> None:
    """A header whose nesting ends the process, or whose NaN is not JSON."""
    with pytest.raises(ValueError, match="no loop state"):
        telic.deserialize_state(forged(text))


def test_a_wider_dtype_is_refused_where_jax_would_narrow_it(tmp_path: Path) -> None:
    """A float64 state that comes back as float32 with a warning nobody reads."""
    program = f"""
import jax
jax.config.update("jax_enable_x64", True)
import jax.numpy as jnp, pathlib, telic
state = telic.LoopState(step_state={{"w": jnp.asarray([0.1, 0.2])}})
blob = telic.serialize_state(state)
assert telic.deserialize_state(blob).step_state["w"].dtype == jnp.float64
pathlib.Path({str(tmp_path / "wide")!r}).write_bytes(blob)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
    with pytest.raises(ValueError, match="set jax_enable_x64"):
        telic.deserialize_state((tmp_path / "wide").read_bytes())


# -- going on ----------------------------------------------------------------------------------------------------------


def make() -> telic.Loop:
    loop = telic.Loop(step()).metric("mean_absolute_error")
    loop.early_stop("mean_absolute_error", patience=9, restore_best=True)
    return loop.reduce_lr_on_plateau("loss", patience=1, min_delta=10.0)


def columns() -> telic.data.Dataset:
    return telic.data.columns({"inputs": X, "targets": Y}, batch=4, seed=3)


def facts(final: LoopState) -> Any:
    """Give what a run has come to, in values that compare exactly."""
    counts = {name: n for name, n in final.event_counts.items() if name != "started"}
    records = {n: {k: v for k, v in r.items() if k != "best_state"} for n, r in final.handler_state.items()}
    return leaves(final.step_state), final.history, counts, records, final.epoch, final.total_iterations


@pytest.fixture(scope="module")
def whole() -> Any:
    """An uncut run of two epochs of six batches, windows of two, with the state after each event."""
    cut: dict[tuple[str, int], bytes] = {}
    loop = make()
    for event in ("epoch_started", "iteration_started", "iteration_completed", "step_completed", "epoch_completed"):

        def save(state: LoopState, event: str = event) -> None:
            cut[event, state.event_counts[event]] = telic.serialize_state(state)

        loop.handle_event(event, save)
    return facts(loop.run(columns(), epochs=2)), cut


MOMENTS = [
    ("iteration_started", 4),
    ("iteration_completed", 3),
    ("iteration_completed", 4),
    ("iteration_completed", 6),
    ("epoch_completed", 1),
]
MORE = [
    ("epoch_started", 2),
    ("iteration_started", 1),
    ("step_completed", 2),
    ("step_completed", 6),
    ("epoch_completed", 2),
]


@pytest.mark.parametrize(
    "moment", [*MOMENTS, *(pytest.param(moment, marks=pytest.mark.exhaustive) for moment in MORE)], ids=str
)
def test_a_run_goes_on_with_the_same_bits(whole: Any, moment: tuple[str, int]) -> None:
    """B10-B12, B16: an epoch or batch repeated, accumulators or an open window lost, events counted or fired twice."""
    expected, cut = whole
    state = telic.deserialize_state(cut[moment], like=example())
    assert facts(make().from_state(state).run(columns(), epochs=2)) == expected


def test_a_new_process_goes_on_with_the_same_bits(whole: Any, tmp_path: Path) -> None:
    """A state that needs something of the process that wrote it."""
    expected, cut = whole
    (tmp_path / "state").write_bytes(cut["iteration_completed", 3])
    program = f"""
import pathlib
import telic
from tests.unit.loop.test_serialize import columns, example, facts, make
state = telic.deserialize_state(pathlib.Path({str(tmp_path / "state")!r}).read_bytes(), like=example())
final = make().from_state(state).run(columns(), epochs=2)
pathlib.Path({str(tmp_path / "facts")!r}).write_text(repr(facts(final)))
"""
    root = Path(__file__).resolve().parents[3]
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300, cwd=root)
    assert (tmp_path / "facts").read_text() == repr(expected)


@pytest.mark.slow
def test_steps_go_on_as_one_stream() -> None:
    """A run of steps that ends at the epoch of its data after a resume, or plans an update too many."""
    blobs: list[bytes] = []
    loop = telic.Loop(step()).handle_event("iteration_completed", lambda s: blobs.append(telic.serialize_state(s)))
    expected = facts(loop.run(columns(), steps=5))
    for index in (2, 5):
        state = telic.deserialize_state(blobs[index], like=example())
        assert facts(telic.Loop(step()).from_state(state).run(columns(), steps=5)) == expected


def test_other_metrics_in_the_middle_of_an_epoch_are_refused(whole: Any) -> None:
    """B12: a metric whose epoch begins at the resume, and is reported as that of the whole epoch."""
    state = telic.deserialize_state(whole[1]["iteration_completed", 3], like=example())
    with pytest.raises(telic.errors.ContractError, match="attach the metrics of the run that is continued"):
        telic.Loop(step()).from_state(state).run(columns(), epochs=2)


@pytest.mark.slow
def test_a_state_that_was_kept_goes_on_too() -> None:
    """A kept state whose cursor is that of a batch which is done already."""
    kept: list[LoopState] = []
    loop = make().handle_event("iteration_completed", lambda s: kept.append(s.keep()))
    expected = facts(loop.run(columns(), epochs=1))
    assert facts(make().from_state(kept[2]).run(columns(), epochs=1)) == expected
