"""Fine-tuning a pretrained checkpoint with LoRA on conversations, and exporting it as Hugging Face files.

The checkpoint here is made on the spot, so that nothing is downloaded: a small Llama that has read some of the standard
library. With a folder of real weights, `pretrained` is one line and `ByteTokenizer` becomes `load_tokenizer(folder)`.
"""

import random
import tempfile
from pathlib import Path

import jax

import telic
from telic.data import ByteTokenizer, ChatFormat, DataPartition, Role, conversations, pack, standard_library, tokenize
from telic.interop import load_huggingface, save_huggingface
from telic.interop.lora import add_lora
from telic.models import Decoder, DecoderConfig, generate
from telic.objectives import LMObjective

TOKENIZER = ByteTokenizer()


def pretrained(folder: Path, steps: int) -> None:
    """Write a checkpoint of Llama's shape: a folder with config.json and safetensors."""
    config = DecoderConfig(
        vocab_size=TOKENIZER.vocab_size, d_model=64, num_layers=2, num_heads=4, num_kv_heads=2, d_ff=192, max_length=256
    )
    decoder = Decoder(config)
    data = pack(tokenize(standard_library("train", max_bytes=300_000).values(), TOKENIZER), length=64, batch=16)
    trainer = telic.Trainer(LMObjective(decoder), telic.optimizers.adamw(3e-3), key=0)
    state = trainer.fit(data, steps=steps, log_every=0)
    save_huggingface(folder, decoder, state.variables, model_type="llama")


def chats(count: int, seed: int) -> list[list[dict[str, str]]]:
    """Give conversations of one turn: a word, and the word in capitals."""
    draw = random.Random(seed)
    words = ["".join(draw.choice("abcde") for _ in range(3)) for _ in range(count)]
    return [[{"role": "user", "content": w}, {"role": "assistant", "content": w.upper()}] for w in words]


def training(decoder: Decoder, weights: dict[str, object]):
    """Give the decoder with adapters, the trainer that moves them alone, the conversations, and rows of some."""
    lora = add_lora(decoder, rank=8, modules=("**/attention/*", "**/mlp/*"))
    documents = conversations(chats(600, seed=0), TOKENIZER)
    data = pack(documents, length=64, batch=16, whole=True, needs_roles=(Role.ASSISTANT,))
    rows = next(iter(data.train(DataPartition())))["tokens"][:, :-1]
    variables = lora.init(jax.random.key(1), rows, weights)

    # Only what the assistant says is learned, and only the adapters move.
    objective = LMObjective(lora.model, variables=variables, loss_roles=(Role.ASSISTANT,), decode=TOKENIZER.decode)
    trainer = telic.Trainer(objective, telic.optimizers.adamw(1e-2), key=0, trainable=lora.trainable)
    return lora, trainer, data, rows


def main(steps: int = 300, pretraining_steps: int = 100) -> dict[str, float]:
    """Load, fine-tune the adapters, merge, export, load again; give the share of right answers before and after."""
    folder = Path(tempfile.mkdtemp())
    pretrained(folder / "base", pretraining_steps)
    decoder, weights = load_huggingface(folder / "base")
    lora, trainer, data, rows = training(decoder, weights)
    state = trainer.fit(data, steps=steps, log_every=100)

    merged = lora.merge(state.variables, inputs=rows[:2])
    save_huggingface(folder / "tuned", lora.base, merged, model_type="llama")
    tuned, tuned_weights = load_huggingface(folder / "tuned")
    shares = {"before": right_answers(decoder, weights), "after": right_answers(tuned, tuned_weights)}
    print(f"right answers: {shares['before']:.0%} before, {shares['after']:.0%} after; exported to {folder / 'tuned'}")
    return shares


def right_answers(decoder: Decoder, weights: dict[str, object]) -> float:
    """Give the share of new words that the model writes in capitals."""
    held_out = chats(50, seed=1)
    prompts = [ChatFormat().prompt(chat[:1], TOKENIZER) for chat in held_out]
    made = generate(decoder, weights, prompts, max_new_tokens=4, temperature=0, stop_tokens=(TOKENIZER.eos_id,))
    answers = [TOKENIZER.decode(ids) for ids in made.texts()]
    return sum(a == chat[1]["content"] for a, chat in zip(answers, held_out, strict=True)) / len(held_out)


if __name__ == "__main__":
    main()
