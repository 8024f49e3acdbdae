"""Pages of the studies: `page` renders the stored reports of a study, and draws the figures next to them."""
