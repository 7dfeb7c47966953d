"""The contract's names, where seed programs look for them."""

from telic.contract import Aux, Objective, Step, mean_loss, scalar_loss
from telic.ema import EMASpec
from telic.mean import Mean, Rows, Terms

__all__ = ["Aux", "EMASpec", "Mean", "Objective", "Rows", "Step", "Terms", "mean_loss", "scalar_loss"]
