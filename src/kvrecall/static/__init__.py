"""Static sets: tokens that stay attended until they are chosen anew, and when that is."""
