"""Measuring methods: traces of real models and what a method finds in them."""
