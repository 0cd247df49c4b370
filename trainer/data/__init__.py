"""What a step is trained on: which examples, who reads them, and how they come to the device."""
