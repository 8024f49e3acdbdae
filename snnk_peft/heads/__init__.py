"""Task heads fitted in closed form: their features, their statistics, and estimates of their errors."""
