"""Proving that an objective of your own keeps the contract."""

from telic.testing.objectives import Check, ObjectiveFault, Report, check_objective

__all__ = ["Check", "ObjectiveFault", "Report", "check_objective"]
