"""A mark for tests in which ``torch.compile`` generates C++ code."""

import pytest

from benchmarks.framework import find_cpp_compiler

__all__ = ["NEEDS_CPP_COMPILER"]

NEEDS_CPP_COMPILER = pytest.mark.skipif(
    find_cpp_compiler() is None,
    reason="torch.compile needs a C++ compiler on a CPU: install g++, or set CXX",
)
