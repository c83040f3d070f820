"""Who drives the layers: each backend says which sequences, which tokens and which rows."""
