"""Perturbed-model federated learning of sectorch as a Flower app."""
