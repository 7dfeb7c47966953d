"""Accumulation over microbatches of unequal token counts against transformers' whole-batch loss and gradient."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from telic.contract import Objective, Step
from telic.mean import Mean
from tests.golden import cases
from tests.unit.train.tiny import split, step_of

CASES = cases("lm_accumulation")


class NextToken(Objective):
    """``logits = table[ids] @ head``; a label of -100 weighs nothing."""

    def __init__(self, table: Any, head: Any):
        self.start = {"table": table, "head": head}

    def init(self, key: Any, variables: Any = None) -> Any:
        del key, variables
        return {"params": self.start}

    def loss(self, variables: Any, batch: Any, step: Step) -> Any:
        del step
        params = variables["params"]
        labels = batch["labels"][:, 1:]
        logits = params["table"][batch["input_ids"]][:, :-1] @ params["head"]
        picked = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[..., None], -1)[..., 0]
        return Mean.of(jax.nn.logsumexp(logits, -1) - picked, labels != -100)


@pytest.mark.parametrize("double", [True, False], ids=["float64", "float32"])
@pytest.mark.parametrize("case", CASES)
def test_the_window_is_the_whole_batch(case: dict[str, Any], double: bool) -> None:
    """S01, S04, XS002: the mean of microbatch means, which this file shows beside the right value."""
    rtol, atol = (1e-9, 1e-12) if double else (2e-5, 2e-6)
    with jax.enable_x64(double):
        given, out = case["in"], case["out"]
        dtype = jnp.float64 if double else jnp.float32
        objective = NextToken(*(jnp.asarray(given[n], dtype) for n in ("table", "head")))
        pieces = split({n: given[n] for n in ("input_ids", "labels")}, case["config"]["micro_batch_rows"])
        step = step_of(objective, accumulate=len(pieces))
        state, losses = step.init(pieces[0]), []
        for piece in pieces:
            result = step.step(state, piece)
            state = result.state
            losses.append(result.outputs["statistics"])
        gradient = state.opt_state[0].trace
        np.testing.assert_allclose(gradient["table"], out["grad_table_whole"], rtol=rtol, atol=atol)
        np.testing.assert_allclose(gradient["head"], out["grad_head_whole"], rtol=rtol, atol=atol)
        assert sum(float(m.mass) for m in losses) == out["token_count"]
        total = sum(float(m.total) for m in losses)
        np.testing.assert_allclose(total / out["token_count"], out["loss_whole"], rtol=max(rtol, 1e-9))
        for i, m in enumerate(losses):
            np.testing.assert_allclose(m.total, out[f"micro_{i}"]["loss_sum"], rtol=rtol)
