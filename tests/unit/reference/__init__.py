"""Checks of the references themselves, by hand and by identity."""
