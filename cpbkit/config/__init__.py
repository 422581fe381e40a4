"""What a run is: frozen settings, and the table of named ones. Uses nothing but errors."""
