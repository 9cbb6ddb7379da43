"""What may be added to a step: each feature is a file, and says what it gains and costs."""
