"""`Rollouts`: whose variables draw, how batches follow each other, positions, and what is refused."""

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

import telic
from telic.advantages import group_advantages
from telic.data import ByteTokenizer, Rollouts
from telic.errors import DataError, Preempted, ShapeError
from telic.loop.ports import Draws, View
from telic.objectives import GRPOObjective

PROMPTS = ["a", "bb", "c", "dd", "e", "ff"]
TOKENIZER = ByteTokenizer()
NUM = 4


class Bytes:
    """A language model over bytes of a few numbers, whose head alone is learned."""

    def init_variables(self, key: Any, tokens: Any) -> Any:
        del tokens
        table, head = (
            jax.random.normal(k, s) for k, s in zip(jax.random.split(key), ((262, 3), (3, 262)), strict=True)
        )
        return {"params": {"table": table, "head": head}}

    def hidden_states(self, variables: Any, tokens: Any, **around: Any) -> Any:
        del around
        return SimpleNamespace(hidden=variables["params"]["table"][tokens], state={}, router=None, qk_max=None)

    def head(self, variables: Any) -> Any:
        return SimpleNamespace(kernel=variables["params"]["head"], bias=None, soft_cap=None, scale=1.0)


class Sampler:
    """Draws letters on the host, by key and by the sum of a weight, and remembers what it was given."""

    def __init__(self) -> None:
        self.calls: list[tuple[float, Any]] = []
        self.stop_at: int | None = None

    def __call__(self, variables: Any, prompts: Any, /, *, mask: Any, max_new_tokens: int, key: Any) -> Any:
        if self.stop_at == len(self.calls):
            self.stop_at = None
            os.kill(os.getpid(), signal.SIGTERM)
        weight = float(np.asarray(variables["params"]["head"]).sum())
        self.calls.append((weight, np.asarray(prompts)))
        draw = np.random.default_rng([*np.asarray(jax.random.key_data(key)).tolist(), int(abs(weight) * 1e6)])
        tokens = draw.integers(97, 110, (len(prompts), max_new_tokens))
        lengths = draw.integers(1, max_new_tokens + 1, len(prompts))
        assert (mask[:, -1] == 1).all()
        return SimpleNamespace(tokens=tokens, lengths=lengths, sampling_log_probs=-draw.random(tokens.shape) - 1)


def vowels(prompts: list[str], completions: list[str]) -> list[int]:
    del prompts
    return [sum(c in "aei" for c in text) for text in completions]


def rollouts(sampler: Any = None, **options: Any) -> Any:
    given = {"reward": vowels, "group": 2, "batch": 3, "max_new_tokens": NUM, **options}
    return Rollouts(given.pop("prompts", PROMPTS), TOKENIZER, generate=sampler or Sampler(), **given)


def view(weight: float = 0.0, epoch: int = 0) -> View:
    return View({"params": {"head": np.asarray([weight])}}, epoch, 0)


def test_a_batch() -> None:
    """XS164, XS168: rows that are a place off, an end that is masked, a reward that is not the one trained on."""
    source = rollouts(shuffle=False)
    assert isinstance(source, Draws)
    source.begin(0)
    batch, _ = source.next(view())
    example = source.example()
    assert {n: (x.shape, x.dtype) for n, x in batch.items()} == {n: (x.shape, x.dtype) for n, x in example.items()}
    assert batch["tokens"].shape == (6, 2 + NUM)
    np.testing.assert_array_equal(batch["tokens"][:, 1], [97, 97, 98, 98, 99, 99])
    np.testing.assert_array_equal(batch["segment_ids"][:, 0], [0, 0, 1, 1, 0, 0])
    np.testing.assert_array_equal(batch["completion_mask"][:, :2], 0)
    np.testing.assert_array_equal(batch["completion_mask"][:, 2:], batch["segment_ids"][:, 2:])
    assert (np.diff(batch["completion_mask"][:, 2:], axis=1) <= 0).all()
    assert (batch["completion_mask"][:, 2] == 1).all()
    assert (batch["old_log_probs"][batch["completion_mask"] == 1] <= -1).all()
    np.testing.assert_array_equal(batch["old_log_probs"][batch["completion_mask"] == 0], 0)
    texts = [TOKENIZER.decode(t[m == 1]) for t, m in zip(batch["tokens"], batch["completion_mask"], strict=True)]
    np.testing.assert_array_equal(batch["rewards"], vowels([], texts))
    np.testing.assert_allclose(batch["advantages"], group_advantages(batch["rewards"], group=2), rtol=1e-6)


