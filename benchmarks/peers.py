"""The small step in other trainers, where they are installed: Keras 3 on JAX, PyTorch by hand and with Ignite."""

import contextlib
import importlib.util
import io
import os
import time
from typing import Any

import numpy as np

from benchmarks import models, sides
from benchmarks.timing import Ratio, Side, ratio, take_turns

EPOCH = 300
"""Steps of one turn of each side."""


def peers(rounds: int) -> list[Ratio]:
    """Measure the small step with accuracy and loss in each trainer there is, against Telic's and the hand-written."""
    data = models.rows(EPOCH)
    params = sides.params_of(models.MLP(), data[0][0])
    forms: dict[str, Side] = {
        "hand": sides.by_hand(sides.cross_entropy(models.MLP()), params, data),
        "telic": sides.of_loop(sides.mlp_loop(), data),
    }
    if _is_there("keras"):
        forms["Keras 3 on JAX"] = _keras(data, 1)
        forms["Keras 3 on JAX, 16 steps per execution"] = _keras(data, 16)
    if _is_there("torch"):
        forms["PyTorch by hand"] = _torch(data)
        if _is_there("ignite"):
            forms["PyTorch with Ignite"] = _ignite(data)
    with contextlib.redirect_stdout(io.StringIO()):
        seconds = take_turns(forms, rounds)
    hand = seconds.pop("hand")
    return [ratio(f"MLP step: {name}", side, hand, units=EPOCH) for name, side in seconds.items()]


def _is_there(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _keras(data: models.Batches, steps_per_execution: int) -> Side:
    os.environ["KERAS_BACKEND"] = "jax"
    import keras

    model: Any = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10)]
    )
    model.compile(
        keras.optimizers.Adam(models.LEARNING_RATE),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        steps_per_execution=steps_per_execution,
    )
    inputs, targets = (np.concatenate(column) for column in zip(*data, strict=True))

    def run() -> float:
        began = time.perf_counter()
        model.fit(inputs, targets, batch_size=64, epochs=1, verbose=0, shuffle=False)
        return time.perf_counter() - began

    return run


def _network() -> tuple[Any, Any, Any]:
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    return model, torch.optim.Adam(model.parameters(), models.LEARNING_RATE), torch.nn.CrossEntropyLoss()


def _tensors(data: models.Batches) -> list[tuple[Any, Any]]:
    import torch

    return [(torch.from_numpy(x), torch.from_numpy(y).long()) for x, y in data]


def _torch(data: models.Batches) -> Side:
    model, optimizer, criterion = _network()
    batches = _tensors(data)

    def run() -> float:
        began = time.perf_counter()
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss = criterion(model(inputs), targets)
            loss.backward()
            optimizer.step()
        return time.perf_counter() - began

    return run


def _ignite(data: models.Batches) -> Side:
    from ignite.engine import Engine
    from ignite.metrics import Accuracy, RunningAverage

    model, optimizer, criterion = _network()
    batches = _tensors(data)

    def step(engine: Any, batch: Any) -> Any:
        del engine
        optimizer.zero_grad()
        prediction = model(batch[0])
        loss = criterion(prediction, batch[1])
        loss.backward()
        optimizer.step()
        return prediction.detach(), batch[1], loss.item()

    engine = Engine(step)
    RunningAverage(output_transform=lambda out: out[2]).attach(engine, "loss")
    Accuracy(output_transform=lambda out: (out[0], out[1])).attach(engine, "accuracy")

    def run() -> float:
        began = time.perf_counter()
        engine.run(batches, max_epochs=1)
        return time.perf_counter() - began

    return run
