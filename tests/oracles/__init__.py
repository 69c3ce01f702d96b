"""What engine results are compared with: other implementations, and a driver for single passes."""
