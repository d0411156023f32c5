"""Ray: pools of devices, groups of workers, dispatch, batches by reference, clean-up."""
