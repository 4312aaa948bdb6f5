"""Whole parameters, gradients and optimizer states."""
