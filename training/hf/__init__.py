"""Models of Hugging Face folders, in and out: configuration, weights, layouts."""
