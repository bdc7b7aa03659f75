"""Tests of ds_kfac; a package so that worker processes can import test modules by name."""
