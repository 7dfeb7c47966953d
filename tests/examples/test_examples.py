"""Every program in examples/ runs, and does what its page says it does."""

import importlib
import runpy
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import telic
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


def test_replay_finds_the_shortest_ways() -> None:
    """Catches a source that is read ahead of the weights it walks with, or a target network that is the live one."""
    before, after, _ = importlib.import_module("examples.replay").main(steps=1500)
    assert before < 0.3
    assert after > 0.9


def test_replay_resumes_with_its_memories(tmp_path: Path) -> None:
    """Catches a source of a user's own whose position is not saved whole."""
    replay = importlib.import_module("examples.replay")
    *_, whole = replay.main(steps=60)
    for steps in (25, 60):
        *_, resumed = replay.main(steps=steps, checkpoints=telic.Checkpoints(tmp_path, every=25))
    for a, b in zip(*(jax.tree.leaves(state.variables) for state in (whole, resumed)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.endurance
def test_addition_learns_from_examples() -> None:
    """Catches answers that are learned a token off: right to the letter means that the end is learned as well."""
    found = importlib.import_module("examples.addition_sft").main(steps=600)
    assert found["likeliest"] > 0.5


@pytest.mark.endurance
def test_addition_prefers_right_answers() -> None:
    """Catches pairs the wrong way round, and a reference that moves: held-out pairs are told apart."""
    found = importlib.import_module("examples.addition_dpo").main(steps=300)
    assert found["reward_accuracy"] > 0.85


@pytest.mark.endurance
def test_addition_is_rewarded() -> None:
    """Catches rollouts with stale weights, and advantages with the wrong sign: the reward rises."""
    found = importlib.import_module("examples.addition_grpo").main(steps=150)
    assert found["reward_after"] > found["reward_before"] + 0.05


@pytest.mark.endurance
def test_diffusion_draws_and_judges_digits(tmp_path: Path) -> None:
    """Catches a training, sampling or judging step that no longer runs; 40 updates draw nothing one could read."""
    main = importlib.import_module("examples.diffusion_digits").main
    found = main(steps=40, each=10, epochs=1, dim=32, depth=1, directory=str(tmp_path))
    assert found["classifier"] > 0.9
    assert found["flow_distance"] > found["real_distance"]
    assert 0 <= found["edm_recognised"] <= 1
    assert (tmp_path / "flow.png").exists()
    assert (tmp_path / "edm.png").exists()


@pytest.mark.endurance
def test_diffusion_in_latents_runs() -> None:
    """Catches an autoencoder whose codes cannot be decoded: after 60 updates digits survive them in outline."""
    found = importlib.import_module("examples.diffusion_latents").main(steps=240, each=2, epochs=1, dim=16)
    assert found["error"] < 0.1


@pytest.mark.endurance
def test_jepa_encoder_is_probed() -> None:
    """Catches features that collapse at once, or a probe that reads the test digits' labels."""
    found = importlib.import_module("examples.jepa_digits").main(steps=30, dim=32, depth=1, each=20)
    assert 0.6 < found["pixels"] < 0.9
    assert found["trained"] > 0.2
    assert found["spread"] > 1e-3


@pytest.mark.endurance
@pytest.mark.timeout(3600)
def test_nine_of_ten_drawn_digits_are_recognised() -> None:
    """The long form: both processes as the page shows them."""
    found = importlib.import_module("examples.diffusion_digits").main()
    assert found["classifier"] >= 0.97
    assert found["flow_recognised"] >= 0.9
    assert found["edm_recognised"] >= 0.9


@pytest.mark.endurance
@pytest.mark.timeout(3600)
def test_jepa_features_beat_pixels() -> None:
    """The long form: 15 points above the untrained encoder, and above the pixels."""
    found = importlib.import_module("examples.jepa_digits").main()
    assert found["trained"] > found["untrained"] + 0.15
    assert found["trained"] > found["pixels"]


@pytest.mark.endurance
def test_language_bytes_learns_what_python_looks_like() -> None:
    """Catches a decoder that learns the frequency of bytes alone, 4.47 bits, or is scored on what it has read."""
    scores = importlib.import_module("examples.language_bytes").main(steps=120, length=64)
    assert scores["bits_per_byte"] < 4.2
    assert scores["perplexity"] == pytest.approx(2 ** scores["bits_per_byte"], rel=0.01)


@pytest.mark.endurance
@pytest.mark.filterwarnings("ignore::DeprecationWarning:qwix.*")
def test_language_lora_learns_and_exports() -> None:
    """Catches adapters that reach no loss, a merge that loses them, an export that loads as another model."""
    shares = run("language_lora")
    assert shares["before"] < 0.1
    assert shares["after"] > 0.5


def test_every_example_has_a_test_and_a_page() -> None:
    """Catches an example that nobody runs, or that no page leads to."""
    tests = Path(__file__).read_text()
    index = (ROOT / "docs" / "examples" / "index.md").read_text()
    names = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
    assert len(names) >= 9
    for name in names:
        assert any(f'"{known}"' in tests for known in (name, f"{name}.py", f"examples.{name}"))
        assert (ROOT / "docs" / "examples" / f"{name}.md").exists()
        assert f"({name}.md)" in index
