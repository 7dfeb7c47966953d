"""Telic trains JAX models from objective functions."""
