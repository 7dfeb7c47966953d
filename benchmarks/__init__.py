"""Measurements of speed and memory, as ratios to what one would write by hand: ``python -m benchmarks``."""
