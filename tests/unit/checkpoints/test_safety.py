"""What is read is compared, never executed: no pickle, no eval, no import by name, and nothing without bounds."""

import ast
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import telic
from telic.checkpoints import files, plain, store
from telic.checkpoints.manifest import MAX_BYTES, Entry, Manifest, decode, encode, read
from telic.errors import CheckpointError

PACKAGE = Path(str(telic.__file__)).parent
READERS = [*sorted((PACKAGE / "checkpoints").glob("*.py")), PACKAGE / "compose" / "resume.py"]

FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "importlib"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "import_module", "load_module", "getattr_static"}


def dangers(text: str) -> list[str]:
    """Give what in a module could turn bytes into behaviour."""
    found: list[str] = []
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Import(names=names):
                found += [a.name for a in names if a.name.split(".")[0] in FORBIDDEN_MODULES]
            case ast.ImportFrom(module=str(module), names=names):
                # Reading the version of an installed package runs nothing.
                only_versions = module == "importlib" and [a.name for a in names] == ["metadata"]
                if module.split(".")[0] in FORBIDDEN_MODULES and not only_versions:
                    found.append(module)
            case ast.Call(func=ast.Name(id=name)) | ast.Call(func=ast.Attribute(attr=name)):
                if name in FORBIDDEN_CALLS and ast.unparse(node.func) != "re.compile":
                    found.append(name)
                if name == "load" and ast.unparse(node.func).split(".")[0] in ("np", "numpy", "torch", "jnp"):
                    found.append(ast.unparse(node.func))
                found += [k.arg for k in node.keywords if k.arg in ("allow_pickle", "shell")]
            case _:
                pass
    return found


@pytest.mark.parametrize("path", READERS, ids=lambda p: p.stem)
def test_nothing_read_can_run(path: Path) -> None:
    """Catches a way for a file to become code (every "safe" flag over pickle has been got round)."""
    assert dangers(path.read_text()) == []


@pytest.mark.parametrize(
    "text",
    ["import pickle", "from cloudpickle import loads", "eval(x)", "importlib.import_module(n)", "np.load(f)",
     "f(allow_pickle=False)", "subprocess.run(c, shell=True)"],
)  # fmt: skip
def test_the_ban_bans(text: str) -> None:
    """Catches a ban that stopped looking."""
    assert dangers(text)


def test_only_one_module_knows_orbax() -> None:
    """Catches a second place that would have to change with Orbax."""
    knowing = [p for p in PACKAGE.rglob("*.py") if "import orbax" in p.read_text() or "from orbax" in p.read_text()]
    assert [p.relative_to(PACKAGE).as_posix() for p in knowing] == ["checkpoints/store.py"]


def envelope(body: Any) -> bytes:
    """Give what a forger would write: a checksum detects accidents, not him."""
    text = body if isinstance(body, str) else json.dumps(body)
    return json.dumps(
        {"telic": "checkpoint", "sha256": hashlib.sha256(text.encode()).hexdigest(), "body": text}
    ).encode()


def entry(*changes: tuple[int, Any]) -> list[Any]:
    made: list[Any] = [[2], "float32", "0" * 64, "small", 0, None]
    for place, value in changes:
        made[place] = value
    return made


