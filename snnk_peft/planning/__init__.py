"""`plan`: choose the parts of a conversion from the cost and the error of each."""
