"""The commands, one module each, in the order the help shows them.

A new command is a module here with one function `command`, and its name in `COMMANDS`: `telic verify-resume` is
`verify_resume.py`. The function's signature is what the command takes (tyro reads it), its docstring is the help, and
the number it returns is the exit code: 0 did it, 1 could not. A wrong call raises `telic.cli.asked.UsageError`.
These modules are imported for every help text, so they import nothing slow: what needs JAX is loaded inside `command`,
with `import_module`.
"""

COMMANDS = (
    "demo",
    "new",
    "train",
    "evaluate",
    "sample",
    "export",
    "verify",
    "inspect",
    "profile",
    "verify-resume",
    "replay",
    "runs",
    "launch",
    "report",
    "watch",
    "board",
    "doctor",
    "completion",
)
"""Names as they are typed."""
