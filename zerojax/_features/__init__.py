"""What attaches to the kernel: each in a file or folder that says what it gains and costs."""
