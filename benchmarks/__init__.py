"""Measurements: each script prints a table of ratios and writes a CSV and a PNG."""
