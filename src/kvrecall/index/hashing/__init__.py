"""Locality-sensitive hashes of keys: MagicPIG's sampling (`sampling.py`) and SOCKET's soft collisions (`soft.py`)."""
