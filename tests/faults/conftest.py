"""The runs of these tests are few and start again and again: each program is compiled once for all of them."""

from tests.resume.conftest import compiled_once  # noqa: F401 pytest finds it by its name
