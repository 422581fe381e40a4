"""From bars to windows: columns, splits by time, scaling, batches gathered on the device."""
