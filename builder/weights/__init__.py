"""Weights: recipes as data, executed streaming from a checkpoint into a plan."""
