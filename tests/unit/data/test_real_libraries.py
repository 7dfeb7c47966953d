"""Batches of the real Hugging Face datasets and torch libraries, where they are installed.

Neither is in the test extra: torch alone is larger than everything else together. tests/unit/data/test_sources.py holds
the adapters to stand-ins; run these after ``pip install torch datasets``.
"""

import jax.numpy as jnp
import numpy as np
import pytest

import telic

WHY = "{} is not installed; it is too large for the test extra"


def model() -> tuple:
    return (lambda key, x: {"w": jnp.zeros(3)}, lambda params, x: x @ params["w"])


def table() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
    return x, x.sum(axis=-1)


def train(data: object, **options: object) -> dict:
    loop = telic.trainer(model(), "mean_squared_error", telic.optimizers.sgd(0.1), log=0)
    return loop.run(data, epochs=2, **options).history


def test_hugging_face_table_trains_like_arrays() -> None:
    """Catches advice in an error that does not work: a table is refused with two lines to write, and both must run."""
    datasets = pytest.importorskip("datasets", reason=WHY.format("datasets"))
    pyarrow = pytest.importorskip("pyarrow")
    x, y = table()
    # A fingerprint of its own: making one pickles pyarrow, which not every pair of versions can.
    rows = datasets.Dataset(pyarrow.table({"inputs": x.tolist(), "targets": y.tolist()}), fingerprint="telic")
    with pytest.raises(TypeError, match="Hugging Face Dataset, which gives records"):
        train(rows)
    rows = rows.with_format("numpy", dtype=np.float32)
    arrays = [{"inputs": x[i : i + 4], "targets": y[i : i + 4]} for i in range(0, 12, 4)]
    assert train(lambda epoch: rows.iter(batch_size=4)) == train(arrays)
    columns = {"inputs": rows["inputs"][:], "targets": rows["targets"][:]}
    assert train(telic.data.columns(columns, batch=4, shuffle=False)) == train(arrays)


def test_torch_loader_trains_like_arrays() -> None:
    """Catches tensors that are not turned into arrays, or batches whose memory the loader uses again."""
    torch = pytest.importorskip("torch", reason=WHY.format("torch"))
    x, y = table()
    stored = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    arrays = [(x[i : i + 4], y[i : i + 4]) for i in range(0, 12, 4)]
    assert train(torch.utils.data.DataLoader(stored, batch_size=4)) == train(arrays)
