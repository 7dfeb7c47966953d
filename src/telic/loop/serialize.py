"""A loop state as bytes: one versioned, checked format without pickle, eval or imports by name.

The bytes are a fixed prefix (magic, schema number, lengths), a SHA-256 of everything else, a JSON header and the raw
little-endian buffers of the arrays. What is read is data only: plain containers, numbers, text and arrays. Any other
tree, such as a `TrainState`, is written as named leaves, and read back into the structure of an example.
"""

import hashlib
import json
import math
import struct
import sys
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn, cast

import jax
import jax.numpy as jnp
import numpy as np

from telic import tree
from telic.loop.cursor import settled
from telic.loop.events import EVENTS, Counts
from telic.loop.state import LoopState, Metrics
from telic.types import PyTree

SCHEMA = 1
"""Version of the format; a reader refuses any other."""

MAX_HEADER_BYTES = 64 * 2**20
"""A longer header is refused before it is read."""

MAX_DEPTH = 128
"""Deepest nesting of containers that is written or read."""

_MAGIC = b"telicLS\x00"
_PREFIX = struct.Struct("<8sHHIQQ")  # magic, schema, flags, header bytes, stored payload bytes, payload bytes
_DIGEST_BYTES = 32
_COMPRESSED = 1
_ZLIB_RATIO = 1040
"""DEFLATE expands at most 1032 times; a payload that claims more is no payload."""

_WORDS = (
    *("bool", "int4", "uint4", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
)
_DTYPES: Mapping[str, np.dtype[Any]] = {word: np.dtype(getattr(jnp, word)) for word in _WORDS}

_KEY_IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg")


def serialize_state(
    state: LoopState, *, serialize_step_state: Callable[[Any], bytes] | None = None, compress: bool = False
) -> bytes:
    """Give a loop state as bytes, from which `deserialize_state` and `Loop.from_state` continue the run.

    In a handler it is the state after the event: at ``epoch_completed`` the cursor is the next epoch at iteration 0 and
    the epoch's metrics are in the history; inside an epoch it is the next iteration, with the metrics' accumulators.
    Handlers that run later at the same event are not in it.

    Args:
      state: A final state, or the one a handler sees.
      serialize_step_state: Gives the bytes of `state.step_state`, for values that are no pytree of arrays.
      compress: Compress the arrays with zlib.
    Raises:
      TypeError: Something in the state is no number, text, array or plain container of them; its place is named.
    """
    if not isinstance(state, LoopState):  # pyright: ignore[reportUnnecessaryIsInstance] users' input
        raise TypeError(f"serialize_state takes a LoopState, got {type(state).__name__}")
    _check_machine()
    state = settled(state)
    writer = _Writer()
    if serialize_step_state is None:
        step_state = {"kind": "tree", "value": writer.tree(state.step_state, "step_state")}
    else:
        custom = serialize_step_state(state.step_state)
        if not isinstance(custom, bytes):  # pyright: ignore[reportUnnecessaryIsInstance] users' input
            raise TypeError(f"serialize_step_state must give bytes, got {type(custom).__name__}")
        step_state = {"kind": "custom", "value": writer.raw(custom)}
    accumulators = state.accumulators
    if accumulators is not None:
        accumulators = {name: list(leaves) for name, leaves in accumulators.items()}
    plain = {
        "epoch": state.epoch,
        "max_epoch": state.max_epoch,
        "iteration": state.iteration,
        "max_iteration": state.max_iteration,
        "total_iterations": state.total_iterations,
        "max_steps": state.max_steps,
        "status": state.status,
        "counts": {"total": dict(state.counts.total), "epoch": dict(state.counts.epoch)},
        "times": dict(state.times),
        "history": {epoch: dict(values) for epoch, values in state.history.items()},
        "metrics": dict(state.metrics),
        "handler_state": dict(state.handler_state),
        "position": state.position,
        "accumulators": accumulators,
    }
    fields = {name: writer.plain(value, name, 0) for name, value in plain.items()}
    header = {"fields": fields, "step_state": step_state, "buffers": writer.table}
    text = json.dumps(header, allow_nan=False, separators=(",", ":")).encode()
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"the state's header has {len(text)} bytes, at most {MAX_HEADER_BYTES} can be read back")
    payload = b"".join(writer.buffers)
    stored = zlib.compress(payload) if compress else payload
    prefix = _PREFIX.pack(_MAGIC, SCHEMA, _COMPRESSED if compress else 0, len(text), len(stored), len(payload))
    digest = hashlib.sha256(prefix + text)
    digest.update(stored)
    return b"".join((prefix, digest.digest(), text, stored))


