"""Answers before and after a run: the doctor, plans, the sample viewer, reports."""
