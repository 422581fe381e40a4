"""Models as rows of one matrix, and the one loop that trains them. Uses models, windows, hardware, config."""
