"""What looks into a training: overflows replayed, gradients binned, recipes checked."""
