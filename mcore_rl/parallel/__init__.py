"""Ranks, process groups, and their rendezvous."""
