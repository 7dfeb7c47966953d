"""Two-digit addition as text, first of three: a small decoder learns sums from examples, and stops half-way.

The next two programs go on from here: `addition_dpo` learns from pairs of a right and a wrong answer, `addition_grpo`
from nothing but whether an answer is right.
"""

import functools

import numpy as np
import optax

import telic
from telic.data import ByteTokenizer, columns
from telic.models import Decoder, DecoderConfig, generate

TOKENIZER = ByteTokenizer()
MODEL = Decoder(DecoderConfig(vocab_size=TOKENIZER.vocab_size, d_model=64, num_layers=2, num_heads=4, max_length=16))
LENGTH = 10

#: Continues prompts until the end of text, four tokens at most: "142" and the end.
answers = functools.partial(generate, MODEL, stop_tokens=(TOKENIZER.eos_id,))


def problems():
    """Give all 8,100 problems as texts with their answers, (learned, held out); 500 are held out."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    order = np.random.default_rng(0).permutation(len(pairs))
    texts = [(f"{a}+{b}=", str(a + b)) for a, b in (pairs[i] for i in order)]
    return texts[:-500], texts[-500:]


def rows(texts):
    """Give problems and answers as rows of tokens; the answer and its end are what is learned."""
    found = {name: np.zeros((len(texts), LENGTH), np.int32) for name in ("tokens", "segment_ids", "weights")}
    for i, (prompt, answer) in enumerate(texts):
        ids = [*TOKENIZER.encode(prompt), *TOKENIZER.encode(answer), TOKENIZER.eos_id]
        found["tokens"][i, : len(ids)] = ids
        found["segment_ids"][i, : len(ids)] = 1
        found["weights"][i, len(prompt) : len(ids)] = 1
    return found


def exact_match(variables, texts, *, temperature=0.0) -> float:
    """Give the share of problems whose answer is right to the letter."""
    prompts = [TOKENIZER.encode(prompt) for prompt, _ in texts]
    drawn = answers(variables, prompts, max_new_tokens=4, temperature=temperature, key=0)
    is_right = [TOKENIZER.decode(ids) == answer for ids, (_, answer) in zip(drawn.texts(), texts, strict=True)]
    return float(np.mean(is_right))


def training(steps: int = 500):
    """Give the trainer for some steps, and the right answers it learns from; 500 problems are held out."""
    learned, held_out = problems()
    schedule = optax.warmup_cosine_decay_schedule(0.0, 2e-3, min(100, steps // 5), steps, 2e-4)
    objective = telic.objectives.LMObjective(MODEL, decode=TOKENIZER.decode)
    trainer = telic.Trainer(objective, telic.optimizers.adamw(schedule), key=0)
    return trainer, columns(rows(learned + held_out), batch=128, held_out=len(held_out))


def finetuned(steps: int = 500):
    """Give the variables after some steps on right answers."""
    trainer, data = training(steps)
    return trainer.fit(data, steps=steps, log_every=150).variables


def main(steps: int = 500) -> dict[str, float]:
    """Train, and give the shares of right answers to held-out problems: the likeliest answer, and a drawn one."""
    variables = finetuned(steps)
    _, held_out = problems()
    found = {
        "likeliest": exact_match(variables, held_out),
        "drawn": exact_match(variables, held_out, temperature=1.0),
    }
    print(f"right answers to held-out problems: likeliest {found['likeliest']:.3f}, drawn {found['drawn']:.3f}")
    return found


if __name__ == "__main__":
    main()
