"""Tests of the multi-process test harness."""
