"""Two-digit addition as text, last of three: learning from nothing but whether an answer is right.

Run it from the repository's root, ``python -m examples.addition_grpo``.
"""

import optax

import telic
from examples.addition_sft import MODEL, TOKENIZER, answers, exact_match, finetuned, problems
from telic.data import Rollouts


def is_right(prompts, completions, *, answer):
    """Give 1 for an answer that is right to the letter, and 0 for all others."""
    return [float(found == wanted) for found, wanted in zip(completions, answer, strict=True)]


def training(start, steps: int = 500):
    """Give the trainer that goes on from some variables for some steps, and the data it draws itself."""
    learned, _ = problems()
    prompts, wanted = zip(*learned, strict=True)
    # Drawn with the weights as they are at each update, eight answers for each of 64 problems.
    data = Rollouts(
        {"prompt": prompts, "answer": wanted},
        TOKENIZER,
        generate=answers,
        reward=is_right,
        group=8,
        batch=64,
        max_new_tokens=4,
    )
    objective = telic.objectives.GRPOObjective(MODEL, variables=start, aggregate="token_mean")
    # Few answers say little about a problem, so updates are noisy: small steps at first, and smaller ones at the end.
    schedule = optax.warmup_cosine_decay_schedule(0.0, 8e-4, min(20, steps // 5), steps)
    return telic.Trainer(objective, telic.optimizers.adamw(schedule, b2=0.99), key=0), data


def main(steps: int = 500, sft_steps: int = 500) -> dict[str, float]:
    """Train, and give the mean reward of answers drawn to held-out problems, before and after."""
    start = finetuned(sft_steps)
    trainer, data = training(start, steps)
    state = trainer.fit(data, steps=steps, log_every=100)

    _, held_out = problems()
    found = {
        "reward_before": exact_match(start, held_out, temperature=1.0),
        "reward_after": exact_match(state.variables, held_out, temperature=1.0),
    }
    print(f"mean reward on held-out problems: {found['reward_before']:.3f}, after GRPO {found['reward_after']:.3f}")
    return found


if __name__ == "__main__":
    main()
