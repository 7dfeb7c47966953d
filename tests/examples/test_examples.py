"""Every program in examples/ runs, and does what its page says it does."""

import importlib
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from telic.data import digits_split

ROOT = Path(__file__).resolve().parents[2]


def run(name: str) -> Any:
    return importlib.import_module(f"examples.{name}").main()


def test_digits_reads_95_percent() -> None:
    """Catches a training path that runs and does not learn."""
    assert run("digits") >= 0.95


def test_loss_by_name_learns_and_validates() -> None:
    """Catches a name that maps to another loss, and validation that sees other weights."""
    final = run("loss_by_name")
    accuracies = [metrics["validation_accuracy"] for metrics in final.history.values()]
    assert len(accuracies) == 3
    assert accuracies[-1] > 0.9
    assert final.history[2]["validation_loss"] < final.history[0]["validation_loss"]


def test_contrastive_encoder_finds_copies_an_untrained_one_does_not() -> None:
    """Catches two forward passes of which one is not differentiated, or a prediction that metrics do not see."""
    untrained, trained = run("contrastive")
    assert untrained < 0.3
    assert trained > 0.7


def test_penalty_shrinks_the_weights_it_reads() -> None:
    """Catches a penalty on variables["params"] that reaches no gradient."""
    without, with_penalty = run("penalty")
    assert with_penalty["small"] > without["small"] + 0.3
    assert with_penalty["accuracy"] > 0.8


def test_multi_output_learns_both_outputs() -> None:
    """Catches a weighted loss whose second term is lost."""
    metrics = run("multi_output")
    assert metrics["validation_digit_accuracy"] > 0.88
    # The targets' own spread, which a head that learns nothing cannot beat.
    ink = 10 * digits_split("test", flat=True)["inputs"].mean(axis=1)
    assert metrics["validation_ink_error"] < 0.5 * float(np.mean(np.abs(ink - ink.mean())))


def test_vae_anneals_with_the_updates() -> None:
    """Catches a clock that stands still: with weight 0 throughout, the code would hold far more than 20 nats."""
    history = run("vae")
    assert history[3]["validation_reconstruction"] < history[0]["validation_reconstruction"] - 10
    assert 5 < history[3]["validation_kl"] < history[0]["validation_kl"]
    # At full weight the validation loss is the sum of its parts.
    parts = history[3]["validation_reconstruction"] + history[3]["validation_kl"]
    assert history[3]["validation_loss"] == pytest.approx(parts, rel=1e-5)


def test_distillation_teaches_without_labels_and_leaves_the_teacher() -> None:
    """Catches a frozen tree that is trained, and a student that learns nothing from it."""
    result = run("distillation")
    assert result["teacher_change"] == 0
    assert result["student"] > 0.85


def test_raw_loops_agree_with_numpy() -> None:
    """Catches a loop that drops or repeats a batch."""
    found = run("raw_loops")
    images = digits_split("train", flat=True)["inputs"].astype(np.float64)
    # Sums of 8,000 float32 values in [0, 1]: an error of some units in the seventh digit.
    np.testing.assert_allclose(found["mean"], images.mean(axis=0), atol=1e-6)
    np.testing.assert_allclose(found["variance"], images.var(axis=0), atol=1e-6)
    assert found["distances"] == sorted(found["distances"], reverse=True)
    assert found["distances"][-1] < 0.65 * found["distances"][0]


def test_batchnorm_objective_stores_the_running_mean() -> None:
    """Catches a change that the program of the objective page, which asserts its own outcome, no longer survives."""
    names = runpy.run_path(str(ROOT / "examples" / "batchnorm_objective.py"))
    assert names["running_mean"].shape == (4,)


def test_every_example_has_a_test_and_a_page() -> None:
    """Catches an example that nobody runs, or that no page leads to."""
    tests = Path(__file__).read_text()
    index = (ROOT / "docs" / "examples" / "index.md").read_text()
    names = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
    assert len(names) >= 9
    for name in names:
        assert f'"{name}"' in tests or f'"{name}.py"' in tests
        assert (ROOT / "docs" / "examples" / f"{name}.md").exists()
        assert f"({name}.md)" in index