def test_columns_reach_the_reward_repeated_like_the_prompts() -> None:
    """Catches a column that goes with another prompt's completions, by order, group or shuffle."""
    seen: list[Any] = []

    def reward(prompts: list[str], completions: list[str], *, size: list[int]) -> list[int]:
        seen.append((prompts, size))
        assert len(prompts) == len(completions) == len(size) == 6
        return [0] * 6

    source = rollouts(prompts={"prompt": PROMPTS, "size": [len(p) for p in PROMPTS]}, reward=reward)
    for _ in range(2):
        source.next(view())
    prompts = [p for ps, _ in seen for p in ps]
    assert [n for _, size in seen for n in size] == [len(p) for p in prompts]
    assert prompts[::2] == prompts[1::2]
    assert sorted(prompts[::2]) == sorted(PROMPTS)
    assert prompts[::2] != PROMPTS


def test_a_rollout_serves_its_updates_and_microbatches() -> None:
    """XS165: rows of a microbatch that meet another row's log-probs, and a rollout that is drawn once too often."""
    sampler = Sampler()
    source = rollouts(sampler, updates=2, microbatches=3, shuffle=False)
    source.begin(0, continuous=True)
    batches = [source.next(view(float(i)))[0] for i in range(8)]
    assert [weight for weight, _ in sampler.calls] == [0.0, 6.0]
    for i in range(3):
        for name, array in batches[i].items():
            np.testing.assert_array_equal(array, batches[i + 3][name])
    whole = {n: np.concatenate([b[n] for b in batches[:3]]) for n in batches[0]}
    np.testing.assert_array_equal(whole["tokens"][:, 1], [97, 97, 98, 98, 99, 99])
    np.testing.assert_allclose(whole["advantages"], group_advantages(whole["rewards"], group=2), rtol=1e-6)


def test_an_epoch_is_a_pass_over_the_prompts() -> None:
    """Catches an epoch without an end, prompts that come twice in it, and one order for every epoch."""
    sampler = Sampler()
    source = rollouts(sampler, updates=2, seed=1)
    for epoch in (0, 1):
        source.begin(epoch)
        for _ in range(4):
            source.next(view(epoch=epoch))
        for _ in range(2):
            with pytest.raises(StopIteration):
                source.next(view(epoch=epoch))
    passes = [np.concatenate([p[::2, -1] for _, p in sampler.calls[i : i + 2]]) for i in (0, 2)]
    assert [sorted(p.tolist()) for p in passes] == [list(range(97, 103))] * 2
    assert passes[0].tolist() != passes[1].tolist()
    keys = {tuple(x.ravel().tolist()) for x in (c[1] for c in sampler.calls)}
    assert len(keys) == 4


@pytest.mark.parametrize("place", range(9))
def test_any_position_can_be_come_back_to(place: int) -> None:
    """XS104: a key or an order that is not in the position; a rollout in use that is drawn anew with later weights."""
    source = rollouts(updates=2, microbatches=2)
    source.begin(0, continuous=True)
    position = source.get_state()
    for i in range(place):
        _, position = source.next(view(i))
    expected = [source.next(view(i))[0] for i in range(place, place + 9)]
    again = rollouts(updates=2, microbatches=2)
    again.set_state(position)
    again.begin(0, continuous=True)
    for i, batch in zip(range(place, place + 9), expected, strict=True):
        found = again.next(view(i))[0]
        for name, array in batch.items():
            np.testing.assert_array_equal(found[name], array)


def test_skipped_batches_are_not_drawn() -> None:
    """Catches a state that is taken up again by drawing everything before it."""
    sampler, other = Sampler(), Sampler()
    source, skipping = rollouts(sampler, updates=2), rollouts(other, updates=2)
    for one in (source, skipping):
        one.begin(0, continuous=True)
    for _ in range(6):
        source.next(view())
    skipping.skip(6)
    assert not other.calls
    np.testing.assert_array_equal(skipping.next(view())[0]["tokens"], source.next(view())[0]["tokens"])


