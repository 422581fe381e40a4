"""What measures the kit and no user runs: `python -m benchmarks.NAME [--quick]`, outside the wheel."""
