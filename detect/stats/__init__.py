"""Robust statistics: residuals against peers, noise, significance, persistence."""
