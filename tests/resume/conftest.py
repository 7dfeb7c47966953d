"""Each program is compiled once for all tests here: they start the same few runs again and again."""

from collections.abc import Iterator

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

OPTIONS = {
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


@pytest.fixture(scope="session", autouse=True)
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    directory = str(tmp_path_factory.mktemp("compiled"))
    options = {"jax_compilation_cache_dir": directory, **OPTIONS}
    before = {name: getattr(jax.config, name) for name in options}
    for name, value in options.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in options.items():
            patch.setenv(name.upper(), str(value))
        yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
