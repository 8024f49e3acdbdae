"""Stand-ins for a Linear and the activation behind it, in FFN blocks and poolers."""
