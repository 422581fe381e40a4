"""What may be said of a forecast: baselines, errors, tests, verdicts, leaks. Uses training, windows, data, config."""
