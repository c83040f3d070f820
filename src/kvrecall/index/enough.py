"""How many tokens key statistics need. In a file of its own, so that the command line's help need not import torch."""

from __future__ import annotations

ENOUGH_TOKENS = 4096
"""Tokens that statistics are gathered from; more tokens change a map by less than its noise."""
