"""Log lines around errors and odd metrics."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import telic
from telic.errors import ContractError

BATCHES = [(np.full((4,), i, np.float32), np.zeros((4,), np.float32)) for i in range(1, 7)]


def test_a_line_does_not_wait_for_the_next_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches the line of a run that raised, written by the run after it, or read from a driver that is gone."""
    model = (lambda key, x: {"w": jnp.ones(())}, lambda params, x: params["w"] * x)
    loop = telic.trainer(model, "mean_absolute_error", telic.optimizers.sgd(0.0), log=2)
    fails = [True]

    def fail(state: Any) -> None:
        if fails.pop():
            raise ZeroDivisionError

    loop.handle_event("iteration_completed", fail, telic.once(3))
    with pytest.raises(ZeroDivisionError):
        loop.run(BATCHES)
    assert capsys.readouterr().out == "Epoch: 0, Batch: 1, loss: 1.5000000\n"
    fails.append(False)
    loop.run(BATCHES[:2])
    assert capsys.readouterr().out == "Epoch: 0, Batch: 1, loss: 1.5000000\n"


@pytest.mark.parametrize(("wrong", "kind"), [("fast", "str 'fast'"), (None, "NoneType"), ([1.0], "list")])
def test_a_metric_of_text_is_named(wrong: Any, kind: str) -> None:
    """Catches text in Aux.metrics told as a failure of jax, without the name of the metric."""

    class Speaking(telic.Objective):
        def init(self, key: Any, variables: Any = None) -> Any:
            return {"params": {"w": jnp.ones(())}}

        def loss(self, variables: Any, batch: Any, step: Any) -> Any:
            return variables["params"]["w"] * batch[0].mean(), telic.Aux(metrics={"speed": wrong})

    with pytest.raises(ContractError, match=rf"Aux.metrics\['speed'\] must be a scalar or a Mean, got {kind}"):
        telic.Trainer(Speaking(), optax.sgd(0.1), key=0).fit(BATCHES, steps=1)
