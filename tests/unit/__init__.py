"""Tests that need no framework beside PyTorch."""