def deserialize_state(
    data: bytes, *, like: Any = None, deserialize_step_state: Callable[[bytes], Any] | None = None
) -> LoopState:
    """Give the loop state that `serialize_state` wrote.

    Args:
      data: The bytes.
      like: An example of the step state, such as ``train_step.init(batch)`` gives: its structure is filled, and every
        leaf's name, shape and dtype must be the one that was saved. Not needed for dictionaries, lists, tuples and
        scalars, which come back as they were.
      deserialize_step_state: Gives the step state from the bytes that serialize_step_state gave.
    Raises:
      ValueError: The bytes are truncated, changed, foreign or of another schema; or a leaf differs from `like`.
      TypeError: What was given is not bytes, or `like` is a loop's state instead of a step's.
    """
    if isinstance(like, LoopState):
        raise TypeError(
            "like= takes an example of the step state, got a LoopState, which holds one: pass like=state.step_state"
        )
    if not isinstance(data, bytes | bytearray | memoryview):  # pyright: ignore[reportUnnecessaryIsInstance] users' input
        raise TypeError(f"deserialize_state takes bytes, got {type(data).__name__}; pass path.read_bytes() for a file")
    _check_machine()
    header, payload = _open(bytes(data))
    reader = _Reader(_buffers(header, payload))
    fields = _mapping(header.get("fields"), "fields")
    values = {name: reader.plain(value, name, 0) for name, value in fields.items()}
    step_state = _read_step_state(header, reader, like, deserialize_step_state)
    return _build(values, step_state)


