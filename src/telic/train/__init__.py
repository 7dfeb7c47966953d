"""The step: attempt, accept or reject, commit. Pure functions of state and batch; no events, no jit."""
