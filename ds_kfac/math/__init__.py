"""Tensor routines of K-FAC: no processes, no configuration, no hooks, only torch."""
