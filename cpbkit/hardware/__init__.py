"""What machine is this: environment, chips, memory, and the record of it over time. Uses nothing but errors."""
