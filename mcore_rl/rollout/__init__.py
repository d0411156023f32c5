"""Generation of a run: its servers as one object, routing, restarts, groups, new weights."""
