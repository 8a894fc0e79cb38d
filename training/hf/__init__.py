"""Models of Hugging Face folders, in and out: configuration, weights, layouts."""

from training.hf.families import read_family
from training.hf.loading import load_hf

__all__ = ["load_hf", "read_family"]
