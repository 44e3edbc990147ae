"""In which order a machine does what the loop says: as the paper prints it, or sooner."""
