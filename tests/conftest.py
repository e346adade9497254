"""Shapes are checked in every test run: jaxtyping annotations of the memory become assertions here, and only here."""

from jaxtyping import install_import_hook

install_import_hook("trace_memory", "beartype.beartype")
