"""Two-digit addition as text, second of three: learning from pairs of a right and a wrong answer.

Run it from the repository's root, ``python -m examples.addition_dpo``.
"""

import numpy as np
import optax

import telic
from examples.addition_sft import LENGTH, MODEL, TOKENIZER, exact_match, finetuned, problems
from telic.data import preference_pairs


def pairs(texts):
    """Give (prompt, right answer, wrong answer): wrong by a digit, a carry, or a few."""
    wrong_by = np.random.default_rng(0).choice([-20, -11, -10, -9, -2, -1, 1, 2, 9, 10, 11, 20], len(texts))
    return [
        (prompt, answer, str(abs(int(answer) + int(by)) or 1))
        for (prompt, answer), by in zip(texts, wrong_by, strict=True)
    ]


def training(start, steps: int = 400):
    """Give the trainer that goes on from some variables for some steps, and the pairs."""
    learned, held_out = problems()
    # The last 500 pairs are kept for validation, which is what evaluate reads.
    data = preference_pairs(pairs(learned + held_out), TOKENIZER, length=LENGTH, batch=64, held_out=len(held_out))
    # Pairs alone would also make right answers less likely, as long as wrong ones lose more; a little of what was
    # learned before holds them up.
    loss = {"sigmoid": 1.0, "sft": 0.3}
    objective = telic.objectives.DPOObjective(MODEL, variables=start, beta=0.1, loss_type=loss)
    schedule = optax.cosine_decay_schedule(1e-3, steps)
    return telic.Trainer(objective, telic.optimizers.adamw(schedule), key=0), data


def main(steps: int = 400, sft_steps: int = 500) -> dict[str, float]:
    """Train, and give the share of held-out pairs whose right answer has the higher reward, before and after."""
    start = finetuned(sft_steps)
    trainer, data = training(start, steps)
    state = trainer.fit(data, steps=steps, log_every=150)

    final = trainer.evaluate(data, state=state)
    _, held_out = problems()
    found = {
        "reward_accuracy": float(final["reward_accuracy"]),
        "reward_margin": float(final["reward_margin"]),
        "exact_before": exact_match(start, held_out),
        "exact_after": exact_match(state.variables, held_out),
    }
    print(", ".join(f"{name} {value:.3f}" for name, value in found.items()))
    return found


if __name__ == "__main__":
    main()
