"""Metrics, progress, trackers, diagnostics."""
