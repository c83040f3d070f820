"""A run as one HTML page: tables and plots, everything inside the file."""
