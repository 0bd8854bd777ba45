"""Tests of the net: layers, parallelism, weights, adapters, generation."""
