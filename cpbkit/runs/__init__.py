"""A sweep and its folder: plan, workers, progress, results. Uses all rooms below; shows nothing."""
