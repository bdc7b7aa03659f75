"""Slow, dense, single-process float64 references; they import nothing from the package."""

from tests.reference.dense_kfac import DenseKFAC
from tests.reference.state import AuxOptions

__all__ = ["AuxOptions", "DenseKFAC"]
