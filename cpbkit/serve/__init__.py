"""A small server of a run's page, for this machine; it may use every room below it but the terminal's."""
