"""Importance weights, losses, returns: torch alone, tensors in and tensors out."""
