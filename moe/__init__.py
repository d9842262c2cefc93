"""The Mixture-of-Experts layer, usable alone: `from moe import MoE, MoEConfig`."""
