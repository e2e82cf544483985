"""What an engine artifact is: the plan file, its manifest, checkpoint hashes, the lock file, calibration tables."""