def test_positions_of_other_rollouts_are_refused() -> None:
    """Catches a run that goes on with other prompts or counts, in silence."""
    _, position = rollouts().next(view())
    for options, text in (
        ({"seed": 1}, "seed=0.*seed=1"),
        ({"group": 3}, "group=2.*group=3"),
        ({"prompts": PROMPTS[::-1]}, "prompts="),
        ({"updates": 2}, "updates=1"),
    ):
        with pytest.raises(DataError, match=text):
            rollouts(**options).set_state(position)
    with pytest.raises(DataError, match="has the fields epoch, pass"):
        rollouts().set_state({"epoch": 0})


def train(sampler: Sampler, directory: Path | None = None, *, resume_steps: int = 6, **options: Any) -> Any:
    objective = GRPOObjective(Bytes())
    objective.ema = telic.EMASpec(decay=0.5)
    places = None if directory is None else telic.Checkpoints(directory, keep=100)
    trainer = telic.Trainer(
        objective, telic.optimizers.adam(1e-1), key=0, accumulate=options.get("microbatches", 1), checkpoints=places
    )
    every = None if directory is None else 1
    return trainer.fit(rollouts(sampler, **options), steps=resume_steps, log_every=1000, checkpoint_every=every)


def leaves(state: Any) -> list[Any]:
    return [
        np.asarray(jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
        for x in jax.tree.leaves(state)
    ]


def same(a: Any, b: Any) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(leaves(a), leaves(b), strict=True))


OPTIONS = {"updates": 2, "microbatches": 2}


@pytest.mark.parametrize("averaged", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_rollouts_are_drawn_with_the_variables_of_their_moment(averaged: bool) -> None:
    """Catches stale variables: a rollout is drawn after the update before it, from the live or the averaged ones."""
    sampler = Sampler()
    train(sampler, resume_steps=4, **OPTIONS, averaged=averaged)
    drawn = [weight for weight, _ in sampler.calls]
    expected: list[float] = []
    for steps in (0, 2):
        state = train(Sampler(), resume_steps=steps, **OPTIONS, averaged=averaged)
        weights = state.averaged if averaged else state.variables
        expected.append(float(np.asarray(weights["params"]["head"]).sum()))
    assert drawn == expected


def test_killed_in_the_middle_of_a_rollout(tmp_path: Path) -> None:
    """Everything resumes: killed while it draws, and between the updates of one rollout, the run ends bit-equal."""
    whole = train(Sampler(), **OPTIONS)
    sampler = Sampler()
    sampler.stop_at = 1
    with pytest.raises(Preempted):
        train(sampler, tmp_path / "drawing", **OPTIONS)
    assert same(train(Sampler(), tmp_path / "drawing", **OPTIONS), whole)
    for steps in (1, 3):
        train(Sampler(), tmp_path / str(steps), resume_steps=steps, **OPTIONS)
        again = Sampler()
        assert same(train(again, tmp_path / str(steps), **OPTIONS), whole)
        # The rollout that was in use is not drawn again.
        assert len(again.calls) == (5 - steps) // 2


def test_a_loop_goes_on_from_a_state() -> None:
    """Catches a position that only checkpoints restore: epochs continued from a LoopState draw what follows."""

    def run(epochs: int, state: Any = None) -> Any:
        trainer = telic.Trainer(GRPOObjective(Bytes()), telic.optimizers.adam(1e-1), key=0)
        return trainer.loop(log=0).run(rollouts(), epochs=epochs, state=state)

    assert same(run(2, run(1)).step_state, run(2).step_state)


def test_training_is_checked_without_drawing() -> None:
    """Catches a check that needs a state before there is one."""
    sampler = Sampler()
    report = telic.Trainer(GRPOObjective(Bytes()), "adam", key=0).check(rollouts(sampler))
    assert report.ok
    assert not sampler.calls


@pytest.mark.parametrize(
    ("reward", "text"),
    [
        (lambda prompts, completions: None, r"must return 6 numbers.*returned None; its first prompt was '[a-f]+'"),
        (lambda prompts, completions: [1.0] * 5, r"returned 5 .*its first prompt was"),
        (lambda prompts, completions: np.zeros((6, 1)), r"shape \(6, 1\)"),
        (lambda prompts, completions: [1.0, float("nan")] * 3, r"returned nan for the completion '.*' of the prompt '"),
        (lambda prompts, completions: [1.0, None] * 3, r"returned None for the completion '.*' of the prompt '"),
        (lambda prompts, completions: ["1"] * 6, r"returned '1' for the completion"),
        (lambda prompts, completions: [[1, 2]] * 6, r"returned \[1, 2\] for the completion"),
        (lambda prompts, completions: np.inf * np.ones(6), r"returned .*inf"),
    ],
)
def test_rewards_that_are_refused(reward: Any, text: str) -> None:
    """Catches a reward of NaN or None that becomes an advantage, and one that goes with another completion."""
    with pytest.raises(DataError, match=text):
        rollouts(reward=reward).next(view())


def test_rewards_of_any_kind_of_numbers() -> None:
    """Catches booleans, NumPy and JAX arrays that are taken for something else."""
    for reward in ([True, False] * 3, np.arange(6), jax.numpy.arange(6.0), iter(range(6))):
        batch, _ = rollouts(reward=lambda prompts, completions, reward=reward: reward).next(view())
        assert batch["rewards"].dtype == np.float32


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"group": 1}, ValueError, "a group needs at least 2 completions"),
        ({"prompts": []}, DataError, "there are no prompts"),
        ({"prompts": ["a", ""]}, DataError, "prompt 1 is empty"),
        ({"prompts": "a + b"}, DataError, r"a list of texts, got one text: write \['a \+ b'\]"),
        ({"prompts": ["a", 1]}, DataError, "prompt 1 is no text but int 1"),
        ({"prompts": {"text": ["a"]}}, DataError, "need one called 'prompt', got"),
        ({"prompts": {"prompt": PROMPTS, "answer": [1]}}, DataError, "'answer' has 1 values for 6 prompts"),
        ({"prompts": {"prompt": PROMPTS, "completions": PROMPTS}}, DataError, "gets completions already"),
        ({"batch": 7}, ValueError, "there are 6"),
        ({"microbatches": 4}, ValueError, "does not divide into 4 microbatches"),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens must be an integer of at least 1"),
        ({"updates": 0}, ValueError, "updates must be"),
        ({"scale": "std"}, ValueError, "unknown scale"),
        ({"reward": None}, TypeError, "reward must be a function, got NoneType"),
    ],
)
def test_what_is_refused(options: dict[str, Any], error: type[Exception], text: str) -> None:
    """Catches counts and columns that would fail at the first draw, hours later on a cluster."""
    with pytest.raises(error, match=text):
        rollouts(**options)


