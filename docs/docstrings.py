"""How the reference reads docstrings: the house writes sections one below the other, and griffe wants air between them.

`Example:` is the section that griffe calls Examples.
"""

import re
from typing import Any

import griffe

_HEADER = re.compile(r"\n+^(Args|Attributes|Returns|Yields|Raises|Examples?|Source):", re.MULTILINE)


class Sections(griffe.Extension):
    """Make every section one that griffe knows, so that it is shown as a list, and an example as code."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Set the sections of one docstring apart."""
        if obj.docstring is not None:
            apart = _HEADER.sub(r"\n\n\1:", obj.docstring.value)
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", apart, flags=re.MULTILINE)
