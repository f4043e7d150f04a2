"""Measurements and plots."""
