"""`cpbkit ...`: arguments, calls, and the showing of what they return."""
