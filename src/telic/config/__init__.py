"""Configuration: runs as values, settings as frozen dataclasses, and the names that a file may use.

A program for ``telic train`` defines ``build(settings) -> Run``; a file of settings names what is registered with
`register`. `open_recipe` reads either.
"""

from telic.config.recipes import Recipe, open_recipe
from telic.config.registry import Choice, names, register
from telic.config.running import Run

__all__ = ["Choice", "Recipe", "Run", "names", "open_recipe", "register"]