def test_without_a_training_state() -> None:
    """Catches rollouts given as validation data, or to a loop that trains no variables."""
    with pytest.raises(DataError, match="draw with the variables of a training state, got NoneType"):
        rollouts().next(View(None, 0, 0))
    trainer = telic.Trainer(GRPOObjective(Bytes()), "adam", key=0)
    with pytest.raises(DataError, match="the objective has none"):
        trainer.fit(rollouts(averaged=True), steps=1, log_every=1000)


def test_a_sampler_that_gives_other_shapes() -> None:
    """Catches completions that were stopped early by the sampler and are shorter than told."""

    def short(variables: Any, prompts: Any, /, *, mask: Any, max_new_tokens: int, key: Any) -> Any:
        found = Sampler()(variables, prompts, mask=mask, max_new_tokens=max_new_tokens, key=key)
        return SimpleNamespace(**{**vars(found), "tokens": found.tokens[:, :-1]})

    with pytest.raises(ShapeError, match=r"tokens of shape \(6, 4\) for 6 prompts, got \(6, 3\)"):
        rollouts(short).next(view())


def test_prompts_longer_than_the_context() -> None:
    """Catches rows that are cut in silence, or that fail after the first compilation."""
    decoder = telic.models.Decoder(
        telic.models.DecoderConfig(vocab_size=262, d_model=8, num_layers=1, num_heads=2, max_length=8)
    )
    long = rollouts(prompts=["a" * 9] * 3)
    with pytest.raises((DataError, ShapeError), match="longer than the decoder's max_length=8"):
        telic.Trainer(GRPOObjective(decoder), "adam", key=0).fit(long, steps=1, log_every=1000)
