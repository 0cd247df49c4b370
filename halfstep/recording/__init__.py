"""Record of a training step: one row on the device, read by the host some steps later."""
