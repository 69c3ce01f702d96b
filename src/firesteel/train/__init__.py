"""Training of small DeepSeek-V4 models with quantisation in the loop."""
