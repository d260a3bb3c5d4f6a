"""`python -m moefx demo`: a small MoE language model trained twice, original beside compiled."""
