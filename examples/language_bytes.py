"""A byte-level decoder on the source of Python's standard library: bits per byte on unseen modules, and samples."""

import telic
from telic.data import ByteTokenizer, pack, standard_library, tokenize
from telic.metrics import perplexity
from telic.models import Decoder, DecoderConfig, generate
from telic.objectives import LMObjective

TOKENIZER = ByteTokenizer()
PROMPTS = ["def __init__(self", "import ", "class Error("]


def make_data(length: int, batch: int) -> telic.data.Dataset:
    """Pack the library into rows; one module in 20, chosen by its name, is held out."""
    train = tokenize(standard_library("train").values(), TOKENIZER)
    held_out = tokenize(standard_library("held_out", max_bytes=60_000).values(), TOKENIZER)
    return pack(train, length=length, batch=batch, val=held_out)


def main(steps: int = 400, length: int = 128) -> dict[str, float]:
    """Train, print samples, and give the scores of the modules held out."""
    data = make_data(length, batch=16)
    config = DecoderConfig(
        vocab_size=TOKENIZER.vocab_size, d_model=96, num_layers=3, num_heads=4, d_ff=256, tied=True, max_length=512
    )
    decoder = Decoder(config)
    objective = LMObjective(decoder, token_bytes=TOKENIZER.token_bytes, decode=TOKENIZER.decode)
    schedule = telic.optimizers.warmup_cosine(3e-3, warmup=20, steps=steps)
    trainer = telic.Trainer(objective, telic.optimizers.adamw(schedule), key=0)
    state = trainer.fit(data, steps=steps, log_every=100)

    scores = trainer.evaluate(data, state=state, metrics=["bits_per_byte", perplexity(reads=("nll",))])
    print(f"held-out modules: {scores['bits_per_byte']:.3f} bits per byte, perplexity {scores['perplexity']:.2f}")
    prompts = [TOKENIZER.encode(prompt) for prompt in PROMPTS]
    made = generate(decoder, state.variables, prompts, max_new_tokens=80, temperature=0.6, key=1)
    for prompt, ids in zip(PROMPTS, made.texts(), strict=True):
        print(f"--- {prompt}{TOKENIZER.decode(ids)}")
    return scores


if __name__ == "__main__":
    main()
