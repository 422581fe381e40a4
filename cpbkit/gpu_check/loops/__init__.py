"""Training loops as people write them, each with a fault that is known, or with none; run as scripts, not imported."""
