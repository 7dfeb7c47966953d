"""The composition root: where objective, step, loop, driver, data and handlers become one product."""

from telic.compose.loops import Loop
from telic.compose.names import eval_step, evaluator, train_step, trainer
from telic.compose.range_test import RangeTest, find_learning_rate
from telic.compose.trainers import Trainer

__all__ = ["Loop", "RangeTest", "Trainer", "eval_step", "evaluator", "find_learning_rate", "train_step", "trainer"]
