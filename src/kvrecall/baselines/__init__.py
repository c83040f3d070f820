"""The systems that the four are compared with: a file each, or a folder with the index or part that no other method uses."""
