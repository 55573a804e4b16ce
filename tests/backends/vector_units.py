"""What Inductor knows of the processor, found once for all tests: to try vector instructions takes each process seconds."""

import shutil
import warnings
from pathlib import Path

import graphpp
from graphpp.backends.inductor import InductorCompiler
from graphpp.cache.disk_cache import default_folder


def copy_vector_units(cache: Path) -> None:
    """Write to a new cache which vector instructions work, as the cache of all tests has it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.13 imports what it deprecates
        InductorCompiler(graphpp.Inductor()).find_vector_units()
    shutil.copy(default_folder() / "vector_units.json", cache)