HOSTILE: dict[str, Any] = {
    "not a mapping": [],
    "no leaves": {"schema": 1, "run": "r"},
    "a later format": {"schema": 3, "run": "r", "leaves": {}},
    "schema of another kind": {"schema": True, "run": "r", "leaves": {}},
    "negative schema": {"schema": -1, "run": "r", "leaves": {}},
    "run of another kind": {"schema": 1, "run": ["r"], "leaves": {}},
    "path for an array": {"schema": 1, "run": "r", "leaves": {"x": entry((3, "../../etc"), (4, None))}},
    "negative shape": {"schema": 1, "run": "r", "leaves": {"x": entry((0, [-1]))}},
    "huge shape": {"schema": 1, "run": "r", "leaves": {"x": entry((0, [2**60]))}},
    "endless rank": {"schema": 1, "run": "r", "leaves": {"x": entry((0, [1] * 1000))}},
    "truth for a size": {"schema": 1, "run": "r", "leaves": {"x": entry((0, [True]))}},
    "object dtype": {"schema": 1, "run": "r", "leaves": {"x": entry((1, "object"))}},
    "dtype with fields": {"schema": 1, "run": "r", "leaves": {"x": entry((1, "i4,O"))}},
    "class for a key": {"schema": 1, "run": "r", "leaves": {"x": entry((5, "os.system"))}},
    "short entry": {"schema": 1, "run": "r", "leaves": {"x": [[2], "float32"]}},
    "deep": "[" * 100_000 + "]" * 100_000,
    "yaml": "!!python/object/apply:os.system ['true']",
    "pickle": "cos\nsystem\n(S'true'\ntR.",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_manifests(name: str) -> None:
    """Catches a forged manifest that gets further than a comparison."""
    with pytest.raises(CheckpointError):
        decode(envelope(HOSTILE[name]))


@given(st.one_of(st.binary(max_size=200), st.text(max_size=200).map(str.encode)))
def test_any_bytes(text: bytes) -> None:
    """Catches an error of another kind than "damaged" for bytes that are no manifest."""
    with pytest.raises(CheckpointError):
        decode(text)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


@given(json_values)
def test_any_json_body(body: Any) -> None:
    """Catches a well-formed body of the wrong kinds that is believed or crashes."""
    with pytest.raises(CheckpointError):
        decode(envelope(body))


plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(plain_values)
def test_plain_round_trip(value: Any) -> None:
    """Catches a tuple that comes back as a list, or an epoch's number as text: state that handlers compare."""
    back = plain.load(json.loads(json.dumps(plain.dump(value, "x", {}))), {})
    assert back == value
    assert repr(back) == repr(value)


def test_what_is_not_plain_is_named() -> None:
    """Catches a handler's object that is written as its text, or dropped."""
    with pytest.raises(CheckpointError, match="handlers/mine/1 holds a set"):
        plain.dump({"mine": [1, {2}]}, "handlers", {})
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(CheckpointError, match="nested deeper"):
        plain.dump(loop, "handlers", {})


def test_endless_manifest_is_not_read(tmp_path: Path) -> None:
    """Catches a file without end read into memory: it is sparse here, so only reading it would cost."""
    path = tmp_path / "metadata"
    with path.open("wb") as file:
        file.truncate(50 * MAX_BYTES)
    with pytest.raises(CheckpointError, match="more than"):
        read(path)


def test_a_bomb_is_refused(tmp_path: Path) -> None:
    """Catches memory taken for arrays that the files on the disk cannot hold."""
    path = tmp_path / "1"
    (path / "manifest").mkdir(parents=True)
    (path / "arrays").mkdir()
    (path / "arrays" / "d").write_bytes(b"x" * 1000)
    leaves = {"x": Entry((2**40,), "float32", "0" * 64, "a000000", None, None)}
    (path / store.MANIFEST).write_text(json.dumps(encode(Manifest("r", leaves, {}))))
    with pytest.raises(CheckpointError, match="cannot hold"):
        store.read(tmp_path, "1")


def test_a_linked_checkpoint_is_not_followed(tmp_path: Path) -> None:
    """Catches a link in the run's directory that brings in, or deletes, what lies elsewhere."""
    (tmp_path / "else" / "manifest").mkdir(parents=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "5").symlink_to(tmp_path / "else", target_is_directory=True)
    assert files.listing(tmp_path / "run") == ([], ["5"])
    with pytest.raises(CheckpointError, match="link"):
        files.remove(tmp_path / "run", "5")
    assert (tmp_path / "else" / "manifest").is_dir()


_watch: list[str] | None = None


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _watch is not None and event in ("pickle.find_class", "exec", "compile", "os.system", "subprocess.Popen"):
        _watch.append(f"{event} {arguments!r:.200}")


def test_reading_runs_nothing(tmp_path: Path) -> None:
    """Catches code that runs while hostile bytes are read, whoever runs it."""
    global _watch
    sys.addaudithook(_audit)
    path = tmp_path / "metadata"
    decode(envelope({"schema": 1, "run": "r", "leaves": {}}))
    _watch = []
    try:
        for body in HOSTILE.values():
            path.write_bytes(envelope(body))
            with pytest.raises(CheckpointError):
                read(path)
        assert _watch == []
    finally:
        _watch = None