def _read_step_state(
    header: Mapping[str, Any], reader: "_Reader", like: Any, custom: Callable[[bytes], Any] | None
) -> Any:
    entry = _mapping(header.get("step_state"), "step_state")
    kind = entry.get("kind")
    if kind == "custom":
        if custom is None:
            raise ValueError(
                "this state was saved with serialize_step_state: pass deserialize_step_state, its inverse, as well"
            )
        return custom(cast(bytes, reader.plain(entry.get("value"), "step_state", 0)))
    if kind != "tree":
        _bad("step_state", f"unknown kind {kind!r}")
    if custom is not None:
        raise ValueError("this state was saved without serialize_step_state, so deserialize_step_state does not apply")
    value = entry.get("value")
    if isinstance(value, Mapping) and value.get("t") == "leaves":
        named = reader.leaves(cast(Mapping[str, Any], value))
        if like is None:
            raise ValueError(
                f"the step state is a {value.get('type')!r}, whose structure is not in the bytes: pass like=, an "
                "example of it such as train_step.init(batch)"
            )
        return _fill(like, named)
    plain = reader.plain(value, "step_state", 0)
    if like is None:
        return plain
    return _fill(like, [(tree.path_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(plain)])


def _fill(like: PyTree, saved: list[tuple[str, Any]]) -> PyTree:
    """Put saved leaves into a structure, checked by name, shape and dtype."""
    expected = [(tree.path_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(like)]
    names, wanted = [name for name, _ in saved], [name for name, _ in expected]
    if names != wanted:
        missing = [name for name in wanted if name not in names]
        unknown = [name for name in names if name not in wanted]
        raise ValueError(
            "the saved step state is not like the example: "
            + (f"it lacks {', '.join(missing)}. " if missing else "")
            + (f"It has {', '.join(unknown)}, which the example lacks. " if unknown else "")
            + ("Its leaves come in another order. " if not missing and not unknown else "")
            + "Build the same model and optimizer as when it was saved"
        )
    for (name, leaf), (_, example) in zip(saved, expected, strict=True):
        had, want = _kind(leaf), _kind(example)
        if had != want:
            raise ValueError(
                f"leaf {name!r} was saved with {had} and the example has {want}. Build the same model and optimizer as "
                "when it was saved"
            )
    return jax.tree.unflatten(jax.tree.structure(like), [leaf for _, leaf in saved])


def _kind(leaf: Any) -> str:
    if isinstance(leaf, jax.ShapeDtypeStruct) or tree.is_array(leaf):
        return f"shape {tuple(leaf.shape)} and dtype {leaf.dtype}"
    return f"the Python type {type(leaf).__name__}"


def _build(values: dict[str, Any], step_state: Any) -> LoopState:
    """Make the LoopState, every field checked."""

    def count(name: str, *, optional: bool = False) -> Any:
        value = values.get(name)
        if value is None and optional:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            _bad(name, f"expected a whole number of at least 0, got {value!r}")
        return value

    def mapping(name: str, value: Any, key: type, item: type | None = None) -> dict[Any, Any]:
        if not isinstance(value, dict):
            _bad(name, f"expected a dictionary, got {type(value).__name__}")
        made = cast(dict[Any, Any], value)
        for k, v in made.items():
            if type(k) is not key or (item is not None and type(v) is not item):
                _bad(name, f"unexpected entry {k!r}: {v!r}")
        return made

    status = values.get("status")
    if status is not None and not isinstance(status, str):
        _bad("status", f"expected text, got {status!r}")
    counts = mapping("counts", values.get("counts"), str)
    metrics = Metrics()
    metrics.add(mapping("metrics", values.get("metrics"), str))
    accumulators = values.get("accumulators")
    if accumulators is not None:
        accumulators = mapping("accumulators", accumulators, str, list)
    return LoopState(
        step_state=step_state,
        epoch=count("epoch"),
        max_epoch=count("max_epoch", optional=True),
        iteration=count("iteration"),
        max_iteration=count("max_iteration", optional=True),
        total_iterations=count("total_iterations"),
        max_steps=count("max_steps", optional=True),
        metrics=metrics,
        history=mapping("history", values.get("history"), int, dict),
        times=mapping("times", values.get("times"), int, float),
        counts=Counts(
            {**dict.fromkeys(EVENTS, 0), **mapping("counts", counts.get("total"), str, int)},
            {**dict.fromkeys(EVENTS, 0), **mapping("counts", counts.get("epoch"), str, int)},
        ),
        handler_state=mapping("handler_state", values.get("handler_state"), str),
        status=status,
        position=values.get("position"),
        accumulators=accumulators,
    )


# -- writing -----------------------------------------------------------------------------------------------------------


class _Writer:
    """Turns values into JSON nodes, and arrays into buffers with a table of them."""

    def __init__(self) -> None:
        self.buffers: list[bytes] = []
        self.table: list[dict[str, Any]] = []

    def tree(self, value: Any, where: str) -> Any:
        """Write a tree: as it is when it is made of plain containers, else as named leaves."""
        if _is_plain(value, 0):
            return self.plain(value, where, 0)
        leaves = jax.tree_util.tree_leaves_with_path(value)
        return {
            "t": "leaves",
            "type": type(value).__name__,
            "v": [
                [name := tree.path_name(path), self.plain(leaf, f"{where}/{name}".rstrip("/"), 0)]
                for path, leaf in leaves
            ],
        }

    def plain(self, value: Any, where: str, depth: int) -> Any:
        """Write a number, text, an array, or a plain container of them."""
        if depth > MAX_DEPTH:
            raise ValueError(f"{where} is nested more than {MAX_DEPTH} deep")
        match value:
            case None | bool() | str():
                return value
            case _ if type(value) is int:
                return value
            case _ if type(value) is float:
                return value if math.isfinite(value) else {"t": "float", "v": repr(value)}
            case bytes():
                return self.raw(value)
            case _ if type(value) is dict:
                items = cast(dict[Any, Any], value).items()
                for key, _ in items:
                    if key is not None and type(key) not in (str, int, bool):
                        raise TypeError(f"{where} has the key {key!r}; keys must be text or whole numbers")
                return {"t": "dict", "v": [[k, self.plain(v, f"{where}/{k}", depth + 1)] for k, v in items]}
            case _ if type(value) in (list, tuple):
                kind = "list" if type(value) is list else "tuple"
                items = [self.plain(v, f"{where}/{i}", depth + 1) for i, v in enumerate(value)]
                return {"t": kind, "v": items}
            case jax.Array() | np.ndarray() | np.generic():
                return self.array(value, where)
            case _:
                raise TypeError(
                    f"{where} holds a {type(value).__name__}, which cannot be written: keep numbers, text, arrays, and "
                    "dictionaries, lists or tuples of them"
                    + (
                        "; give serialize_step_state= for a step state of another kind"
                        if where.startswith("step_state")
                        else ""
                    )
                )

    def array(self, value: Any, where: str) -> dict[str, Any]:
        """Write an array or a scalar of JAX or NumPy; a typed key by its words."""
        node: dict[str, Any] = {"t": "numpy"}
        if isinstance(value, jax.Array):
            node["t"] = "jax"
            if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
                implementation = str(jax.random.key_impl(value))
                if implementation not in _KEY_IMPLEMENTATIONS:
                    raise TypeError(f"{where} is a key of {implementation!r}; known: {', '.join(_KEY_IMPLEMENTATIONS)}")
                node = {"t": "key", "impl": implementation}
                value = jax.random.key_data(value)
            elif not (value.is_fully_addressable or value.is_fully_replicated):
                raise ValueError(
                    f"{where} lies on the devices of several processes, and this one has a part of it: save the run "
                    "with telic.Trainer(checkpoints=telic.Checkpoints('runs/name')), to which each writes its parts"
                )
        elif isinstance(value, np.generic):
            node["t"] = "scalar"
        host = np.asarray(value)
        if host.dtype.name not in _DTYPES:
            raise TypeError(f"{where} has dtype {host.dtype}, which cannot be written; known: {', '.join(_DTYPES)}")
        host = host.astype(_DTYPES[host.dtype.name], copy=False)  # a foreign byte order becomes this machine's
        return node | {"b": self._add(host.tobytes(), host.dtype.name, list(host.shape))}

    def raw(self, value: bytes) -> dict[str, Any]:
        """Write bytes."""
        return {"t": "bytes", "b": self._add(value, "uint8", [len(value)])}

    def _add(self, raw: bytes, dtype: str, shape: list[int]) -> int:
        self.buffers.append(raw)
        self.table.append({"dtype": dtype, "shape": shape})
        return len(self.table) - 1


def _is_plain(value: Any, depth: int) -> bool:
    """Say whether a value is made of plain containers only, so that its structure can be written."""
    if depth > MAX_DEPTH:
        return False
    if type(value) is dict:
        items = cast(dict[Any, Any], value)
        return all(type(k) in (str, int, bool) or k is None for k in items) and all(
            _is_plain(v, depth + 1) for v in items.values()
        )
    if type(value) in (list, tuple):
        return all(_is_plain(v, depth + 1) for v in value)
    return value is None or isinstance(value, bool | int | float | str | bytes | jax.Array | np.ndarray | np.generic)


# -- reading -----------------------------------------------------------------------------------------------------------


def _bad(where: str, why: str) -> NoReturn:
    raise ValueError(f"these bytes are no loop state: {where}: {why}")


def _check_machine() -> None:
    if sys.byteorder != "little":
        raise ValueError("loop states are written in little-endian order, which this machine does not use")


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        _bad(where, f"expected an object, got {type(value).__name__}")
    return cast(Mapping[str, Any], value)


def _open(data: bytes) -> tuple[Mapping[str, Any], bytes]:
    """Check prefix, lengths and digest, and give header and payload; nothing is allocated on a file's word alone."""
    if len(data) < _PREFIX.size + _DIGEST_BYTES or not data.startswith(_MAGIC):
        raise ValueError(
            "these bytes are no loop state (they do not begin as one); pass what telic.serialize_state gave"
            if not data.startswith(_MAGIC)
            else f"this loop state is truncated: {len(data)} bytes are less than its prefix"
        )
    _, schema, flags, header_size, stored_size, raw_size = _PREFIX.unpack_from(data)
    if schema != SCHEMA:
        raise ValueError(
            f"this loop state has schema {schema}, this version of Telic reads schema {SCHEMA}; use the version that "
            "wrote it"
        )
    if header_size > MAX_HEADER_BYTES:
        _bad("header", f"{header_size} bytes are more than the {MAX_HEADER_BYTES} allowed")
    start = _PREFIX.size + _DIGEST_BYTES
    expected = start + header_size + stored_size
    if len(data) != expected:
        kind = "truncated" if len(data) < expected else "followed by other bytes"
        raise ValueError(f"this loop state is {kind}: expected {expected} bytes, got {len(data)}")
    digest = hashlib.sha256(data[: _PREFIX.size])
    digest.update(memoryview(data)[start:])
    if digest.digest() != data[_PREFIX.size : start]:
        raise ValueError("this loop state is damaged: its SHA-256 does not match; use another copy or an earlier one")
    if flags not in (0, _COMPRESSED):
        _bad("flags", f"unknown {flags}")
    try:
        header = json.loads(data[start : start + header_size], parse_constant=lambda word: _bad("header", word))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"these bytes are no loop state: the header cannot be read ({type(error).__name__})") from None
    stored = data[start + header_size :]
    if not flags:
        if raw_size != stored_size:
            _bad("payload", f"expected {raw_size} bytes, got {stored_size}")
        return _mapping(header, "header"), stored
    if raw_size > _ZLIB_RATIO * (stored_size + 1):
        _bad("payload", f"{stored_size} compressed bytes cannot hold {raw_size}")
    unpack = zlib.decompressobj()
    try:
        payload = unpack.decompress(stored, raw_size + 1)
    except zlib.error as error:
        raise ValueError(f"these bytes are no loop state: the payload cannot be unpacked ({error})") from None
    if len(payload) != raw_size or not unpack.eof or unpack.unused_data:
        _bad("payload", f"it does not unpack to {raw_size} bytes")
    return _mapping(header, "header"), payload


class _Buffer(NamedTuple):
    """One buffer of the payload."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    raw: memoryview


def _buffers(header: Mapping[str, Any], payload: bytes) -> list[_Buffer]:
    """Cut the payload by the header's table; together the buffers must be the payload, byte for byte."""
    table = header.get("buffers")
    if not isinstance(table, list):
        _bad("buffers", "expected a list")
    view, at, made = memoryview(payload), 0, list[_Buffer]()
    for i, entry in enumerate(cast(list[Any], table)):
        entry = _mapping(entry, f"buffers/{i}")
        dtype, shape = entry.get("dtype"), entry.get("shape")
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            _bad(f"buffers/{i}", f"unknown dtype {dtype!r}")
        if not isinstance(shape, list) or len(cast(list[Any], shape)) > 64:
            _bad(f"buffers/{i}", f"bad shape {shape!r}")
        for n in cast(list[Any], shape):
            if type(n) is not int or n < 0:
                _bad(f"buffers/{i}", f"bad shape {shape!r}")
        size = math.prod(cast(list[int], shape)) * _DTYPES[dtype].itemsize
        if size > len(payload) - at:
            _bad(f"buffers/{i}", f"{size} bytes, but only {len(payload) - at} are left")
        made.append(_Buffer(_DTYPES[dtype], tuple(cast(list[int], shape)), view[at : at + size]))
        at += size
    if at != len(payload):
        _bad("buffers", f"they hold {at} of {len(payload)} bytes")
    return made


class _Reader:
    """Turns JSON nodes back into values."""

    def __init__(self, buffers: list[_Buffer]):
        self._buffers = buffers

    def plain(self, node: Any, where: str, depth: int) -> Any:
        """Read what `_Writer.plain` wrote."""
        if depth > MAX_DEPTH:
            _bad(where, f"nested more than {MAX_DEPTH} deep")
        if node is None or isinstance(node, bool | int | float | str):
            return node
        entry = _mapping(node, where)
        match entry.get("t"), entry.get("v"):
            case "float", str(word) if word in ("nan", "inf", "-inf"):
                return float(word)
            case "dict", list(items):
                made: dict[Any, Any] = {}
                for item in cast(list[Any], items):
                    if not isinstance(item, list) or len(cast(list[Any], item)) != 2:
                        _bad(where, "an entry is no pair")
                    key, value = cast(list[Any], item)
                    if not (key is None or isinstance(key, bool | int | str)) or key in made:
                        _bad(where, f"bad key {key!r}")
                    made[key] = self.plain(value, f"{where}/{key}", depth + 1)
                return made
            case "list" | "tuple" as kind, list(items):
                read = [self.plain(v, f"{where}/{i}", depth + 1) for i, v in enumerate(cast(list[Any], items))]
                return read if kind == "list" else tuple(read)
            case ("jax" | "numpy" | "scalar" | "key" | "bytes") as kind, None:
                return self._array(kind, entry, where)
            case kind, _:
                _bad(where, f"unknown node {kind!r}")

    def leaves(self, node: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """Read named leaves."""
        items = node.get("v")
        if not isinstance(items, list):
            _bad("step_state", "expected a list of leaves")
        made: list[tuple[str, Any]] = []
        for item in cast(list[Any], items):
            match item:
                case [str(name), value]:
                    made.append((name, self.plain(value, f"step_state/{name}", 0)))
                case _:
                    _bad("step_state", "a leaf has no name")
        return made

    def _array(self, kind: str, node: Mapping[str, Any], where: str) -> Any:
        index = node.get("b")
        if type(index) is not int or not 0 <= index < len(self._buffers):
            _bad(where, f"no buffer {index!r}")
        buffer = self._buffers[index]
        if kind == "bytes":
            return bytes(buffer.raw)
        # A copy: the bytes read only, at any alignment, and shared by nodes that name one buffer.
        host = np.frombuffer(buffer.raw, buffer.dtype).reshape(buffer.shape).copy()
        if kind == "numpy":
            return host
        if kind == "scalar":
            if host.ndim:
                _bad(where, f"a scalar of shape {host.shape}")
            return host[()]
        if kind == "key":
            implementation = node.get("impl")
            if implementation not in _KEY_IMPLEMENTATIONS:
                _bad(where, f"unknown kind of key {implementation!r}")
            try:
                return jax.random.wrap_key_data(jnp.asarray(host), impl=implementation)
            except (TypeError, ValueError) as error:
                raise ValueError(f"these bytes are no loop state: {where}: {error}") from None
        if jax.dtypes.canonicalize_dtype(host.dtype) != host.dtype:
            raise ValueError(
                f"{where} was saved with dtype {host.dtype}, which JAX would narrow here: set jax_enable_x64, as in "
                "the run that saved it"
            )
        return jnp.asarray(host)
