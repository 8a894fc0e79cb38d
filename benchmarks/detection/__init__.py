"""Scores the detector on simulated jobs against ground truth that it cannot see."""
