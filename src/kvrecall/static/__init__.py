"""Static sets: tokens that every step attends to until the next choice, and the schedule of choices."""
