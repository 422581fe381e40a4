"""Measurements that people can repeat: the sweep against the loop in circulation, and the parts against their kind."""
