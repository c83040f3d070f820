"""Frameworks that kvrecall plugs into."""
