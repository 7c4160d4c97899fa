"""Experts of Mixture-of-Experts models: their ranks, their load and the messages between them."""
